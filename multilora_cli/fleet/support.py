"""What a fleet file may ask for and this version cannot do yet: refused by name."""

from collections.abc import Iterator

from multilora_cli.errors import FleetError
from multilora_cli.fleet.load import LoadedFleet
from multilora_cli.fleet.schema import Adapter

_REMOTE = ("hf://", "s3://")


def check_served(loaded: LoadedFleet) -> None:
    """Raise FleetError naming every key that has no effect yet when serving."""
    problems = [f"{loaded.path}: {key}: not yet: {why}" for key, why in _not_yet(loaded)]
    if problems:
        raise FleetError("\n".join(problems))


def _not_yet(loaded: LoadedFleet) -> Iterator[tuple[str, str]]:
    fleet = loaded.fleet
    for index, entry in enumerate(fleet.adapters):
        key = f"adapters.{index}"
        if isinstance(entry, Adapter):
            yield from ((f"{key}.{field}", why) for field, why in _entry(entry))


def _entry(entry: Adapter) -> Iterator[tuple[str, str]]:
    if entry.uses_own_text and entry.digest is not None and not entry.source.startswith(_REMOTE):
        yield "digest", "of a folder it covers no tokenizer or chat template; leave one of them out"
