"""Random adapters made in place, for tests of speed and capacity.

`dummy:rank=16,targets=all,seed=3` writes a PEFT folder whose numbers depend on the seed and the
base's shape alone. A is uniform within 1 / sqrt(d_in), B within 0.02, so that the answers differ
from the base's and stay finite. With `layers=1` only the first layer has numbers; the others are
zeros, which a file system stores as a hole: 2,000 adapters of 51 MB then take 3 GB of a disk.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from multilora_cli.adapters.source.base import SourceContext
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import AdapterError
from multilora_cli.sizing.geometry import ModelGeometry, projection_name
from multilora_cli.sizing.pages import ATTENTION, TARGETS
from multilora_kernels.layout import MODULES

_FORMAT = 1  # grows when the same text would give other bytes
_TARGETS = {**TARGETS, "mlp": tuple(name for name in MODULES if name not in ATTENTION)}
_KEYS = ("rank", "alpha", "targets", "seed", "layers")
_KEYS_TEXT = ", ".join(f"{key}=" for key in _KEYS)
_RANK_MAX = 512
_B_LIMIT = 0.02


@dataclass(frozen=True, slots=True)
class DummySpec:
    """What the text after `dummy:` says."""

    rank: int = 16
    alpha: int = 32
    targets: tuple[str, ...] = MODULES
    seed: int = 0
    layers: int | None = None  # that have numbers, the first ones; None: all


class DummySource:
    """`dummy:rank=16,targets=all,seed=3`, every part optional, and so are `alpha` (default 2 x
    rank) and `layers`."""

    def resolve(self, text: str, context: SourceContext) -> Path:
        """The folder of the random adapter, written once into the context's cache."""
        spec = parse_spec(text)
        geometry = context.geometry
        if geometry is None or context.cache is None:
            raise ValueError("a dummy adapter needs a geometry and a cache folder")
        key = repr((_FORMAT, spec, geometry.num_layers, sorted(geometry.module_shapes.items())))
        folder = context.cache / f"dummy-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        if not (folder / "adapter_config.json").is_file():
            _publish(folder, lambda path: write_dummy(path, spec, geometry))
        return folder


def make_dummies(sources: Iterable[str], geometry: ModelGeometry, cache: Path) -> None:
    """Write the `dummy:` ones among `sources` into `cache`; wrong ones are left to their reader.

    Who reads a file waits until it is 20 ms old. Of thousands, all but the last are by then.
    """

    def make(text: str) -> None:
        with suppress(AdapterError):
            DummySource().resolve(text, SourceContext(Path(), geometry, cache))

    texts = {source.removeprefix("dummy:") for source in sources if source.startswith("dummy:")}
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(make, texts):
            pass


def shape_alone(source: str) -> str:
    """A `dummy:` source of the same shape with numbers in one layer, the same for all of a shape:
    for who reads headers alone. Any other source, and a wrong one, as it is."""
    if not source.startswith("dummy:"):
        return source
    try:
        spec = parse_spec(source.removeprefix("dummy:"))
    except AdapterError:
        return source
    return f"dummy:rank={spec.rank},alpha={spec.alpha},targets={'+'.join(spec.targets)},layers=1"


def parse_spec(text: str) -> DummySpec:
    """The parsed text after `dummy:`. Raises AdapterError."""
    fields: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        if not separator or key in fields or key not in _KEYS:
            raise _error(text, f"{quoted(part)}: expected one of {_KEYS_TEXT}, once")
        fields[key] = value
    rank = _number(text, fields, "rank", 16, 1, _RANK_MAX)
    return DummySpec(
        rank=rank,
        alpha=_number(text, fields, "alpha", 2 * rank, 1, 2**20),
        targets=_modules(text, fields.get("targets", "all")),
        seed=_number(text, fields, "seed", 0, 0, 2**63 - 1),
        layers=_number(text, fields, "layers", 1, 1, 1000) if "layers" in fields else None,
    )


def write_dummy(folder: Path, spec: DummySpec, geometry: ModelGeometry) -> None:
    """Write the adapter of `spec` into the existing `folder`, weights in bfloat16."""
    shapes = _tensor_shapes(spec, geometry)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + shape[0] * shape[1] * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    generator = np.random.PCG64(spec.seed)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, (rows, columns) in _first_layers(shapes, spec):
            limit = columns**-0.5 if ".lora_A." in name else _B_LIMIT
            file.write(_uniform_bf16(generator, rows * columns, limit).data)
        file.truncate(8 + len(raw) + position)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": list(spec.targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensor_shapes(spec: DummySpec, geometry: ModelGeometry) -> Mapping[str, tuple[int, int]]:
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(geometry.num_layers):
        for module in spec.targets:
            path = f"base_model.model.{projection_name(layer, module)}"
            d_in, d_out = geometry.module_shapes[module]
            shapes[f"{path}.lora_A.weight"] = (spec.rank, d_in)
            shapes[f"{path}.lora_B.weight"] = (d_out, spec.rank)
    return shapes


def _first_layers(
    shapes: Mapping[str, tuple[int, int]], spec: DummySpec
) -> Iterable[tuple[str, tuple[int, int]]]:
    """The tensors that have numbers; those of the layers behind them are left out."""
    if spec.layers is None:
        return shapes.items()
    return islice(shapes.items(), spec.layers * len(spec.targets) * 2)


def _uniform_bf16(generator: np.random.PCG64, count: int, limit: float) -> npt.NDArray[np.uint16]:
    """`count` numbers within +-limit, rounded to bfloat16, from raw bits that never change."""
    raw = generator.random_raw(-(-count // 4)).view(np.uint16)[:count]
    return _bf16_of_int16(limit)[raw]


@lru_cache(maxsize=64)
def _bf16_of_int16(limit: float) -> npt.NDArray[np.uint16]:
    """All 65,536 int16 as numbers within +-limit, rounded to bfloat16; by their bits, uint16."""
    values = np.arange(2**16, dtype=np.uint16).view(np.int16).astype(np.float32)
    bits = (values * np.float32(limit / 2**15)).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2")


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Write beside `folder`, then rename: whoever looks sees all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        write(temporary)
        os.replace(temporary, folder)
    except OSError:
        if not (folder / "adapter_config.json").is_file():  # else somebody else was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _number(
    text: str, fields: Mapping[str, str], key: str, default: int, least: int, most: int
) -> int:
    value = fields.get(key)
    if value is None:
        return default
    digits = value.isascii() and value.isdigit() and len(value) < 20
    if not digits or not least <= int(value) <= most:
        raise _error(text, f"{key}: found {quoted(value)}, expected {least} to {most}")
    return int(value)


def _modules(text: str, value: str) -> tuple[str, ...]:
    if value in _TARGETS:
        return _TARGETS[value]
    names = value.split("+")
    if not set(names) <= set(_TARGETS["all"]):
        raise _error(
            text,
            f"targets: found {quoted(value)}, expected {', '.join(_TARGETS)} or module names"
            " joined by +",
        )
    return tuple(module for module in _TARGETS["all"] if module in names)


def _error(text: str, message: str) -> AdapterError:
    return AdapterError(f"source dummy:{quoted(text)[1:-1]}: {message}", reason="source")
