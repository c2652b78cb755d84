"""What captured steps read: always at the same addresses, and nothing of spare rows."""

import numpy as np
import torch

from multilora_cli.engine.decode_graphs import _FIELDS, DecodeGraphs
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig
from tests.engine.test_decode_graphs import with_graphs


def addresses(rig: Rig) -> dict[str, int]:
    """Of everything that a recorded step reads or writes."""
    runner = rig.engine.parts.runner
    graphs, builder = runner._graphs, runner._builder
    assert isinstance(graphs, DecodeGraphs)
    tensors = {
        **{name: value for name, value in vars(graphs).items() if torch.is_tensor(value)},
        "sampled tokens": builder.sampled,
        "pool": builder.pool,
        "adapter table": builder.table.offsets,
    }
    assert len(tensors) >= 6
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_two_hundred_loads_move_nothing_that_a_graph_reads(fleet: SignatureFleet) -> None:
    """A-OUT-09: adapters come and go between steps that were recorded before them."""
    rig = Rig(fleet.base, num_slots=4, pages=64)
    rig.ask([3, 4], fleet.adapter(0), max_tokens=1)  # the table learns its geometry
    recorded = with_graphs(rig, (1, 2, 4))
    before = addresses(rig)
    for i in range(200):
        k = (20, 95, 96, 150, 191)[i % 5]
        answer = rig.ask([i % 90] * (1 + i % 3), fleet.adapter(k), max_tokens=3)
        assert answer.tokens == [k + 1] * 3, i
        rig.evict(fleet.adapter(k).digest, to="cold", purge_cache=True)
        rig.run()
    assert addresses(rig) == before
    assert rig.counters()["adapter_loads"] >= 200
    assert sum(work.replays for work in recorded) >= 200


def test_spare_rows_have_no_adapter_and_write_nowhere(fleet: SignatureFleet) -> None:
    """A-OUT-09: three rows run as a step of four; the fourth belongs to nobody."""
    rig = Rig(fleet.base)
    with_graphs(rig, (4,))
    graphs = rig.engine.parts.runner._graphs
    assert isinstance(graphs, DecodeGraphs)
    segments, upload = graphs._builder.segments, graphs._staging.upload
    seen: list[tuple[int, ...]] = []
    inputs: list[np.ndarray] = []
    build = segments.build

    def spy_build(slots: np.ndarray) -> None:
        seen.append(tuple(int(slot) for slot in slots))
        build(slots)

    def spy_upload(target: torch.Tensor, source: np.ndarray) -> None:
        inputs.append(source.copy())
        upload(target, source)

    segments.build = spy_build
    graphs._staging.upload = spy_upload
    requests = [rig.submit([k], fleet.adapter(k), max_tokens=6) for k in (20, 96, 150)]
    rig.run()
    assert [rig.answer(request).tokens[-1] for request in requests] == [21, 97, 151]
    full = [slots for slots in seen if len(slots) == 4 and all(slots[:3])]
    assert full and all(slots[3] == 0 for slots in full)
    fields = inputs[-1][: _FIELDS * graphs._field].reshape(_FIELDS, graphs._field)
    assert fields[3, 3] == -1 and fields[4, 3] == 0  # no place for K and V, no context
