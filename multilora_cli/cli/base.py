"""Where a fleet's base is, and what its compute dtype and storage will be. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multilora_cli.errors import ModelError
from multilora_cli.fleet.load import LoadedFleet
from multilora_cli.progress import Report, silent

if TYPE_CHECKING:
    from multilora_cli.adapters.store import DiskStore
    from multilora_cli.fleet.schema import Adapter

DEMO_BASE = "demo:base"


def cache_folder() -> Path:
    """Where mlora keeps what it makes for itself, such as dummy adapters."""
    import os

    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlora"


def open_store(
    loaded: LoadedFleet, adapters: "Sequence[Adapter] | None" = None
) -> "DiskStore | None":
    """Where remote adapters are kept; None: there are none among `adapters`.

    Raises BadInput for an unsafe folder.
    """
    from multilora_cli.adapters.source import is_remote
    from multilora_cli.adapters.store import DiskStore

    if adapters is not None and not any(is_remote(adapter.source) for adapter in adapters):
        return None
    return DiskStore(cache_folder() / "adapters", loaded.fleet.memory.disk_cache)


def local_base(loaded: LoadedFleet) -> Path | None:
    """The base's folder on this machine; None where `base.model` is a Hub id.

    Raises ModelError for a path that holds no model.
    """
    model = loaded.fleet.base.model
    if model == DEMO_BASE:
        from multilora_cli.demo import demo_base_path

        return demo_base_path()
    if model.startswith("demo:"):
        raise ModelError(f"base.model: {model}: the demo has one base, {DEMO_BASE}")
    folder = loaded.folder / Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelError(
            f"base.model: {folder} is not a folder",
            hint="name a folder in Hugging Face format, a Hub id such as org/name, or demo:base",
        )
    return None


def compute_itemsize(loaded: LoadedFleet, *, has_card: bool) -> int:
    """Bytes of the compute dtype: `auto` is bfloat16 on a card and float32 on a CPU."""
    dtype = loaded.fleet.base.dtype
    return 4 if dtype == "float32" or (dtype == "auto" and not has_card) else 2


def check_memory(loaded: LoadedFleet) -> None:
    """Raise Refused where a CPU is to hold a base that this machine has no memory for.

    Before the base is fetched and adapters are read, which take long; the engine checks all of it
    again. Says nothing of a base whose config cannot be had quickly.
    """
    from multilora_cli.errors import Refused, Unreachable
    from multilora_cli.sizing.budget import base_bytes
    from multilora_cli.sizing.geometry import read_geometry
    from multilora_cli.sizing.host_memory import free_host_bytes
    from multilora_cli.units import format_size

    try:
        geometry = read_geometry(fetch_config(loaded))
    except Unreachable:
        return
    itemsize = compute_itemsize(loaded, has_card=False)
    need, free = base_bytes(geometry, itemsize).total, free_host_bytes()
    if need > free:
        raise Refused(
            f"the base does not fit: its weights take {format_size(need)} on a CPU,"
            f" {format_size(free)} of this machine's memory are free",
            hint="take a smaller base, or a machine with a card (mlora plan --gpu says which)",
        )


def fetch_base(loaded: LoadedFleet, report: Report = silent) -> Path:
    """The base's folder, fetched from the Hub where it is not local. Raises MloraError."""
    folder = local_base(loaded)
    if folder is not None:
        return folder
    from multilora_cli.models.hub import fetch_model

    base = loaded.fleet.base
    return fetch_model(base.model, base.revision, report)


def fetch_config(loaded: LoadedFleet) -> Path:
    """A folder with the base's config.json alone; weights are not fetched. Raises MloraError."""
    folder = local_base(loaded)
    if folder is not None:
        return folder
    from multilora_cli.models import hub

    base = loaded.fleet.base
    return hub.fetch_config(base.model, base.revision)
