"""`mlora verify` over bad files: every one is named, none ends the run (G01, G02, G20)."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from multilora_cli.adapters.peft import read_adapter
from multilora_cli.adapters.vectors import UnknownBase
from multilora_cli.cli.app import app
from multilora_cli.engine.adapter_reader import AdapterReader
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.examine import examine
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.parity import Passage, Reference
from multilora_cli.errors import AdapterError
from multilora_cli.models.quantized import base_quantization
from multilora_cli.sizing.geometry import read_geometry
from multilora_cli.sizing.pages import kv_page_bytes
from tests.adapters.malformed import KINDS
from tests.adapters.spoil import CONFIG, WEIGHTS, write_good
from tests.adapters.test_safetensors_header import mutate, rewrite
from tests.fleet.test_load import HOSTILE
from tests.signature import tiny_base

runner = CliRunner()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F1."""
    return tiny_base(tmp_path_factory.mktemp("base"), tokenizer=False)


def test_all_malformed_kinds_in_one_run(base: Path, tmp_path: Path) -> None:
    """G01: 64 kinds and more beside a sound adapter; each is refused with its folder and words."""
    write_good(tmp_path / "sound")
    names = ["sound"]
    for index, kind in enumerate(KINDS.values()):
        folder = write_good(tmp_path / f"kind-{index}")
        kind.build(folder)
        names.append(folder.name)
    fleet = tmp_path / "fleet.yaml"
    entries = "\n".join(f"  - {{name: {name}, source: ./{name}}}" for name in names)
    fleet.write_text(
        f"base: {{model: '{base}', name: tiny}}\nlimits: {{max_lora_rank: 64}}\n"
        f"adapters:\n{entries}\n"
    )
    result = runner.invoke(app, ["verify", str(fleet), "--json"])
    assert result.exit_code == 1, result.output
    sound, *bad = json.loads(result.stdout)["adapters"]
    assert sound["verdict"] == "exact" and len(bad) == len(KINDS) >= 64
    for adapter, (name, kind) in zip(bad, KINDS.items(), strict=True):
        assert adapter["verdict"] == "refused", name
        for word in (*kind.words, str(tmp_path / adapter["name"])):
            assert word in adapter["reason"], (name, word, adapter["reason"])


class Examiner:
    """Reads, examines and computes one folder as `verify` does."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.geometry = read_geometry(base)
        self.quantization = base_quantization(base, self.geometry, "auto")
        config = EngineConfig(model_path=str(base), max_lora_rank=64)
        page = kv_page_bytes(self.geometry, 4)
        self.reader = AdapterReader(
            config, self.geometry, page, UnknownBase(self.geometry), torch.float32, Failpoints({})
        )

    def __call__(self, folder: Path, *, compute: bool) -> bool:
        """Whether it is accepted; anything but AdapterError gets out."""
        try:
            file = read_adapter(folder, self.geometry, max_rank=64, base_folder=self.base)
            examine(file, "mutant", self.geometry, self.reader, ("base", None))
        except AdapterError as error:
            assert str(folder) in str(error)
            return False
        if compute:
            with Reference(self.base, self.geometry, self.quantization, [file]) as reference:
                (found,) = reference.logprobs([Passage([5, 6, 7], 0)], lambda *_: None)
            assert found.shape == (3, self.geometry.vocab_size)
        return True


def mutate_config(raw: bytes, rng: random.Random) -> bytes:
    """Another value, another name, or bytes at random."""
    fields: dict[str, Any] = json.loads(raw)
    choice, name = rng.randrange(4), rng.choice(list(fields))
    values = [None, 0, 1, 4, 8.0, -1, "", "LORA", "q_proj", [], ["v_proj"], {}, True, 1e99]
    if choice == 0:
        fields[name] = rng.choice(values)
    elif choice == 1:
        known = ["use_rslora", "use_dora", "rank_pattern", "bias", "modules_to_save", "new_field"]
        fields[rng.choice(known)] = rng.choice(values)
    elif choice == 2:
        fields[name + rng.choice(["s", "_"])] = fields.pop(name)
    else:
        at = rng.randrange(len(raw))
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    return json.dumps(fields).encode()


def check_mutants(base: Path, folder: Path, count: int, seed: int) -> int:
    """`count` mutants of an adapter through all that verify does with its files."""
    rng, examiner = random.Random(seed), Examiner(base)
    write_good(folder)
    config, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
    accepted = 0
    for number in range(count):
        kind = number % 3
        _put(folder / CONFIG, mutate_config(config, rng) if kind == 0 else config)
        mutant = weights if kind == 0 else (mutate if kind == 1 else rewrite)(weights, rng)
        _put(folder / WEIGHTS, mutant)
        accepted += examiner(folder, compute=number % 10 == 0)
    return accepted


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.utime(path, (1_700_000_000, 1_700_000_000))


def test_mutated_adapters(base: Path, tmp_path: Path) -> None:
    """G02: a seeded hundredth of 100,000 mutants; AdapterError or a sound examination."""
    accepted = check_mutants(base, tmp_path / "mutant", 1_000, seed=20)
    assert 100 < accepted < 900


@pytest.mark.slow
def test_mutated_adapters_in_full(base: Path, tmp_path: Path) -> None:
    """G02: 100,000 mutants with ten seeds."""
    for seed in range(10):
        assert 1_000 < check_mutants(base, tmp_path / str(seed), 10_000, seed) < 9_000


@pytest.mark.parametrize(("kind", "text", "expected"), HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_fleet_files(tmp_path: Path, kind: str, text: str | bytes, expected: str) -> None:
    """G20: bad input is exit code 2 and one line with the place, as for every other command."""
    path = tmp_path / "fleet.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = runner.invoke(app, ["verify", str(path)])
    assert result.exit_code == 2 and result.stderr.startswith("error: "), (kind, result.output)
    assert str(path) in result.stderr
