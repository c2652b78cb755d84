"""Images: every weight in its place, whatever geometry, dtype and rank; whole versions only."""

import itertools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from multilora_cli.adapters.crew import Crew
from multilora_cli.adapters.digest import DigestMemory, content_digest
from multilora_cli.adapters.image import build_image
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry, geometry_from_config, read_geometry
from multilora_kernels.layout import MODULES, page_bytes, plan_image
from tests.adapters.adapter_oracle import built, plan_for, read, unpacked
from tests.adapters.spoil import CONFIG, WEIGHTS, good_tensors, write_good


def geometry(hidden: int, inner: int, heads: int, kv_heads: int, layers: int) -> ModelGeometry:
    """A Llama of these sizes, head size 16."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16,
        "num_hidden_layers": layers, "vocab_size": 100, "max_position_embeddings": 128,
    }  # fmt: skip
    return geometry_from_config(config, "test")


def write_random(
    folder: Path, base: ModelGeometry, ranks: dict[tuple[int, str], int], dtype: torch.dtype
) -> dict[tuple[int, str], torch.Tensor]:
    """An adapter with these ranks and its deltas 3 / r * B @ A in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(len(ranks))
    tensors, deltas = {}, {}
    for (layer, module), rank in ranks.items():
        d_in, d_out = base.module_shapes[module]
        a = torch.randn(rank, d_in, generator=generator).to(dtype)
        b = torch.randn(d_out, rank, generator=generator).to(dtype)
        block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        path = f"base_model.model.model.layers.{layer}.{block}.{module}"
        tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"] = a, b
        deltas[layer, module] = 3 / rank * b.double() @ a.double()
    save_file(tensors, folder / WEIGHTS)
    paths = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    pattern = {
        name.removeprefix("base_model.model.").partition(".lora_")[0]: t.shape[0]
        for name, t in tensors.items()
        if "lora_A" in name
    }
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 3, "target_modules": sorted(paths),
        "rank_pattern": pattern,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config))
    return deltas


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.sampled_from([(32, 48, 2, 1, 1), (80, 208, 5, 5, 2), (256, 144, 4, 2, 3)]),
    ranks=st.lists(st.sampled_from([0, 1, 7, 8, 9, 16, 17, 24, 33]), min_size=21, max_size=21),
    dtypes=st.sampled_from(
        list(itertools.product([torch.float32, torch.bfloat16], [torch.float32, torch.bfloat16]))
    ),
)
def test_every_weight_in_its_place(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tuple[int, int, int, int, int],
    ranks: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """RANK: mixed ranks on odd geometries, unpacked block by block, equal s * B @ A."""
    base, (stored, dtype) = geometry(*sizes), dtypes
    keys = itertools.product(range(base.num_layers), MODULES)
    chosen = {key: rank for key, rank in zip(keys, ranks, strict=False) if rank}
    if not chosen:
        return
    folder = tmp_path_factory.mktemp("image")
    expected = write_random(folder, base, chosen, stored)
    adapter = read_adapter(folder, base, max_rank=64)
    assert adapter.ranks == chosen
    plan = plan_for(adapter, base, dtype)
    image = built(adapter, plan, dtype)
    for key, (a, b) in unpacked(plan, image, base, dtype).items():
        reference = expected[key]
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        scale = float(reference.abs().max()) * chosen[key] ** 0.5
        assert float((b @ a - reference).abs().max()) <= tolerance * scale, key
        assert not a[chosen[key] :].any() and not b[:, chosen[key] :].any()  # padding is zero


def test_scaling_is_folded_in_float32(tmp_path: Path) -> None:
    """SCALE: s * B is rounded once: bit-equal to float32 arithmetic, not to bf16 times bf16."""
    base = geometry(32, 48, 2, 1, 1)
    write_random(tmp_path / "a", base, {(0, "q_proj"): 7}, torch.bfloat16)
    adapter = read_adapter(tmp_path / "a", base, max_rank=64)
    plan = plan_for(adapter, base, torch.bfloat16)
    _, b = unpacked(plan, built(adapter, plan, torch.bfloat16), base, torch.bfloat16)[0, "q_proj"]
    generator = torch.Generator().manual_seed(1)
    torch.randn(7, 32, generator=generator)
    stored = torch.randn(32, 7, generator=generator).bfloat16()
    once = (stored.float() * (3 / 7)).bfloat16().double()
    twice = (stored * torch.tensor(3 / 7).bfloat16()).double()
    assert torch.equal(b[:, :7], once) and not torch.equal(once, twice)


def test_unused_bytes_are_zero(base: Path, tmp_path: Path) -> None:
    """Nothing of what lay in the memory before is left in the image, gaps included."""
    adapter = read(write_good(tmp_path / "a"), base)
    plan = plan_for(adapter, read_geometry(base))
    one = built(adapter, plan)
    other = torch.zeros_like(one)
    build_image(adapter, plan, torch.float32, other)
    assert torch.equal(one, other) and plan.wasted_bytes > 0


def test_check_values_off(base: Path, tmp_path: Path) -> None:
    """F40: with the check off, NaN goes through as it is."""
    tensors = good_tensors()
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = np.nan
    folder = write_good(tmp_path / "a")
    save_file({n: torch.from_numpy(t) for n, t in tensors.items()}, folder / WEIGHTS)
    adapter = read(folder, base)
    plan = plan_for(adapter, read_geometry(base))
    out = torch.empty(plan.num_pages, plan.page_bytes, dtype=torch.uint8)
    build_image(adapter, plan, torch.float32, out, check_values=False)
    assert int(out.view(torch.float32).isnan().sum()) == 1


def test_wrong_plan_is_a_bug(base: Path, tmp_path: Path) -> None:
    """A plan for other ranks, dtype or pages is refused before anything is written."""
    adapter, base_geometry = read(write_good(tmp_path / "a"), base), read_geometry(base)
    plan = plan_for(adapter, base_geometry)
    with pytest.raises(ValueError, match="the plan needs other pages"):
        build_image(adapter, plan, torch.float32, torch.empty(1, 1, dtype=torch.uint8))
    out = torch.empty(plan.num_pages, plan.page_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="another adapter or dtype"):
        build_image(adapter, plan, torch.bfloat16, out)


# ---------------------------------------------------------------- digests and versions


def test_digest_is_of_the_content(base: Path, tmp_path: Path) -> None:
    """CACHE: equal content, equal digest, wherever it lies; any byte changes it."""
    one = read(write_good(tmp_path / "a"), base)
    other = read(write_good(tmp_path / "b"), base)
    assert content_digest(one) == content_digest(other) and len(content_digest(one)) == 64
    changed = [
        read(write_good(tmp_path / "seed", seed=1), base),
        read(write_good(tmp_path / "alpha", lora_alpha=9), base),
        read(write_good(tmp_path / "note", inference_mode=True), base),
    ]
    digests = {content_digest(adapter) for adapter in [one, *changed]}
    assert len(digests) == 4


def test_digest_is_remembered(base: Path, tmp_path: Path) -> None:
    """A second digest of unchanged files reads nothing; a changed file is hashed anew."""
    memory = DigestMemory()
    folder = write_good(tmp_path / "a")
    adapter = read(folder, base)
    digest = content_digest(adapter, memory)
    assert memory.get(adapter.files) == digest
    memory.put(adapter.files, "remembered")
    assert content_digest(read(folder, base), memory) == "remembered"
    write_good(folder, seed=2)
    assert content_digest(read(folder, base), memory) not in ("remembered", digest)


def test_same_size_and_mtime_is_still_noticed(base: Path, tmp_path: Path) -> None:
    """CACHE: a rewrite that restores the mtime (as rsync -t does) is another version."""
    import os

    folder = write_good(tmp_path / "a")
    before = content_digest(read(folder, base))
    status = (folder / WEIGHTS).stat()
    save_file({n: torch.from_numpy(t) for n, t in good_tensors(5).items()}, folder / WEIGHTS,
              metadata={"format": "pt"})  # fmt: skip
    os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (folder / WEIGHTS).stat().st_size == status.st_size
    assert content_digest(read(folder, base)) != before


def test_replaced_after_reading(base: Path, tmp_path: Path) -> None:
    """F31: headers of one version, weights of another: refused by digest and by image."""
    folder = write_good(tmp_path / "a")
    adapter = read(folder, base)
    plan = plan_for(adapter, read_geometry(base))
    write_good(folder, seed=9)
    for use in (lambda: content_digest(adapter, DigestMemory()), lambda: built(adapter, plan)):
        with pytest.raises(AdapterError, match="changed since its header was read") as caught:
            use()
        assert caught.value.reason == "changed"
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match="no such file"):
        built(adapter, plan)


def test_versions_under_a_busy_writer(base: Path, tmp_path: Path) -> None:
    """F31: a writer replaces, truncates and overwrites: whole versions or clean errors only."""
    folder = write_good(tmp_path / "live")
    wholes = {}
    for seed in range(4):
        other = write_good(tmp_path / str(seed), seed=seed)
        adapter = read(other, base)
        plan = plan_for(adapter, read_geometry(base))
        wholes[built(adapter, plan).numpy().tobytes()] = (other / WEIGHTS).read_bytes()
    stop = threading.Event()

    def write() -> None:
        versions = itertools.cycle(wholes.values())
        for turn in itertools.count():
            if stop.is_set():
                return
            raw, path = next(versions), folder / WEIGHTS
            if turn % 3 == 0:
                temporary = folder / "next"
                temporary.write_bytes(raw)
                temporary.replace(path)
            elif turn % 3 == 1:
                path.write_bytes(raw)
            else:
                path.write_bytes(raw[: len(raw) // 2])
                time.sleep(0.002)
                path.write_bytes(raw)
            time.sleep(0.03 if turn % 2 else 0.0)

    writer = threading.Thread(target=write)
    writer.start()
    counts = {"whole": 0, "error": 0}
    try:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            try:
                adapter = read(folder, base)
                image = built(adapter, plan_image(
                    adapter.ranks, read_geometry(base).module_shapes, page_bytes(2, 2, 16, 4), 4
                ))  # fmt: skip
            except AdapterError:
                counts["error"] += 1
                continue
            assert image.numpy().tobytes() in wholes
            counts["whole"] += 1
    finally:
        stop.set()
        writer.join()
    print(counts)
    assert counts["whole"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_values_are_told_from_infinite_ones(
    base: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Sums tell that nothing is wrong. Where they overflow, the values themselves decide."""
    large = torch.finfo(dtype).max / 4
    tensors = {n: torch.from_numpy(t).to(dtype) for n, t in good_tensors().items()}
    for name, tensor in tensors.items():
        if "lora_A" in name:
            tensor.fill_(large)
    folder = write_good(tmp_path / "a")
    save_file(tensors, folder / WEIGHTS)
    geometry = read_geometry(base)
    adapter = read(folder, base)
    image = built(adapter, plan_for(adapter, geometry, dtype), dtype)
    assert image.view(dtype).max() == torch.tensor(large, dtype=dtype)
    for name in tensors:
        spoiled = {n: t.clone() for n, t in tensors.items()}
        spoiled[name].view(-1)[-1] = torch.inf
        folder = write_good(tmp_path / name)
        save_file(spoiled, folder / WEIGHTS)
        adapter = read(folder, base)
        with pytest.raises(AdapterError, match=re.escape(name)):
            built(adapter, plan_for(adapter, geometry, dtype), dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_however_many_threads_share_the_work(tmp_path: Path, stored: torch.dtype) -> None:
    """Where the files are in the compute dtype, factors of some modules are read straight to the
    image, others of ranks that no tile has are placed; the image is the same."""
    base = geometry(32, 48, 2, 1, 4)
    ranks = {(n, m): 16 if n % 2 else 7 for n in range(4) for m in base.module_shapes}
    write_random(tmp_path / "a", base, ranks, stored)
    adapter = read_adapter(tmp_path / "a", base, max_rank=64)
    plan = plan_for(adapter, base, torch.bfloat16)
    expected = built(adapter, plan, torch.bfloat16)
    with ThreadPoolExecutor(8) as threads:
        for helpers in (0, 1, 3, 7):
            out = torch.full_like(expected, 255)
            crew = Crew(threads, helpers)
            build_image(adapter, plan, torch.bfloat16, out, crew=crew)
            assert torch.equal(out, expected), helpers
