"""How long a start takes to read the adapters of a large fleet, and how much memory.

    python tools/register_many.py --count 5000 [--layouts 4] [--shape llama3-8b] [--keep FOLDER]

Makes a fleet of local adapters (headers are real, weights are holes in the file) on a base that
consists of its config.json, runs the part of `mlora serve` that reads the fleet file and registers
every adapter, twice: as after a first installation, and again. Prints one JSON line for each.
Every adapter's header has text of its own; `--layouts` says how many sets of ranks there are.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {
    "llama3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "llama3-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                   "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    """Make the fleet, then measure it in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--layouts", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--keep", type=Path, help="make the fleet there, or use the one there")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        if not (folder / "fleet.yaml").is_file():
            make_fleet(folder, SHAPES[arguments.shape], arguments.count, arguments.layouts)
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        command = [sys.executable, __file__, "--measure", str(folder / "fleet.yaml")]
        for start in ("first", "second"):
            ran = subprocess.run(command, env=environment, capture_output=True, check=True)
            found = json.loads(ran.stdout)
            kind = {"adapters": arguments.count, "layouts": arguments.layouts}
            print(json.dumps({"start": start, "shape": arguments.shape, **kind, **found}))


def measure(fleet: Path) -> dict[str, float]:
    """Register the fleet's adapters as `mlora serve` does; seconds and MB (10^6 bytes)."""
    from multilora_cli.cli.startup import prepare

    before_mb, began_s, began_cpu_s = _resident_mb(), time.perf_counter(), time.process_time()
    startup = prepare(fleet)
    if startup.failures:
        raise SystemExit(f"{startup.failures[0][0]}: {startup.failures[0][1].message}")
    return {
        "wall_s": round(time.perf_counter() - began_s, 2),
        "cpu_s": round(time.process_time() - began_cpu_s, 2),
        "grown_mb": round(_resident_mb() - before_mb, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, 1),
        "cores": len(os.sched_getaffinity(0)),
    }


def make_fleet(folder: Path, shape: dict[str, int], count: int, layouts: int) -> None:
    """Base, adapters and fleet file."""
    base = folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (base / "config.json").write_text(json.dumps({**config, **shape}))
    (base / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for index in range(count):
        write_adapter(folder / "adapters" / f"tenant-{index:05d}", shape, index, index % layouts)
    (folder / "fleet.yaml").write_text(
        "base: {model: ./base, name: base}\nmemory: {device: cpu}\n"
        "adapters:\n  - folder: ./adapters/*\n"
    )


def write_adapter(folder: Path, shape: dict[str, int], index: int, layout: int) -> None:
    """A folder as PEFT writes it: all projections, ranks 8 and 16 by layer, bfloat16."""
    folder.mkdir(parents=True)
    ranks = {layer: 8 if layout >> layer % 13 & 1 else 16
             for layer in range(shape["num_hidden_layers"])}  # fmt: skip
    header: dict[str, object] = {"__metadata__": {"format": "pt", "run": f"run-{index}"}}
    position = 0
    for layer, rank in ranks.items():
        for name, rows, columns in _tensors(shape, layer, rank):
            size = rows * columns * 2
            header[name] = {"dtype": "BF16", "shape": [rows, columns],
                            "data_offsets": [position, position + size]}  # fmt: skip
            position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
    pattern = {rf"layers\.{layer}\..*": rank for layer, rank in ranks.items() if rank != 16}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base",
        "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "bias": "none", "use_rslora": False,
        "target_modules": list(MODULES), "rank_pattern": pattern,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _tensors(shape: dict[str, int], layer: int, rank: int) -> list[tuple[str, int, int]]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"]
    kv = hidden // heads * shape["num_key_value_heads"]
    sizes = {"q_proj": (hidden, hidden), "k_proj": (hidden, kv), "v_proj": (hidden, kv),
             "o_proj": (hidden, hidden), "gate_proj": (hidden, inner), "up_proj": (hidden, inner),
             "down_proj": (inner, hidden)}  # fmt: skip
    rows = []
    for module, (d_in, d_out) in sizes.items():
        block = "self_attn" if module in MODULES[:4] else "mlp"
        path = f"base_model.model.model.layers.{layer}.{block}.{module}"
        rows += [(f"{path}.lora_A.weight", rank, d_in), (f"{path}.lora_B.weight", d_out, rank)]
    return rows


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


if __name__ == "__main__":
    main()
