"""How a loader thread turns an adapter's folder into the plan and pages of its image."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from multilora_cli.adapters.crew import Crew
from multilora_cli.adapters.digest import content_digest, known_digest, remember_digest
from multilora_cli.adapters.image import build_image
from multilora_cli.adapters.lease import Version
from multilora_cli.adapters.peft import AdapterFile, read_adapter
from multilora_cli.adapters.safetensors_header import identity_of
from multilora_cli.adapters.vectors import BaseRows
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_kernels.layout import Extras, ImagePlan, plan_image

_log = logging.getLogger(__name__)

_PLANS_MAX = 256
_HEADERS_MAX = 64  # of adapters that may come back: 0.4 MB each for an 8B


class AdapterReader:
    """Reads adapters for one base. Every read is of one version or refused."""

    def __init__(
        self,
        config: EngineConfig,
        geometry: ModelGeometry,
        page_bytes: int,
        base: BaseRows,
        dtype: torch.dtype,
        failpoints: Failpoints,
        crew: Crew | None = None,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._page_bytes = page_bytes
        self._base = base
        self._dtype = dtype
        self._failpoints = failpoints
        self._crew = crew or Crew()
        self._lock = threading.Lock()
        self._plans: dict[tuple[tuple[tuple[tuple[int, str], int], ...], Extras], ImagePlan] = {}
        self._headers: OrderedDict[str, AdapterFile] = OrderedDict()  # by path, the latest last

    def open(self, version: Version) -> tuple[ImagePlan, Callable[[torch.Tensor], object]]:
        """The image's plan and what fills its pages. Both raise AdapterError.

        The files are read three times at most, header, digest and weights, the last two at the
        same time; each reader refuses a file that is not the one whose header was read. What the
        front has hashed is not hashed again while it is the same files.
        """
        self._failpoints.hit("load")
        adapter = self._read(version.path)
        remember_digest(adapter, version.digest, version.files)
        found = known_digest(adapter)
        if found is not None:
            _check_digest(version, found)
        plan = self._plan(adapter.ranks, adapter.extras)

        def fill(pages: torch.Tensor) -> object:
            digest = self._crew.begin(lambda: _check_digest(version, content_digest(adapter)))
            try:
                notes = build_image(
                    adapter,
                    plan,
                    self._dtype,
                    pages,
                    base=self._base,
                    check_values=self._config.check_adapter_values,
                    crew=self._crew,
                )
            finally:
                digest()  # whatever is wrong with the weights: other content is the cause of it
            for note in notes:
                _log.warning("adapter %s (%s): %s", version.name, version.digest[:12], note)
            return notes

        return plan, fill

    def _read(self, path: str) -> AdapterFile:
        """What the headers of the adapter in `path` say; they are not parsed again where every file
        is the one that was read: 3 ms for 256 tensors, with the interpreter held."""
        adapter = self._headers.get(path)
        if adapter is None or any(identity_of(file.path) != file for file in adapter.files):
            adapter = read_adapter(
                Path(path),
                self._geometry,
                max_rank=self._config.max_lora_rank,
                base_folder=Path(self._config.model_path),
            )
        with self._lock:
            self._headers[path] = adapter
            self._headers.move_to_end(path)
            if len(self._headers) > _HEADERS_MAX:
                self._headers.popitem(last=False)
        return adapter

    def _plan(self, ranks: Mapping[tuple[int, str], int], extras: Extras) -> ImagePlan:
        """Fleets repeat a few sets of ranks, and packing 5,000 blocks takes 20 ms of one core."""
        key = (tuple(sorted(ranks.items())), extras)
        plan = self._plans.get(key)
        if plan is None:
            shapes = self._geometry.module_shapes
            plan = plan_image(ranks, shapes, self._page_bytes, self._dtype.itemsize, extras)
            # Here rather than on the step thread.
            _ = plan.columns, plan.tiles, plan.vector_columns
            if len(self._plans) < _PLANS_MAX:
                self._plans[key] = plan
        return plan


def _check_digest(version: Version, found: str) -> None:
    """Raise AdapterError where the files are not the version that was asked for."""
    if found != version.digest:
        raise AdapterError(
            f"{version.path}: its content changed: found digest {found[:12]}, expected"
            f" {version.digest[:12]} as it was registered",
            reason="changed",
            hint="load the adapter again under its name",
        )
