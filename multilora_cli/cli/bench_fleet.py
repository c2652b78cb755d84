"""What a bench takes from the fleet file: ranks where the server tells none, bounds on a card."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multilora_cli.bench.bound import Costs
    from multilora_cli.bench.target import Adapter
    from multilora_cli.cli.bench_options import BenchOptions
    from multilora_cli.sizing.hardware import Gpu
    from multilora_cli.sizing.report import PlanRequest


class FleetFile:
    """The fleet file that a bench was given; headers of its adapters are read once, when asked."""

    def __init__(self, options: "BenchOptions") -> None:
        self._options = options

    @cached_property
    def _card(self) -> "Gpu | None":
        """The card named, else this machine's where the server is our own and runs on it."""
        from multilora_cli.fleet.load import load_fleet
        from multilora_cli.sizing.hardware import find_gpu, rated_gpu

        options = self._options
        if options.gpu is not None:
            return find_gpu(options.gpu)
        if options.url is not None:
            return None
        return rated_gpu(load_fleet(options.fleet).fleet.memory.device)

    @cached_property
    def _request(self) -> "PlanRequest":
        from multilora_cli.cli.plan_request import plan_request

        return plan_request(self._options.fleet, (), self._card, None, elsewhere=True)

    @property
    def ranks(self) -> dict[str, int]:
        """Largest rank of every adapter. Raises MloraError."""
        return {shape.name: shape.max_rank for shape in self._request.adapters}

    def costs(self, adapters: "Sequence[Adapter]") -> "Costs | None":
        """What loads cost, where card and fleet are known. Raises BadInput."""
        from multilora_cli.errors import BadInput

        options = self._options
        if options.fleet is None and options.url is not None:
            if options.gpu is not None:
                raise BadInput("--gpu: needs FLEET, the file that says what the server serves")
            return None
        return None if self._card is None else _costs(self._request, self._card, adapters)

    def quantization(self) -> str | None:
        """Of the base: none, fp8 or awq; auto where only a checkpoint elsewhere says it."""
        from multilora_cli.cli.base import local_base
        from multilora_cli.fleet.load import load_fleet
        from multilora_cli.sizing.quantization_config import read_quantization

        if self._options.fleet is None and self._options.url is not None:
            return None
        loaded = load_fleet(self._options.fleet)
        folder, wanted = local_base(loaded), loaded.fleet.base.quantization
        if wanted != "auto" or folder is None:
            return wanted
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return read_quantization(config.get("quantization_config"), str(folder)).method


def _costs(request: "PlanRequest", card: "Gpu", adapters: "Sequence[Adapter]") -> "Costs":
    from multilora_cli.bench.bound import Costs
    from multilora_cli.sizing.budget import base_bytes

    found = {
        shape.name: request.cost(shape.ranks, shape.extras).step_bytes for shape in request.adapters
    }
    return Costs(
        gpu=card,
        geometry=request.geometry,
        base=base_bytes(request.geometry, request.itemsize, request.quantization),
        kv_itemsize=request.kv_itemsize,
        max_num_seqs=request.fleet.limits.max_num_seqs,
        fp8=request.quantization.method == "fp8",
        adapter_bytes={
            index: found[adapter.name]
            for index, adapter in enumerate(adapters)
            if adapter.name in found
        },
    )
