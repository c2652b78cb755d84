"""Checkpoints on disk: complete ones load bit by bit, anything else is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from multilora_cli.errors import ModelError
from multilora_cli.models.checkpoint import base_digest, open_checkpoint, shard_files
from multilora_cli.models.loader import load_decoder
from multilora_cli.models.tensor_reader import TensorReader
from multilora_cli.sizing.geometry import read_geometry
from tests.models import tiny
from tests.models.harness import PagedRunner, Row, random_prompts

INDEX = "model.safetensors.index.json"
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen2 with biases, in one file."""
    model = tiny.make_model("qwen2", num_hidden_layers=2)
    return tiny.save_model(model, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pristine_sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in several files with an index."""
    model = tiny.make_model("qwen2", num_hidden_layers=2)
    folder = tiny.save_model(model, tmp_path_factory.mktemp("base"), max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "base"))


@pytest.fixture
def sharded(pristine_sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine_sharded, tmp_path / "shards"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors after `change` of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ModelError) as caught:
        tiny.load(folder, dtype)
    return caught.value.message


def test_every_tensor_lands_in_its_place(folder: Path, sharded: Path) -> None:
    """Bit by bit, the packed weights included, from one file and from shards."""
    expected = load_file(folder / "model.safetensors")
    for path in (folder, sharded):
        decoder = tiny.load(path)
        assert decoder.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(decoder.tensors[name], tensor), name
    layer = decoder.layers[1]
    stored = [expected[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.attention.qkv.weight.dequantise(), torch.cat(stored))
    stored = [expected[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up.weight.dequantise(), torch.cat(stored))
    assert layer.mlp.gate_up.weight.nbytes == 2 * 96 * 64 * 4


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_float_dtype_is_converted(
    folder: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    """As torch converts, whatever is stored."""
    edit(folder, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()}))
    decoder = tiny.load(folder, dtype)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(decoder.tensors[name], tensor.to(dtype)), name


def test_large_tensors_are_read_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers far smaller than a tensor, and several threads for each, change nothing."""
    monkeypatch.setattr("multilora_cli.models.tensor_reader._BUFFER_BYTES", 1000)
    monkeypatch.setattr("multilora_cli.models.tensor_reader._SLICE_BYTES", 300)
    for dtype in (torch.float32, torch.bfloat16):
        decoder = tiny.load(folder, dtype)
        for name, tensor in load_file(folder / "model.safetensors").items():
            assert torch.equal(decoder.tensors[name], tensor.to(dtype)), name


def test_progress_counts_bytes(sharded: Path) -> None:
    """Grows to the total, one report a tensor."""
    reports: list[tuple[str, int, int]] = []
    geometry = read_geometry(sharded)
    load_decoder(
        sharded, geometry, torch.device("cpu"), torch.float32, lambda *args: reports.append(args)
    )
    done = [report[1] for report in reports]
    assert done == sorted(done) and done[-1] == reports[-1][2] == open_checkpoint(sharded).nbytes
    assert {report[0] for report in reports} == {"weights"}


def test_files_are_read_not_mapped(sharded: Path) -> None:
    """No weight file appears in the process's memory maps while it is loaded."""
    maps: list[str] = []
    load_decoder(
        sharded,
        read_geometry(sharded),
        torch.device("cpu"),
        torch.float32,
        lambda *args: maps.append(Path("/proc/self/maps").read_text()),
    )
    assert maps and not any(str(sharded) in text for text in maps)


def test_missing_and_unexpected_tensors_are_named(folder: Path) -> None:
    """One of each, then more than are listed."""
    edit(folder, lambda tensors: tensors.pop(Q0))
    assert Q0 in refusal(folder)
    edit(
        folder, lambda tensors: tensors.update({Q0: torch.zeros(64, 64), "extra.w": torch.ones(1)})
    )
    assert "'extra.w' not expected" in refusal(folder)
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1.mlp" in name])
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".0.self" in name])
    assert "and 7 more missing of 27" in refusal(folder)


def test_a_bias_the_config_does_not_know_is_refused(folder: Path) -> None:
    """Qwen2 tensors under a Llama config: the biases would be dropped in silence."""
    edit_json(folder / "config.json", lambda c: c.update(architectures=["LlamaForCausalLM"]))
    assert "self_attn.k_proj.bias" in refusal(folder)


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(64, 32), "[64, 32], expected [64, 64]"),
        (torch.zeros(64 * 64), "[4096], expected [64, 64]"),
        (torch.zeros(64, 64, dtype=torch.int32), "dtype I32"),
        (torch.zeros(64, 64).to(torch.float8_e4m3fn), "dtype F8_E4M3"),
    ],
)
def test_wrong_shapes_and_dtypes(folder: Path, tensor: torch.Tensor, found: str) -> None:
    """File, tensor, found and expected, before any data is read."""
    edit(folder, lambda tensors: tensors.update({Q0: tensor}))
    message = refusal(folder)
    assert found in message and Q0 in message and "model.safetensors" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights(folder: Path, value: float) -> None:
    """One bad number among thousands, in the stored dtype and converted."""
    edit(folder, lambda tensors: tensors[Q0].view(-1).__setitem__(77, value))
    for dtype in (torch.float32, torch.bfloat16):
        assert Q0 in refusal(folder, dtype)


def test_overflow_of_float16(folder: Path) -> None:
    """1e5 is fine in bf16 and infinite in fp16: refused with the way out."""
    edit(folder, lambda tensors: tensors[Q0].view(-1).__setitem__(5, 1e5))
    tiny.load(folder, torch.bfloat16)
    with pytest.raises(ModelError, match="not finite in float16") as caught:
        tiny.load(folder, torch.float16)
    assert caught.value.hint == "serve it as bfloat16"


@pytest.mark.parametrize("keep", [0, 5, 8, 200, 0.5, -1])
def test_a_truncated_file(folder: Path, keep: float) -> None:
    """Cut anywhere: a clean error that names the file."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    message = refusal(folder)
    assert "model.safetensors" in message
    if keep == 0.5:
        assert "tensor 'model." in message and "expected" in message


def test_a_file_cut_while_it_is_read(sharded: Path) -> None:
    """The last shard loses its end after the headers were checked: an error, not a dead process."""
    last = sorted(sharded.glob("*.safetensors"))[-1]

    def cut(phase: str, done: int, total: int) -> None:
        with last.open("r+b") as file:
            file.truncate(last.stat().st_size // 2)

    with pytest.raises(ModelError, match=last.name):
        load_decoder(sharded, read_geometry(sharded), torch.device("cpu"), torch.float32, cut)


def test_trailing_and_hostile_headers(folder: Path) -> None:
    """Bytes after the last tensor, a huge header length, no JSON."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for content in (data + b"x", b"\xff" * 8 + data[8:], data[:8] + b"[" + data[9:]):
        path.write_bytes(content)
        assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "",
     "model.bin", ".hidden.safetensors", "a\\b.safetensors", "a\n.safetensors", 7, None],
)  # fmt: skip
def test_an_index_may_name_plain_files_only(sharded: Path, name: object) -> None:
    """Paths out of the folder, other kinds of file, other types."""
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({Q0: name}))
    message = refusal(sharded)
    assert INDEX in message and "expected the name of a .safetensors file" in message


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": {}}', b"\xff\xfe", b"[" * 9999]
)
def test_a_broken_index(sharded: Path, content: bytes) -> None:
    """Not JSON, not an index, empty, nested without end."""
    (sharded / INDEX).write_bytes(content)
    assert INDEX in refusal(sharded)


def test_an_index_that_contradicts_the_files(sharded: Path) -> None:
    """A tensor in another shard than stated, in none, in two; a shard that is not there."""
    good = (sharded / INDEX).read_text()
    files = sorted(set(json.loads(good)["weight_map"].values()))
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({Q0: files[-1]}))
    assert f"should be in {files[-1]}" in refusal(sharded)
    (sharded / INDEX).write_text(good)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"ghost": files[0]}))
    assert "'ghost'" in refusal(sharded) and "no file" in refusal(sharded)
    (sharded / INDEX).write_text(good)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"x": "gone.safetensors"}))
    assert "gone.safetensors: no such file" in refusal(sharded)
    (sharded / INDEX).write_text(good)
    save_file({**load_file(sharded / files[0]), Q0: torch.zeros(64, 64)}, sharded / files[0])
    save_file({**load_file(sharded / files[1]), Q0: torch.zeros(64, 64)}, sharded / files[1])
    assert "expected once" in refusal(sharded)


def test_no_weights_and_pickled_weights(folder: Path) -> None:
    """Says what is missing; .bin files are never read."""
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError) as caught:
        tiny.load(folder)
    assert caught.value.hint is not None and "never read" in caught.value.hint


def test_files_beside_the_index_are_left_alone(sharded: Path) -> None:
    """Repositories hold the same weights twice (consolidated.safetensors)."""
    (sharded / "consolidated.safetensors").write_bytes(b"whatever")
    tiny.load(sharded)
    assert not any(file.name == "consolidated.safetensors" for file in shard_files(sharded)[0])


def test_harmless_extras(folder: Path) -> None:
    """Rotary buffers of old exporters."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    tiny.load(folder)


def test_a_tied_head_saved_twice(tmp_path: Path) -> None:
    """An equal copy is harmless; a different one would be ignored in silence, so it is refused."""
    model = tiny.make_model("llama", tie_word_embeddings=True)
    folder = tiny.save_model(model, tmp_path)
    embedding = "model.embed_tokens.weight"
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    decoder = tiny.load(folder)
    assert decoder.head.weight.data_ptr() == decoder.embedding.weight.data_ptr()
    edit(folder, lambda tensors: tensors["lm_head.weight"].view(-1).__setitem__(0, 9.0))
    assert "differs from" in refusal(folder)
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=False))
    assert float(tiny.load(folder).head.weight[0, 0]) == 9.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_dummy_weights_run(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """From config.json alone: finite, repeatable, hidden states and logits of unit size."""
    config = tiny.make_model(family, num_hidden_layers=8).config
    config.architectures = [f"{family.capitalize()}ForCausalLM"]
    config.save_pretrained(tmp_path)
    geometry = read_geometry(tmp_path)
    reports: list[int] = []
    decoders = [
        load_decoder(
            tmp_path,
            geometry,
            torch.device("cpu"),
            dtype,
            lambda phase, done, total: reports.append(total - done),
            load_format="dummy",
        )
        for _ in range(2)
    ]
    assert reports[-1] == 0
    assert all(
        torch.equal(tensor, decoders[1].tensors[name]) and bool(tensor.isfinite().all())
        for name, tensor in decoders[0].tensors.items()
    )
    logits = PagedRunner(decoders[0]).run([Row(random_prompts([100], tiny.VOCAB)[0])])[0]
    assert bool(logits.isfinite().all()) and 0.3 < float(logits.std()) < 3
    assert base_digest(tmp_path, "dummy") == base_digest(tmp_path, "dummy")


def test_base_digest(folder: Path, sharded: Path, tmp_path: Path) -> None:
    """Follows config and headers, not the folder's name; shards and single file differ."""
    digest = base_digest(folder)
    assert len(digest) == 64
    assert base_digest(Path(shutil.copytree(folder, tmp_path / "copy"))) == digest
    assert base_digest(sharded) != digest != base_digest(folder, "dummy")
    edit(folder, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    assert base_digest(folder) != digest
    digest = base_digest(folder)
    edit_json(folder / "config.json", lambda config: config.update(rms_norm_eps=1e-6))
    assert base_digest(folder) != digest
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="claims a header"):
        base_digest(folder)


def test_a_buffer_is_filled_again_behind_its_copy_on_the_readers_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever card is the thread's own: its stream has passed what another one's has not."""
    points: list[object] = []

    class Event:
        def record(self, stream: object = None) -> None:
            points.append(stream)

        def synchronize(self) -> None: ...

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: empty(size, dtype=dtype))
    reader = TensorReader.__new__(TensorReader)
    reader._device, reader._buffers, reader._turn = torch.device("cuda", 1), [], 0
    monkeypatch.setattr(reader, "_read", lambda file, offset, buffer: None)
    for _ in range(2):
        reader._copy_through_buffer(None, 0, torch.zeros(4), torch.float32)  # type: ignore[arg-type]
    assert points == ["stream of cuda:1"] * 2
