"""How the device's memory is cut, and copies into the pool."""

from pathlib import Path

import pytest
import torch

from multilora_cli.engine import assemble, device_memory
from multilora_cli.engine.assemble import build_engine
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.device_memory import (
    choose_device,
    choose_dtype,
    grow_segments,
    plan_memory,
    use_device,
)
from multilora_cli.engine.page_copier import PageCopier, _runs
from multilora_cli.errors import BadInput, MloraError, Refused
from multilora_cli.memory.page_buffer import PageBuffer
from multilora_cli.sizing.geometry import read_geometry
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import F2_PAGE


def test_pool_bytes_are_what_is_asked_for(fleet: SignatureFleet) -> None:
    config = EngineConfig(model_path=str(fleet.base), pool_bytes=100 * F2_PAGE + 5)
    plan = plan_memory(config, read_geometry(fleet.base)).plan
    assert (plan.num_pages, plan.page_bytes) == (100, F2_PAGE)


def test_default_on_a_cpu_is_a_quarter_of_free_memory_at_most_two_gib(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, geometry = EngineConfig(model_path=str(fleet.base)), read_geometry(fleet.base)
    for free, pool in ((2**30, 2**28), (2**40, 2**31)):
        monkeypatch.setattr(device_memory, "free_host_bytes", lambda free=free: free)
        plan = plan_memory(config, geometry).plan
        assert plan.pool == pool // F2_PAGE * F2_PAGE


def test_on_a_cpu_nothing_is_taken_that_is_not_free(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool gives way to the base, and a base beyond what is free is refused, not killed."""
    config, geometry = EngineConfig(model_path=str(fleet.base)), read_geometry(fleet.base)
    parts = plan_memory(config, geometry).plan.parts()
    around = sum(parts.values()) - parts["pool"]
    free = int((around + 3 * F2_PAGE) / config.device_fraction) + 1
    monkeypatch.setattr(device_memory, "cpu_pool_bytes", lambda free: 2**30)
    monkeypatch.setattr(device_memory, "free_host_bytes", lambda: free)
    plan = plan_memory(config, geometry).plan
    assert plan.num_pages >= 2 and sum(plan.parts().values()) <= free
    monkeypatch.setattr(device_memory, "free_host_bytes", lambda: parts["weights"])
    with pytest.raises(Refused, match="does not fit") as caught:
        plan_memory(config, geometry)
    assert "--gpu" in str(caught.value.hint)


def test_device_bytes_hold_everything(fleet: SignatureFleet) -> None:
    config = EngineConfig(model_path=str(fleet.base), device_bytes=200 * 2**20)
    plan = plan_memory(config, read_geometry(fleet.base)).plan
    assert sum(plan.parts().values()) <= 200 * 2**20 < sum(plan.parts().values()) + 2 * F2_PAGE


def test_a_base_that_does_not_fit_is_refused_with_numbers(fleet: SignatureFleet) -> None:
    config = EngineConfig(model_path=str(fleet.base), device_bytes=2**20)
    with pytest.raises(Refused, match="does not fit"):
        build_engine(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_kv_takes_one_byte_an_element(fleet: SignatureFleet, dtype: str) -> None:
    """A page is smaller by the compute dtype's width; what is planned is what is allocated."""
    shares = {}
    for kv in ("auto", "fp8"):
        config = EngineConfig(
            model_path=str(fleet.base), pool_bytes=2**24, dtype=dtype, kv_cache_dtype=kv
        )
        ready = build_engine(config).parts.ready
        assert ready.allocated["pool"] == ready.planned["pool"]
        shares[kv] = ready
    width = 4 if dtype == "float32" else 2
    assert shares["auto"].page_bytes == width * shares["fp8"].page_bytes
    assert shares["fp8"].num_pages >= width * (shares["auto"].num_pages - 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"device": "tpu"}, "memory.device"),
        ({"max_model_len": 5000}, "max_model_len"),
    ],
)
def test_what_cannot_be_served_is_refused(
    fleet: SignatureFleet, how: dict[str, object], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        build_engine(EngineConfig(model_path=str(fleet.base), pool_bytes=2**22, **how))


def test_a_driver_that_torch_cannot_use_is_never_a_silent_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu" or device_memory._DRIVER.exists()
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95  Release Build\n")
    monkeypatch.setattr(device_memory, "_DRIVER", driver)
    with pytest.raises(BadInput, match=r"580\.95"):
        choose_device("auto")
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(MloraError, match="no CUDA device"):
        choose_device("cuda:0")


def test_a_device_is_one_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(BadInput, match="found cuda:2, this machine has cuda:0 to cuda:1"):
        choose_device("cuda:2")


def test_the_thread_that_steps_is_on_the_chosen_device(
    fleet: SignatureFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the thread's device, not on that of its tensors."""
    chosen, order = torch.device("cuda", 1), list[object]()

    def planned(*_: object) -> None:
        order.append("planned")
        raise Refused("it does not fit")

    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(assemble, "choose_device", lambda name: chosen)
    monkeypatch.setattr(assemble, "DeviceMeter", lambda device: None)
    monkeypatch.setattr(assemble, "grow_segments", lambda device: None)
    monkeypatch.setattr(assemble, "plan_memory", planned)
    with pytest.raises(Refused):
        build_engine(EngineConfig(model_path=str(fleet.base)))
    assert order == [chosen, "planned"]
    use_device(torch.device("cpu"))
    assert len(order) == 2


def test_segments_grow_unless_the_environment_or_the_device_says_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, said = torch.device("cuda", 0), []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setattr(device_memory.torch, "empty", lambda *args, **kwargs: None)
    grow_segments(torch.device("cpu"))
    grow_segments(cuda)
    assert said == ["expandable_segments:True"]

    def refused(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(device_memory.torch, "empty", refused)
    grow_segments(cuda)
    assert said[1:] == ["expandable_segments:True", "expandable_segments:False"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    grow_segments(cuda)
    assert len(said) == 3


def test_dtypes() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_dtype("auto", cpu) is torch.float32
    assert choose_dtype("auto", cuda) is torch.bfloat16
    assert choose_dtype("float16", cuda) is torch.float16


class _Image:
    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages


def test_copies_reach_their_pages_and_no_other() -> None:
    buffer = PageBuffer(8, 64, torch.device("cpu"))
    buffer.poison_all()
    image = _Image(torch.arange(3 * 64, dtype=torch.uint8).view(3, 64))
    assert PageCopier(buffer.pages).start(image, [5, 2, 3]).done()  # type: ignore[arg-type]
    for index, page in enumerate((5, 2, 3)):
        assert torch.equal(buffer.pages[page], image.pages[index])
    assert (buffer.pages[[0, 1, 4, 6, 7]] == 0xFF).all()
    buffer.poison([2])
    assert buffer.pages.view(torch.float32)[2].isnan().all()


def test_what_is_allocated_is_what_was_planned(fleet: SignatureFleet) -> None:
    """Promise 3: plan and engine share one sizing code."""
    ready = build_engine(
        EngineConfig(model_path=str(fleet.base), pool_bytes=64 * F2_PAGE, num_threads=1)
    ).parts.ready
    for part in ("weights", "pool", "tables"):
        assert ready.allocated[part] == ready.planned[part]
    assert ready.notes == []


def test_neighbouring_pages_are_one_copy() -> None:
    assert _runs([3, 4, 5, 9, 1, 2]) == [(0, 3), (3, 1), (4, 2)]
    assert _runs([]) == []
