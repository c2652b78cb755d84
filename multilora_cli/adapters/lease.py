"""What a sequence holds of its adapter, and what an adapter is to the engine."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

Pin = Literal["hot", "warm"]
# What keeps a lease from running: its bytes are on their way, no slot or no pages are free, or an
# evict call that came before it has to be finished first.
Obstacle = Literal["load", "slot", "pages", "drain"]


class Version(Protocol):
    """One exact version of an adapter: engine.messages.AdapterRef."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def files(self) -> tuple[tuple[int, int, int, int, int], ...]: ...


class State(Enum):
    """Where an adapter is. Only HOT can be run; WARM and below hold no pages."""

    STORED = "stored"
    LOADING = "loading"
    WARM = "warm"
    COPYING = "copying"
    HOT = "hot"
    FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """Why an adapter cannot be had, and from when on it is tried again (monotonic seconds)."""

    reason: str
    retry_at: float


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's claim on one version, from admission to its end.

    `order` is the sequence's place in the order, `serial` the claim's own number. A running lease
    holds the slot; a waiting one asks for it. `asleep` says what it waits for, its adapter's bytes
    or room on the device, while that and what the adapter takes stay as they are: None once either
    may have changed.
    """

    digest: str
    order: int
    serial: int
    running: bool = False
    released: bool = False
    asleep: Literal["load", "room"] | None = None


@dataclass(frozen=True)
class Standing:
    """What one adapter costs and how it is used."""

    digest: str
    state: State
    pages: int
    host_bytes: int
    references: int
    pin: Pin | None
    loads: int
    hits: int
    idle_s: float  # since the last use; -1: never used
    detail: str = ""
    load_s: float = 0.0  # the last load took so long
    copy_s: float = 0.0  # and the last way to the device


@dataclass(frozen=True)
class Done:
    """The outcome of a load or evict call: `failure` is set where it failed."""

    call_id: int
    standing: Standing | None
    failure: str | None = None
    freed_pages: int = 0
    freed_host_bytes: int = 0


Tier = Literal["stored", "warm", "hot", "failed"]
_TIERS: dict[State, Tier] = {
    State.STORED: "stored",
    State.LOADING: "stored",
    State.WARM: "warm",
    State.COPYING: "warm",
    State.HOT: "hot",
    State.FAILED: "failed",
}


def tier_of(state: State) -> Tier:
    """The tier an adapter counts in; on its way up, the one it comes from."""
    return _TIERS[state]
