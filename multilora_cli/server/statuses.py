"""What the engine said last of every adapter version: where it is, and what it costs."""

from collections import Counter
from collections.abc import Iterator, MutableMapping

from multilora_cli.engine.messages import AdapterStatus

_HELD = ("warm", "hot")


class Statuses(MutableMapping[str, AdapterStatus]):
    """By digest. Those that are asked for often are kept beside it: the engine may know ten
    thousand versions, and a scrape must not look at each."""

    def __init__(self) -> None:
        self._all: dict[str, AdapterStatus] = {}
        self._held: dict[str, None] = {}
        self._pinned: dict[str, None] = {}
        self.tiers: Counter[str] = Counter()  # how many are in each

    @property
    def held(self) -> Iterator[AdapterStatus]:
        """Those in host memory or on the device now, as they are when they come."""
        return (self._all[digest] for digest in list(self._held) if digest in self._all)

    @property
    def pinned(self) -> Iterator[AdapterStatus]:
        """Those that are kept where they are now."""
        return (self._all[digest] for digest in list(self._pinned) if digest in self._all)

    def __getitem__(self, digest: str) -> AdapterStatus:
        return self._all[digest]

    def __setitem__(self, digest: str, status: AdapterStatus) -> None:
        old = self._all.get(digest)
        if old is not None:
            self.tiers[old.tier] -= 1
        self._all[digest] = status
        self.tiers[status.tier] += 1
        _keep(self._held, digest, status.tier in _HELD)
        _keep(self._pinned, digest, status.pinned)

    def __delitem__(self, digest: str) -> None:
        self.tiers[self._all.pop(digest).tier] -= 1
        _keep(self._held, digest, False)
        _keep(self._pinned, digest, False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _keep(some: dict[str, None], digest: str, belongs: bool) -> None:
    if belongs:
        some[digest] = None
    else:
        some.pop(digest, None)
