"""The adapters that something has to be done for between steps."""

from collections.abc import Container, Iterator

from multilora_cli.adapters.residency_entry import Entry


class Pending:
    """In the order in which they came, so that the same calls lead to the same steps."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Those of this moment, whatever is added meanwhile."""
        return iter(list(self._entries.values()))

    def add(self, entry: Entry) -> None:
        """Something is to be done for `entry`."""
        self._entries[entry.digest] = entry

    def wanted(self) -> list[tuple[int, Entry]]:
        """Those that are asked for, the earliest first, each with its place in the order."""
        found = [(order, entry) for entry in self if (order := entry.demand()) is not None]
        return sorted(found, key=lambda pair: pair[0])

    def drop_settled(self, known: Container[str]) -> None:
        """Forget those that are at rest, and those whose digest is known no more."""
        for digest, entry in list(self._entries.items()):
            if entry.is_settled or digest not in known:
                del self._entries[digest]
