"""The LoRA kernels on a device against fp64: laws x rank mixes x batches x modules x dtypes."""

from collections.abc import Iterator

import pytest
import torch
from lora_cases import LAYERS, PAGE_BYTES, SHAPES, adapters, check, inputs, run, small_fleet

from multilora_kernels import launch
from multilora_kernels.add_lora import add_lora, multiply_add_lora
from multilora_kernels.bench.lora import forced
from multilora_kernels.bf16_gemv import bf16_gemv
from multilora_kernels.layout import GROUPS, MODULES
from multilora_kernels.rms_norm import rms_norm
from multilora_kernels.segments import Segments
from multilora_kernels.side_stream import SideStream
from multilora_kernels.testing import LLAMA3_8B, Fleet, make_fleet, make_slots

pytestmark = pytest.mark.gpu
POPULARITIES = ("distinct", "uniform", "skewed", "identical")


@pytest.fixture(params=["own", "rtx-4090"], autouse=True)
def chip(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test under the device's own launch choices and under those of an RTX 4090."""
    launch.force_chip(launch.RTX_4090 if request.param == "rtx-4090" else None)
    yield
    launch.force_chip(None)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    return small_fleet(request.param, seed=1, device="cuda")


@pytest.fixture(scope="module")
def real() -> Fleet:
    """One layer of Llama-3-8B in pages of the real size; ranks below, on and above tile edges."""
    ranks = (16, 1, 40, 128, 8, 16, 16, 24, 64, 512)
    made = [{(0, module): rank for module in MODULES} for rank in ranks]
    made.append({(0, "q_proj"): 16, (0, "down_proj"): 100})
    return make_fleet(made, LLAMA3_8B, 1, 2 * 2**20, torch.bfloat16, "cuda", 2)


def spread(popularity: str, rows: int, num_adapters: int) -> list[int]:
    """Slots of the rows, some of the base, adapters reused where there are more rows."""
    slots = make_slots(popularity, rows, first_slot=0)
    picked = [int(slot) % (num_adapters + 1) for slot in slots]
    return [slot + 3 if popularity == "identical" else slot for slot in picked]


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("rows", [1, 3, 16, 65, 200, 600])
@pytest.mark.parametrize("group", GROUPS)
def test_small_odd_shapes_reach_fp64(fleet: Fleet, popularity: str, rows: int, group: str) -> None:
    slots = spread(popularity, rows, len(fleet.weights))
    check(fleet, slots, group, rows, range(LAYERS))


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("rows", [1, 7, 64, 300, 700])
@pytest.mark.parametrize("group", GROUPS)
def test_real_shapes_reach_fp64(real: Fleet, popularity: str, rows: int, group: str) -> None:
    check(real, spread(popularity, rows, len(real.weights)), group, rows, [0])


FORMS: dict[str, dict[str, object]] = {
    "two blocks": {"n_steps": 2, "rows_n": 128},
    "one block": {"n_steps": 1, "rows_n": 256},
    "eight blocks": {"n_steps": 8, "rows_n": 128},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [16, 64, 300])
@pytest.mark.parametrize("group", GROUPS)
def test_every_form_reaches_fp64_and_repeats(real: Fleet, group: str, rows: int, form: str) -> None:
    """Those that no chip's choice may name at present; bits are the same beside other work too."""
    choose = forced(FORMS[form])
    for popularity in POPULARITIES:
        slots = spread(popularity, rows, len(real.weights))
        check(real, slots, group, rows, [0], choose)
        x, y = inputs(real, rows, group, 5)
        first, again = y.clone(), y.clone()
        run(real, x, first, slots, group, [0], choose)
        for _ in range(5):
            again.copy_(y)
            run(real, x, again, slots, group, [0], choose)
            assert torch.equal(first, again)


@pytest.mark.parametrize("rows", [40, 600])
def test_a_nan_adapter_leaves_other_rows_bit_identical(rows: int) -> None:
    fleet = small_fleet(torch.bfloat16, seed=3, device="cuda")
    slots = spread("uniform", rows, len(fleet.weights))
    for group in GROUPS:
        x, y = inputs(fleet, rows, group, 4)
        spoiled = y.clone()
        run(fleet, x, y, slots, group)
        for layer in range(LAYERS):
            for module in GROUPS[group]:
                for place in fleet.table.blocks(3, layer, module):
                    size = place.block.rank_width * place.block.length
                    weights = fleet.pool.view(-1).view(torch.bfloat16)
                    weights[place.element : place.element + size] = torch.nan
        run(fleet, x, spoiled, slots, group)
        hit = torch.tensor([slot == 3 for slot in slots], device="cuda")
        assert hit.any() and torch.isnan(spoiled[hit]).all()
        assert torch.equal(spoiled[~hit], y[~hit])


@pytest.mark.parametrize("rows", [5, 64, 600])
@pytest.mark.parametrize("group", GROUPS)
def test_repeats_and_row_order_change_no_bit(real: Fleet, rows: int, group: str) -> None:
    slots = spread("skewed", rows, len(real.weights))
    x, y = inputs(real, rows, group, 5)
    first, again = y.clone(), y.clone()
    run(real, x, first, slots, group, [0])
    for _ in range(3):
        again.copy_(y)
        run(real, x, again, slots, group, [0])
        assert torch.equal(first, again)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(6))
    moved = y[order.cuda()]
    run(real, x[order.cuda()], moved, [slots[i] for i in order.tolist()], group, [0])
    assert torch.equal(moved, first[order.cuda()])


@pytest.mark.parametrize("group", GROUPS)
def test_a_row_of_its_own_has_the_same_bits_alone_and_among_others(real: Fleet, group: str) -> None:
    rows = 200
    slots = [1 + row if row < len(real.weights) else 0 for row in range(rows)]
    x, y = inputs(real, rows, group, 7)
    together = y.clone()
    run(real, x, together, slots, group, [0])
    for row in range(len(real.weights)):
        alone = y[row : row + 1].clone()
        run(real, x[row : row + 1], alone, [slots[row]], group, [0])
        assert torch.equal(alone[0], together[row])


def test_a_captured_graph_follows_every_build(real: Fleet) -> None:
    """Launches captured with no adapter at all serve any later mix, then base rows alone."""
    rows = 48
    segments = Segments(rows, "cuda")
    for group in GROUPS:
        x, y = inputs(real, rows, group, 8)
        static = y.clone()
        segments.prepare_capture(real.table, rows)
        add_lora(static, x, real.pool, real.table, segments, 0, group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add_lora(static, x, real.pool, real.table, segments, 0, group)
        assert torch.equal(static, y)
        for popularity in (*POPULARITIES, "base"):
            slots = [0] * rows
            if popularity != "base":
                slots = spread(popularity, rows, len(real.weights))
            segments.build(slots)
            static.copy_(y)
            graph.replay()
            expected = y.clone()
            run(real, x, expected, slots, group, [0])
            assert torch.equal(static, expected), popularity


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_a_shrink_beside_its_multiply_changes_no_bit(real: Fleet, rows: int) -> None:
    """A captured chain of multiplies, each fed by the one before, as a decoder layer is: replayed
    again and again it gives the bits of one stream, whatever the adapters."""
    segments = Segments(rows, "cuda")
    generator = torch.Generator().manual_seed(12)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)

    weights, biases = {}, {}
    for group, modules in GROUPS.items():
        d_in, d_out = LLAMA3_8B[modules[0]][0], sum(LLAMA3_8B[m][1] for m in modules)
        weights[group], biases[group] = random(d_out, d_in) / d_in**0.5, random(d_out)
    first = random(rows, 4096)

    def chain(side: SideStream | None) -> torch.Tensor:
        x = first
        for _ in range(3):
            for group, weight in weights.items():
                y = run_one(x, weight, group, side)
                # To the width of the next group's input, by kernels that start early too.
                wide = weights["o" if group == "qkv" else "down" if group == "gate_up" else "qkv"]
                x = rms_norm(y[:, : wide.shape[1]], biases["gate_up"][: wide.shape[1]], 1e-5)
        return x

    def run_one(
        x: torch.Tensor, weight: torch.Tensor, group: str, side: SideStream | None
    ) -> torch.Tensor:
        where = (real.pool, real.table, segments, 0, group)
        if side is not None:
            return multiply_add_lora(lambda: bf16_gemv(x, weight), x, *where, side)
        y = bf16_gemv(x, weight)
        add_lora(y, x, *where)
        return y

    segments.prepare_capture(real.table, rows, 64)
    side = SideStream(torch.device("cuda"))
    chain(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(side)
    fleets = [spread(popularity, rows, len(real.weights)) for popularity in POPULARITIES]
    # Where no row's adapter has a group's modules, its expand does nothing but wait.
    for slots in (*fleets, [len(real.weights)] * rows, [0] * rows):
        segments.build(slots)
        expected = chain(None)
        for _ in range(10):
            graph.replay()
            assert torch.equal(result, expected), slots


def test_a_table_change_reaches_the_next_step(real: Fleet) -> None:
    fleet = small_fleet(torch.float32, seed=9, device="cuda")
    segments = Segments(2, "cuda")
    segments.build([5, 7])
    x, y = inputs(fleet, 2, "qkv", 1)
    first = y.clone()
    add_lora(first, x, fleet.pool, fleet.table, segments, 0, "qkv")
    slot = fleet.table._slots[5]
    fleet.table.set(7, slot.plan, slot.pages)
    fleet.table.flush()
    segments.build([5, 7])
    add_lora(y, x, fleet.pool, fleet.table, segments, 0, "qkv")
    assert torch.equal(y[0], first[0]) and not torch.equal(y[1], first[1])
    x[1] = x[0]
    y = torch.zeros_like(y)
    segments.build([7, 5])
    add_lora(y, x, fleet.pool, fleet.table, segments, 0, "qkv")
    assert torch.equal(y[0], y[1])


def test_offsets_beyond_two_gibi_elements() -> None:
    """The pool of a large card has more elements than an int32 counts."""
    made = adapters((16, 24))[:2]
    fleet = make_fleet(made, SHAPES, LAYERS, PAGE_BYTES, torch.bfloat16, "cuda", 1)
    pages = 2**32 // PAGE_BYTES + 4096
    pool = torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device="cuda")
    for slot in (1, 2):
        record = fleet.table._slots[slot]
        moved = [pages - 1 - page for page in record.pages]
        pool[moved] = fleet.pool[list(record.pages)]
        fleet.table.set(slot, record.plan, moved)
    fleet.table.flush()
    far = Fleet(pool, fleet.table, fleet.weights, fleet.shapes)
    check(far, [1, 2, 2, 0, 1], "qkv", 2, range(LAYERS))
