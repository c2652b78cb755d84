"""Planning is quick: counted in CPU seconds, so that a busy machine does not decide."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from tests.cli.test_plan import LLAMA3_8B

SHAPES = {"q_proj": (4096, 4096), "k_proj": (4096, 1024), "v_proj": (4096, 1024),
          "o_proj": (4096, 4096)}  # fmt: skip


def cpu_seconds(*arguments: str) -> float:
    """User and system time of one run of `mlora`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "multilora_cli", *arguments]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def weights_header(rank: int) -> tuple[bytes, int]:
    """The header of an attention adapter for an 8B, and the bytes of its tensors."""
    fields, offset = {}, 0
    for layer in range(32):
        for module, (d_in, d_out) in SHAPES.items():
            for matrix, shape in (("A", [rank, d_in]), ("B", [d_out, rank])):
                size = shape[0] * shape[1] * 2
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{matrix}"
                fields[f"{name}.weight"] = {
                    "dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size],
                }  # fmt: skip
                offset += size
    raw = json.dumps(fields).encode()
    return len(raw).to_bytes(8, "little") + raw, offset


def write_fleet(folder: Path, count: int) -> Path:
    """`count` adapters of four ranks for an 8B, their weights holes in the files."""
    (folder / "8b").mkdir(parents=True)
    (folder / "8b" / "config.json").write_text(json.dumps(LLAMA3_8B))
    ranks = (8, 16, 32, 64)
    headers = {rank: weights_header(rank) for rank in ranks}
    for index in range(count):
        rank = ranks[index % len(ranks)]
        adapter = folder / f"a{index:04d}"
        adapter.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank,
                  "target_modules": list(SHAPES)}  # fmt: skip
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        header, size = headers[rank]
        with (adapter / "adapter_model.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + size)
    fleet = folder / "fleet.yaml"
    fleet.write_text("base: {model: ./8b, name: llama}\nadapters: [{folder: ./a*}]\n")
    return fleet


def test_a_fleet_of_2000_adapters_in_under_5_s(tmp_path: Path) -> None:
    """A-PERF-07: headers alone are read, and 64 GB of weights are not."""
    fleet = write_fleet(tmp_path, 2000)
    assert cpu_seconds("plan", str(fleet), "--gpu", "h200", "--json") < 5.0


def test_a_plan_of_3_adapters_in_under_1_s(tmp_path: Path) -> None:
    assert cpu_seconds("plan", str(write_fleet(tmp_path, 3)), "--gpu", "h200") < 1.0
