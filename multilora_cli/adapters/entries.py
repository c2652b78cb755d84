"""The entries of a registry by name, and which of them share a content."""

from collections.abc import Iterable

from multilora_cli.adapters.entry import AdapterEntry


class Entries:
    """One entry a name, whatever its case, in order of arrival. The registry's lock guards it."""

    def __init__(self) -> None:
        self._by_name: dict[str, AdapterEntry] = {}
        self.num_resolved = 0  # names that patterns brought in
        self._by_digest: dict[str, dict[str, None]] = {}  # names, the oldest first

    def get(self, name: str) -> AdapterEntry | None:
        """The entry of this name or of its twin in another case."""
        return self._by_name.get(name.lower())

    def all(self) -> tuple[AdapterEntry, ...]:
        """Every entry."""
        return tuple(self._by_name.values())

    def holds(self, digest: str) -> bool:
        """Whether any name stands for this content."""
        return digest in self._by_digest

    def of_digest(self, digest: str) -> list[AdapterEntry]:
        """The entries that stand for this content, the latest last."""
        return [self._by_name[key] for key in self._by_digest.get(digest, ())]

    def put(self, entry: AdapterEntry) -> None:
        """Let the name stand for `entry`, in the place it had."""
        key = entry.name.lower()
        self._forget_version(key)
        self._by_name[key] = entry
        self.num_resolved += entry.request.via == "pattern"
        if entry.digest is not None:
            self._by_digest.setdefault(entry.digest, {})[key] = None

    def arrange(self, names: Iterable[str]) -> None:
        """Order the entries of `names` as given, behind all others."""
        for key in (name.lower() for name in names):
            if (entry := self._by_name.pop(key, None)) is not None:
                self._by_name[key] = entry

    def remove(self, name: str) -> None:
        """Forget a name that is there."""
        self._forget_version(name.lower())
        del self._by_name[name.lower()]

    def check_integrity(self) -> None:
        """All views agree. Raises ValueError."""
        resolved = sum(entry.request.via == "pattern" for entry in self._by_name.values())
        if resolved != self.num_resolved:
            raise ValueError(f"{self.num_resolved} names of patterns are counted, not {resolved}")
        found: dict[str, set[str]] = {}
        for key, entry in self._by_name.items():
            if entry.digest is not None:
                found.setdefault(entry.digest, set()).add(key)
        if found != {digest: set(keys) for digest, keys in self._by_digest.items()}:
            raise ValueError("the names by digest are not those of the entries")

    def _forget_version(self, key: str) -> None:
        old = self._by_name.get(key)
        if old is None:
            return
        self.num_resolved -= old.request.via == "pattern"
        if old.digest is not None:
            keys = self._by_digest[old.digest]
            del keys[key]
            if not keys:
                del self._by_digest[old.digest]
