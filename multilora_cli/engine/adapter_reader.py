"""How a loader thread turns an adapter's folder into the plan and pages of its image."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.image import build_image
from multilora_cli.adapters.lease import Version
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.adapters.vectors import BaseRows
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry
from multilora_kernels.layout import Extras, ImagePlan, plan_image

_log = logging.getLogger(__name__)

_PLANS_MAX = 256


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
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._page_bytes = page_bytes
        self._base = base
        self._dtype = dtype
        self._failpoints = failpoints
        self._plans: dict[tuple[tuple[tuple[tuple[int, str], int], ...], Extras], ImagePlan] = {}

    def open(self, version: Version) -> tuple[ImagePlan, Callable[[torch.Tensor], object]]:
        """The image's plan and what fills its pages. Raises AdapterError.

        The files are read three times at most, header, digest and weights; each reader refuses a
        file that is not the one whose header was read.
        """
        self._failpoints.hit("load")
        adapter = read_adapter(
            Path(version.path),
            self._geometry,
            max_rank=self._config.max_lora_rank,
            base_folder=Path(self._config.model_path),
        )
        digest = content_digest(adapter)
        if digest != version.digest:
            raise AdapterError(
                f"{version.path}: its content changed: found digest {digest[:12]}, expected"
                f" {version.digest[:12]} as it was registered",
                reason="changed",
                hint="load the adapter again under its name",
            )
        plan = self._plan(adapter.ranks, adapter.extras)

        def fill(pages: torch.Tensor) -> object:
            check = self._config.check_adapter_values
            notes = build_image(
                adapter, plan, self._dtype, pages, base=self._base, check_values=check
            )
            for note in notes:
                _log.warning("adapter %s (%s): %s", version.name, version.digest[:12], note)
            return notes

        return plan, fill

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
