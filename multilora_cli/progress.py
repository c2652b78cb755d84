"""How long work tells where it is."""

from collections.abc import Callable

# A phase by its key, how much of it is done, and of how much; 0 where nobody knows yet.
Report = Callable[[str, int, int], None]


def silent(phase: str, done: int, total: int) -> None:
    """A report that nobody reads."""
