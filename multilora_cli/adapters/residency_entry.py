"""One digest on the ladder, and the host tier it comes from."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from multilora_cli.adapters.hot_tier import Image, Placement
from multilora_cli.adapters.lease import Failure, Lease, Pin, Standing, State, Version
from multilora_cli.memory.eviction import EvictionRule, decayed
from multilora_cli.memory.page_pool import IntegrityError

_COPY_BYTES_PER_S = 20e9  # host to device over PCIe 4 x16; only weighs eviction
LOAD_S = 0.015  # reading and converting 27 MB from page cache, until measured
NOBODY = 1 << 128  # the place in the order of what nobody waits for


class NoHostRoom(Exception):
    """Every warm image is in use; the load is tried again when one is let go."""


class WarmTier(Protocol):
    """Images in host memory, within a byte budget; one that is held stays."""

    def load(self, version: Version) -> Image:
        """On a loader thread: read, check and convert; the image is held once. NoHostRoom."""
        ...

    def hold(self, digest: str) -> Image | None:
        """The image, held once more; None: it is not there."""
        ...

    def release(self, digest: str) -> None:
        """Give one hold back."""
        ...

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep the image although nobody holds it, or no longer."""
        ...

    def drop(self, digest: str) -> int:
        """Forget an image nobody holds; bytes freed."""
        ...

    def nbytes(self, digest: str) -> int:
        """Bytes of the image; 0: it is not there."""
        ...

    def take_left(self) -> list[str]:
        """Digests whose images gave way to others since the last call."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no image takes."""
        ...


@dataclass(frozen=True)
class Call:
    """A load call that waits for its tier."""

    call_id: int
    hot: bool
    order: int


@dataclass(frozen=True)
class Drain:
    """An evict call: leases older than `serial` end first."""

    call_id: int
    serial: int
    cold: bool
    purge: bool


@dataclass(slots=True, eq=False)
class Entry:
    """One digest."""

    version: Version
    state: State = State.STORED
    image: Image | None = None  # held by us until it was copied to where somebody wants it
    placement: Placement | None = None
    loading: "Future[Image] | None" = None
    failure: Failure | None = None
    failures: int = 0
    tried_at: int = -1  # count of host releases when the last load began
    blocked_at: int = -1  # the same of the last one, where it found no room
    leases: set[Lease] = field(default_factory=set)
    oldest: int | None = None  # of the leases that wait, see waiting_order; None: look again
    running: int = 0
    pin: Pin | None = None
    priority: int = 0
    calls: list[Call] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)
    loads: int = 0
    hits: int = 0
    load_s: float = LOAD_S
    started_at: float = 0.0  # of the last load or copy
    copy_s: float = 0.0
    uses: float = 0.0
    used_at: float = -1.0
    score: float = 0.0
    is_guess: bool = False  # hot by prefetch, and not used since
    num_bytes: int = 0  # of the image, once it was built

    @property
    def digest(self) -> str:
        """The identity of the version."""
        return self.version.digest

    def enter(self, state: State, now: float) -> None:
        """It is in another state now; a copy ends once steps may use the adapter."""
        if state is State.COPYING:
            self.started_at = now
        elif state is State.HOT:
            self.copy_s = now - self.started_at
        self.state = state

    def may_run(self, lease: Lease) -> bool:
        """A lease taken after an evict call waits until the adapter was evicted."""
        return all(lease.serial < drain.serial for drain in self.drains)

    def waiting_order(self) -> int:
        """Place in the order of the first lease that waits and may run; NOBODY: none."""
        if self.oldest is None:
            waiting = (x.order for x in self.leases if not x.running and self.may_run(x))
            self.oldest = min(waiting, default=NOBODY)
        return self.oldest

    def leases_changed(self) -> None:
        """To be called after every change of leases, of their state, or of drains."""
        self.oldest = None

    def sleep(self, lease: Lease) -> None:
        """Let `lease` wait until something changes that decides whether and when it may run."""
        if not self.drains and self.state in (State.STORED, State.LOADING, State.WARM):
            lease.asleep = "room" if self.state is State.WARM else "load"

    def wake(self) -> None:
        """To be called after changes of state or image, and of what others have pinned. A drain
        changes nothing for the leases that were there before it, and others do not sleep."""
        for lease in self.leases:
            lease.asleep = None

    def wants_hot(self) -> bool:
        """Whether a lease, a call or a pin asks for the device."""
        return (
            any(call.hot for call in self.calls)
            or (self.pin == "hot" and not self.drains)
            or self.waiting_order() < NOBODY
        )

    def demand(self) -> int | None:
        """How early it is asked for, as a place in the order; None: not at all."""
        order = min((call.order for call in self.calls), default=NOBODY)
        order = min(order, self.waiting_order())
        if order < NOBODY:
            return order
        return NOBODY - 1 if self.pin and not self.drains else None

    @property
    def is_settled(self) -> bool:
        """Whether nothing has to be done for it between steps."""
        if self.is_moving or self.drains or self.calls:
            return False
        if self.state in (State.FAILED, State.HOT):
            return True
        return (self.state is State.WARM and not self.wants_hot()) or self.demand() is None

    @property
    def is_moving(self) -> bool:
        """Whether a load or copy is on its way; steps may use an adapter that is being copied."""
        copying = self.state is State.HOT and self.image is not None
        return copying or self.state in (State.LOADING, State.COPYING)

    @property
    def is_idle(self) -> bool:
        """Whether it may leave the device: it is all there, nobody runs it, nothing pins it."""
        is_there = self.state is State.HOT and not self.is_moving
        return is_there and self.running == 0 and self.pin != "hot"

    def touch(self, now: float, rule: EvictionRule, *, is_warm: bool) -> None:
        """It is used now."""
        self.uses = self.uses_at(now) + 1.0
        self.used_at = now
        self.rate(now, rule, is_warm=is_warm)

    def rate(self, now: float, rule: EvictionRule, *, is_warm: bool) -> None:
        """What it is worth in the pool from here on."""
        pages = len(self.placement.pages) if self.placement is not None else 1
        self.score = rule.score(self.uses_at(now), self.reload_s(is_warm=is_warm), pages)

    def uses_at(self, now: float) -> float:
        """How often it was used, what is long ago counted less."""
        return decayed(self.uses, now - self.used_at) if self.used_at >= 0 else 0.0

    def standing(self, now: float, host_bytes: int) -> Standing:
        """What it costs and how it is used."""
        return Standing(
            digest=self.digest,
            state=self.state,
            pages=len(self.placement.pages) if self.placement is not None else 0,
            host_bytes=host_bytes,
            references=len(self.leases),
            pin=self.pin,
            loads=self.loads,
            hits=self.hits,
            idle_s=now - self.used_at if self.used_at >= 0 else -1.0,
            detail=self.failure.reason if self.failure is not None else "",
            load_s=self.load_s if self.loads else 0.0,
            copy_s=self.copy_s,
        )

    def reload_s(self, *, is_warm: bool) -> float:
        """Seconds to have it hot again: a copy, and a load where no warm image is left."""
        if self.placement is None:
            return self.load_s
        plan = self.placement.plan
        copy_s = plan.num_pages * plan.page_bytes / _COPY_BYTES_PER_S
        return copy_s if is_warm else copy_s + self.load_s

    def check_integrity(self) -> None:
        """State, holds and leases agree."""
        remembered, self.oldest = self.oldest, None
        if remembered not in (None, self.waiting_order()):
            raise IntegrityError(f"{self.version.name}: its oldest lease is not {remembered}")
        who = f"{self.version.name} ({self.digest[:12]}) is {self.state.value}"
        running = sum(lease.running for lease in self.leases)
        if running != self.running or any(lease.released for lease in self.leases):
            raise IntegrityError(f"{who}: {running} leases run, {self.running} counted")
        if self.running and self.state is not State.HOT:
            raise IntegrityError(f"{who} and runs")
        if (self.placement is not None) != (self.state in (State.COPYING, State.HOT)):
            raise IntegrityError(f"{who}, its place says otherwise")
        if (self.loading is not None) != (self.state is State.LOADING):
            raise IntegrityError(f"{who}, its loader says otherwise")
        if self.image is not None and self.state not in (State.WARM, State.COPYING, State.HOT):
            raise IntegrityError(f"{who}, its image is held")
