"""The adapters that ship inside the package."""

from pathlib import Path

from multilora_cli.adapters.source.base import SourceContext
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import AdapterError

_FOLDER = Path(__file__).resolve().parents[2] / "demo" / "adapters"


class DemoSource:
    """`demo:NAME`, a folder of the demo fleet."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._folder = folder

    def resolve(self, text: str, context: SourceContext) -> Path:
        """The folder of the demo adapter `text`."""
        names = sorted(p.name for p in self._folder.iterdir()) if self._folder.is_dir() else []
        names = [name for name in names if (self._folder / name / "adapter_config.json").is_file()]
        if text not in names:
            raise AdapterError(
                f"source demo:{quoted(text)[1:-1]}: no such demo adapter; there are "
                + (", ".join(names) or "none in this installation"),
                reason="source",
            )
        return self._folder / text
