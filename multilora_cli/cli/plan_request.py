"""From a fleet file and a card to what is planned, by the rules that serving has. No torch.

What `serve` would refuse is refused here, with the same words, because the same functions say so.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from multilora_cli.adapters.base_match import match_base
from multilora_cli.adapters.survey import Surveyor
from multilora_cli.cli.base import compute_itemsize, fetch_config
from multilora_cli.cli.fleet_adapters import read_fleet_adapters
from multilora_cli.cli.front import check_front
from multilora_cli.errors import AdapterError, BadInput, MloraError, Refused
from multilora_cli.fleet.declared import declared_patterns
from multilora_cli.fleet.load import LoadedFleet, load_fleet
from multilora_cli.models.checkpoint import open_checkpoint
from multilora_cli.models.quantized_tensors import find_linears
from multilora_cli.sizing.budget import CONTEXT_BYTES
from multilora_cli.sizing.device import check_context
from multilora_cli.sizing.geometry import ModelGeometry, read_geometry
from multilora_cli.sizing.hardware import Gpu
from multilora_cli.sizing.host_memory import cpu_pool_bytes, free_host_bytes
from multilora_cli.sizing.pages import TARGETS, uniform_ranks
from multilora_cli.sizing.quantization import AWQ, Quantization, choose_quantization
from multilora_cli.sizing.quantization_config import read_quantization
from multilora_cli.sizing.report import AdapterShape, PlanRequest
from multilora_cli.units import format_size


def plan_request(
    path: Path | None,
    settings: Sequence[str],
    card: Gpu | None,
    assume: str | None,
    *,
    elsewhere: bool = False,
) -> PlanRequest:
    """What is to be planned. Raises MloraError.

    `elsewhere`: the plan is for a card that was named, so this machine's secrets are only noted.
    """
    loaded = load_fleet(path, settings)
    notes = check_front(loaded, elsewhere=elsewhere)
    folder = fetch_config(loaded)
    geometry = read_geometry(folder)
    check_context(loaded.fleet.base.max_model_len, geometry)
    if assume:
        shapes = list(_assumed(assume, geometry))
    else:
        shapes = _adapters(loaded, geometry, folder)
        notes += [*_other_bases(loaded, shapes), *_uncounted(loaded)]
    itemsize = compute_itemsize(loaded, has_card=card is not None)
    is_what_if = any(setting.split("=")[0].strip() == "base.quantization" for setting in settings)
    quantization, more = _quantization(loaded, geometry, folder, is_what_if=is_what_if)
    has_fp8 = card is not None and card.has_fp8
    quantization = quantization.on(gpu=card is not None, has_fp8=has_fp8, itemsize=itemsize)
    return PlanRequest(
        fleet=loaded.fleet,
        geometry=geometry,
        quantization=quantization,
        itemsize=itemsize,
        available_bytes=_available(loaded, card),
        pool_bytes=_cpu_pool(loaded) if card is None else None,
        gpu=card,
        adapters=tuple(shapes),
        notes=(*more, *notes),
    )


def _other_bases(loaded: LoadedFleet, shapes: Sequence[AdapterShape]) -> Iterator[str]:
    """Adapters that say they were trained on another base than this one."""
    base = loaded.fleet.base
    others = {
        shape.name: match.text
        for shape in shapes
        if (match := match_base(shape.base_model, None, base.model, None)).is_warning
    }
    if others:
        first = next(iter(others))
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        yield f"{first}{more}: {others[first]}"


def _uncounted(loaded: LoadedFleet) -> Iterator[str]:
    """What the file allows without naming it: nobody knows how many there will be."""
    for pattern in declared_patterns(loaded):
        yield (
            f"pattern {pattern.pattern}: its adapters are not known before they are asked for, and"
            " not counted; --assume rank=16,targets=attention,count=200 plans for some"
        )


def _quantization(
    loaded: LoadedFleet, geometry: ModelGeometry, folder: Path, *, is_what_if: bool
) -> tuple[Quantization, list[str]]:
    """What serving makes of the checkpoint, from its tensors where they are here.

    AWQ of a 16-bit one is refused, or planned with a note where it was asked for as a what-if.
    """
    wanted, model = loaded.fleet.base.quantization, loaded.fleet.base.model
    stored = read_quantization(geometry.quantization, model)
    if wanted == "awq" and stored.method == "none" and is_what_if:
        return AWQ, [
            f"{model} is a 16-bit checkpoint: to serve it as AWQ, make one with"
            f" `mlora quantize {model} --to awq` and name that as base.model"
        ]
    chosen = choose_quantization(wanted, stored, model)
    if chosen.method == "none" or not any(folder.glob("*.safetensors")):
        return chosen, []
    return find_linears(folder, open_checkpoint(folder), geometry, chosen).quantization, []


def _available(loaded: LoadedFleet, card: Gpu | None) -> int:
    """Bytes the fleet may use: what the file says, else the share of the card or of free memory.

    Raises Refused where the card has less.
    """
    memory = loaded.fleet.memory
    if memory.device_bytes is not None:
        if card is not None and memory.device_bytes > card.memory_bytes - CONTEXT_BYTES:
            raise Refused(
                f"memory.device_bytes: {format_size(memory.device_bytes)} asked for, {card.name}"
                f" has {format_size(card.memory_bytes)}, of which the CUDA context takes"
                f" {format_size(CONTEXT_BYTES)}",
                hint="ask for less, or leave it out: memory.device_fraction then decides",
            )
        return memory.device_bytes
    if card is not None:
        share = int(card.memory_bytes * memory.device_fraction)
        return min(share, card.memory_bytes - CONTEXT_BYTES)
    return int(free_host_bytes() * memory.device_fraction)


def _cpu_pool(loaded: LoadedFleet) -> int | None:
    """The pool of an engine on this machine's CPU; None where the file says what to use."""
    if loaded.fleet.memory.device_bytes is not None:
        return None
    return cpu_pool_bytes(free_host_bytes())


def _adapters(
    loaded: LoadedFleet, geometry: ModelGeometry, base_folder: Path
) -> list[AdapterShape]:
    """Shapes from the headers; every bad adapter of the fleet is told in one run."""
    limit = loaded.fleet.limits.max_lora_rank
    surveyor = Surveyor(geometry, max_rank=limit, base_folder=base_folder)
    shapes, faults, lines = [], [], []
    found_of = read_fleet_adapters(loaded, geometry, surveyor.survey, headers_only=True)
    for adapter, found in found_of:
        if isinstance(found, MloraError):
            faults.append(found)
            lines.append(found.of_adapter(adapter.name))
            continue
        base = found.shape.base_model_name or ""
        shape, pinned = found.shape, adapter.pin == "hot"
        shapes.append(
            AdapterShape(adapter.name, shape.ranks, base, pinned, shape.extras, shape.max_rank)
        )
    if faults:
        hints = {fault.hint for fault in faults}
        raise AdapterError("\n".join(lines), hint=hints.pop() if len(hints) == 1 else None)
    return shapes


def _assumed(text: str, geometry: ModelGeometry) -> Iterator[AdapterShape]:
    """`count` adapters of one rank on one target set, without any file."""
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = set(fields) - {"rank", "targets", "count"}
    try:
        rank, count = int(fields.get("rank", "16")), int(fields.get("count", "1"))
        targets = fields.get("targets", "attention")
        modules = TARGETS.get(targets) or tuple(targets.split("+"))
        if unknown or not 1 <= rank <= 512 or not 1 <= count <= 50_000:
            raise ValueError
    except ValueError:
        raise BadInput(
            f"--assume {text}: expected rank=1..512, targets=attention|all|q_proj+v_proj and"
            " count=1..50000, joined by commas"
        ) from None
    ranks = uniform_ranks(geometry, rank, modules)
    return (AdapterShape(f"assumed-{index}", ranks) for index in range(count))
