"""A small valid adapter, and ways to spoil it, one thing at a time."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
RANK = 4
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
V_B = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
Array = np.ndarray[Any, np.dtype[Any]]


def good_tensors(seed: int = 0) -> dict[str, Array]:
    """q_proj and v_proj of both layers of F1, rank 4, float32."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for layer in (0, 1):
        for module, d_out in (("q_proj", 64), ("v_proj", 32)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            a, b = random.normal(size=(RANK, 64)), random.normal(size=(d_out, RANK))
            tensors[f"{path}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def write_good(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """A small valid adapter, written without PEFT."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / CONFIG).write_text(json.dumps(config | fields))
    save_file(good_tensors(seed), folder / WEIGHTS, metadata={"format": "pt"})
    return folder


# ---------------------------------------------------------------- ways to spoil


def fields(**changes: Any) -> Callable[[Path], object]:
    """Set fields of the config."""

    def build(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return build


def without(*names: str) -> Callable[[Path], object]:
    """Remove files."""
    return lambda folder: [(folder / name).unlink() for name in names]


def config_bytes(raw: bytes) -> Callable[[Path], object]:
    """Replace the config by these bytes."""
    return lambda folder: (folder / CONFIG).write_bytes(raw)


def config_text(**spellings: str) -> Callable[[Path], object]:
    """Set fields to JSON text that json.dumps would not write."""

    def build(folder: Path) -> None:
        text = (folder / CONFIG).read_text().rstrip("}")
        extra = ", ".join(f'"{key}": {value}' for key, value in spellings.items())
        kept = json.loads(text + "}")
        body = json.dumps({k: v for k, v in kept.items() if k not in spellings}).rstrip("}")
        (folder / CONFIG).write_text(f"{body}, {extra}}}")

    return build


def tensors(edit: Callable[[dict[str, Array]], Mapping[str, Array]]) -> Callable[[Path], object]:
    """Rewrite the tensors, validly."""

    def build(folder: Path) -> None:
        changed = {n: np.ascontiguousarray(t) for n, t in edit(load_file(folder / WEIGHTS)).items()}
        save_file(changed, folder / WEIGHTS)

    return build


def split_file(raw: bytes) -> tuple[bytes, bytes]:
    """Header JSON and data of a safetensors file."""
    length = struct.unpack("<Q", raw[:8])[0]
    return raw[8 : 8 + length], raw[8 + length :]


def raw_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of these parts, with a length field that may lie."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def header(edit: Callable[[dict[str, Any]], object], pad: bytes = b"") -> Callable[[Path], object]:
    """Edit the header's JSON in place, data untouched, `pad` appended."""

    def build(folder: Path) -> None:
        text, data = split_file((folder / WEIGHTS).read_bytes())
        parsed = json.loads(text)
        edit(parsed)
        (folder / WEIGHTS).write_bytes(raw_file(json.dumps(parsed).encode(), data + pad))

    return build


def header_text(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Edit the header's bytes, data untouched."""

    def build(folder: Path) -> None:
        text, data = split_file((folder / WEIGHTS).read_bytes())
        (folder / WEIGHTS).write_bytes(raw_file(edit(text), data))

    return build


def weights(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Edit the weight file's bytes."""

    def build(folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(edit(path.read_bytes()))

    return build


def entry(name: str = Q_A, **changes: Any) -> Callable[[Path], object]:
    """Change one tensor's header entry."""
    return header(lambda parsed: parsed[name].update(changes))


def renamed(old: str, new: str) -> Callable[[Path], object]:
    """Rename one tensor."""
    return tensors(lambda ts: {new if name == old else name: t for name, t in ts.items()})


def value(name: str, index: int | slice, number: float) -> Callable[[Path], object]:
    """Set elements of one tensor."""

    def edit(ts: dict[str, Array]) -> dict[str, Array]:
        flat = ts[name].copy().reshape(-1)
        flat[index] = number
        return ts | {name: flat.reshape(ts[name].shape)}

    return tensors(edit)


def replaced_by(make: Callable[[Path], object], name: str = WEIGHTS) -> Callable[[Path], object]:
    """Something else in place of a file."""

    def build(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return build


def symlink(path: Path) -> None:
    """A link to another file in its place."""
    target = path.parent / "elsewhere"
    target.write_bytes(b"x")
    path.symlink_to(target)


def loop(path: Path) -> None:
    """A link to itself in its place."""
    path.symlink_to(path.name)


def shards(folder: Path) -> None:
    """The weight file under a shard's name."""
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00001.safetensors")


def index(weight_map: Any) -> Callable[[Path], object]:
    """One shard with an index of this weight_map."""

    def build(folder: Path) -> None:
        shards(folder)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return build


def bin_alone(folder: Path) -> None:
    """Only a .bin file is left."""
    torch.save({"x": torch.ones(1)}, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def lookalike(folder: Path) -> None:
    """Another tool's file name and no config."""
    without(CONFIG)(folder)
    (folder / WEIGHTS).rename(folder / "lora.safetensors")


def duplicate_tensor(text: bytes) -> bytes:
    """The header text with one tensor named twice."""
    parsed = json.loads(text)
    again = json.dumps({Q_A: parsed[Q_A]})[1:-1].encode()
    return text.rstrip()[:-1] + b"," + again + b"}"


def many(count: int) -> bytes:
    """A file of `count` empty tensors."""
    empty = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
    return raw_file(json.dumps(empty).encode())


def fake_sparse(size: int) -> Callable[[Path], object]:
    """A header that claims `size` bytes in a sparse file that really is so long."""

    def build(folder: Path) -> None:
        with (folder / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", size))
            file.truncate(8 + size)

    return build


def swap(parsed: dict[str, Any]) -> None:
    """Begin and end of one tensor exchanged."""
    parsed[Q_A]["data_offsets"].reverse()


def overlap(parsed: dict[str, Any]) -> None:
    """Two tensors over the same bytes."""
    parsed[Q_A]["data_offsets"] = parsed[V_B]["data_offsets"] = [0, 1024]
    parsed[V_B]["shape"] = [64, 4]


def shift(parsed: dict[str, Any]) -> None:
    """All tensors 16 bytes further on."""
    for info in parsed.values():
        if "data_offsets" in info:
            info["data_offsets"] = [offset + 16 for offset in info["data_offsets"]]
