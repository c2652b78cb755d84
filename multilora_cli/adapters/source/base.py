"""What every source can do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from multilora_cli.adapters.store import DiskStore
from multilora_cli.sizing.geometry import ModelGeometry


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source may need beside its own text."""

    relative_to: Path
    geometry: ModelGeometry | None = None
    cache: Path | None = None
    store: DiskStore | None = None  # where remote adapters are kept
    digest: str | None = None  # sha256 hex of the only content that will do
    text_files: tuple[str, ...] = ()  # beside config and weights, where they are there


class Source(Protocol):
    """Brings an adapter into a local folder."""

    def resolve(self, text: str, context: SourceContext) -> Path:
        """The folder `text` (without its scheme) stands for. Raises AdapterError."""
        ...
