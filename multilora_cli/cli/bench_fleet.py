"""What a bench takes from the fleet file: ranks where the server tells none, bounds on a card."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multilora_cli.bench.bound import Costs
    from multilora_cli.bench.target import Adapter
    from multilora_cli.cli.bench_options import BenchOptions
    from multilora_cli.sizing.hardware import Gpu
    from multilora_cli.sizing.report import PlanRequest


def fleet_ranks(path: Path | None) -> dict[str, int]:
    """Largest rank of every adapter of a fleet file, from the headers. Raises MloraError."""
    return {shape.name: shape.max_rank for shape in _request(path, None).adapters}


def fleet_quantization(path: Path) -> str:
    """none, fp8 or awq: of the base of a fleet file. Raises MloraError."""
    return _request(path, None).quantization.method


def fleet_costs(options: "BenchOptions", adapters: "Sequence[Adapter]") -> "Costs | None":
    """What loads cost on the card, where it and the fleet are known. Raises BadInput."""
    from multilora_cli.errors import BadInput

    if options.fleet is None and options.url is not None:
        if options.gpu is not None:
            raise BadInput("--gpu: needs FLEET, the file that says what the server serves")
        return None
    card = _card(options)
    return None if card is None else _costs(_request(options.fleet, card), card, adapters)


def _card(options: "BenchOptions") -> "Gpu | None":
    """The card named, else this machine's where the server is our own and not on the CPU."""
    from multilora_cli.errors import BadInput
    from multilora_cli.fleet.load import load_fleet
    from multilora_cli.sizing.hardware import find_gpu, local_gpu

    if options.gpu is not None:
        return find_gpu(options.gpu)
    if options.url is not None or load_fleet(options.fleet).fleet.memory.device == "cpu":
        return None
    try:
        return local_gpu()
    except BadInput:  # a card without figures in the table has no bound
        return None


def _request(path: Path | None, card: "Gpu | None") -> "PlanRequest":
    from multilora_cli.cli.plan_request import plan_request

    return plan_request(path, (), card, None, elsewhere=True)


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
