"""A fleet in the words of other servers: what is written, and what is said to be lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from multilora_cli.cli.app import app
from multilora_cli.fleet.export import ExportedAdapter, Target, export
from multilora_cli.fleet.schema import Adapter, Fleet
from tests.fakes import tiny_geometry, write_adapter

runner = CliRunner()
SERVER = {"host": "0.0.0.0", "port": 9000, "api_keys": ["env:KEY"]}


def fleet(*adapters: dict[str, Any], **sections: Any) -> Fleet:
    base = {"model": "org/llama", "name": "llama", "revision": "abc", "quantization": "fp8"}
    values = {"base": base, "adapters": list(adapters), "server": SERVER, **sections}
    return Fleet.model_validate(values)


def made(target: Target, *rows: ExportedAdapter, **sections: Any) -> tuple[dict[str, Any], str]:
    declared = [row.declared.model_dump(exclude_none=True) for row in rows]
    done = export(fleet(*declared, *sections.pop("patterns", ()), **sections), "org/llama", rows,
                  target)  # fmt: skip
    return done.document, "\n".join(done.notes)


LOCAL = ExportedAdapter(Adapter(name="acme/legal", source="./a"), Path("/fleet/a"), 12)
HUB = ExportedAdapter(Adapter(name="other", source="hf://org/other@v2", pin="hot"), None, 40)
BUCKET = ExportedAdapter(Adapter(name="acme/tax", source="s3://b/adapters/acme/tax/"), None, 8)


def test_vllm() -> None:
    document, notes = made("vllm", LOCAL, HUB, limits={"max_num_seqs": 64})
    assert document == {
        "model": "org/llama",
        "served-model-name": "llama",
        "host": "0.0.0.0",
        "port": 9000,
        "revision": "abc",
        "quantization": "fp8",
        "gpu-memory-utilization": 0.92,
        "max-num-seqs": 64,
        "max-num-batched-tokens": 8192,
        "enable-lora": True,
        "max-lora-rank": 64,  # the next that vLLM has slots for
        "max-loras": 2,
        "max-cpu-loras": 2,
        "lora-modules": ["acme/legal=/fleet/a", "other=org/other"],
    }
    for words in (
        "vLLM reserves 2 slots of rank 64; the fleet's ranks are 12 to 40",
        "other: pin, revision v2: without a counterpart",
        "server.api_keys: tenants, their models and limits have no counterpart",
    ):
        assert words in notes


@pytest.mark.parametrize(
    ("ranks", "size"), [((8,), 8), ((4, 9), 16), ((300,), 320), ((321,), 512), ((), 64)]
)
def test_the_rank_of_vllms_slots(ranks: tuple[int, ...], size: int) -> None:
    rows = [ExportedAdapter(Adapter(name=f"a{r}", source="./a"), Path("/a"), r) for r in ranks]
    assert made("vllm", *rows)[0]["max-lora-rank"] == size


def test_ray_serve() -> None:
    """Adapters of one bucket by their names below its root; others are to be copied there."""
    pattern = {"pattern": "{tenant}/{name}", "source": "s3://b/adapters/{tenant}/{name}/"}
    document, notes = made("ray", BUCKET, LOCAL, patterns=[pattern])
    (application,) = document["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    (config,) = application["args"]["llm_configs"]
    assert config["model_loading_config"] == {"model_id": "llama", "model_source": "org/llama"}
    assert config["lora_config"] == {
        "dynamic_lora_loading_path": "s3://b/adapters",
        "max_num_adapters_per_replica": 2,
    }
    assert config["engine_kwargs"]["enable_lora"] is True
    assert config["engine_kwargs"]["max_lora_rank"] == 16
    assert "requests name an adapter as llama:NAME" in notes
    assert "acme/legal: copy ./a to <dynamic_lora_loading_path>/acme/legal" in notes
    assert "acme/tax: copy" not in notes and "set the one bucket" not in notes
    assert "set the one bucket" in made("ray", LOCAL)[1]


def test_production_stack() -> None:
    document, notes = made("kubernetes", LOCAL, HUB)
    (model,) = document["servingEngineSpec"]["modelSpec"]
    assert (model["modelURL"], model["enableLoRA"]) == ("org/llama", True)
    assert "--max-lora-rank=64" in model["vllmConfig"]["extraArgs"]
    assert "--quantization=fp8" in model["vllmConfig"]["extraArgs"]
    local, hub = document["loraAdapters"]
    assert (local["name"], local["baseModel"]) == ("acme-legal", "llama")
    assert local["adapterSource"] == {
        "adapterName": "acme/legal",
        "type": "local",
        "adapterPath": "/data/shared-pvc-storage/lora-adapters/acme/legal",
    }
    assert hub["adapterSource"] == {
        "adapterName": "other",
        "type": "huggingface",
        "repository": "org/other",
    }
    assert "acme/legal: copy ./a to /data/shared-pvc-storage/lora-adapters/acme/legal" in notes


@pytest.mark.parametrize("target", ["vllm", "kubernetes"])
def test_nothing_is_left_out_in_silence(target: Target) -> None:
    own = Adapter(name="own", source="./o", ttl=60, tokenizer="adapter")
    rows = (
        ExportedAdapter(own, Path("/o"), 8, has_more=True),
        ExportedAdapter(Adapter(name="gone", source="s3://b/gone/")),
    )
    pattern = {"pattern": "{t}/x", "source": "s3://b/{t}/x/"}
    memory = {"device_bytes": "20GiB"}
    limits = {"max_adapter_bytes": "1GiB"}
    _, notes = made(target, *rows, patterns=[pattern], memory=memory, limits=limits)
    for words in (
        "own: ttl, tokenizer or chat_template: without a counterpart",
        "own: has DoRA, biases or whole matrices: not served there",
        "gone: could not be read here",
        "pattern {t}/x: left out",
        "memory.device_bytes",
        "limits.max_adapter_bytes",
    ):
        assert words in notes, words
    assert "gone" in (notes if target == "vllm" else json.dumps(made(target, *rows)[0]))


def test_the_command(tmp_path: Path) -> None:
    """YAML on standard output that reads back; a file; JSON; ranks from the adapters' headers."""
    tiny_geometry(tmp_path / "base")
    write_adapter(tmp_path / "a", rank=6)
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "base: {model: ./base, name: tiny}\n"
        "adapters: [{name: a, source: ./a}, {name: gone, source: ./gone}]\n"
    )
    ran = runner.invoke(app, ["export", str(path)])
    assert ran.exit_code == 0, ran.output
    document = yaml.safe_load(ran.stdout)
    assert document["model"] == str(tmp_path / "base")
    assert (document["max-lora-rank"], document["max-loras"]) == (8, 2)
    assert document["lora-modules"] == [f"a={tmp_path / 'a'}"]
    assert "gone: could not be read here" in ran.stderr
    target = tmp_path / "values.yaml"
    ran = runner.invoke(app, ["export", str(path), "--to", "kubernetes", "-o", str(target)])
    assert ran.exit_code == 0 and ran.stdout == ""
    assert len(yaml.safe_load(target.read_text())["loraAdapters"]) == 2
    ran = runner.invoke(app, ["export", str(path), "--to", "ray", "--json"])
    told = json.loads(ran.stdout)
    assert told["to"] == "ray" and told["notes"] and told["document"]["applications"]
    ran = runner.invoke(app, ["export", str(path), "-o", str(tmp_path / "no" / "where")])
    assert (ran.exit_code, ran.stderr.splitlines()[-1]) == (
        1,
        f"error: --output {tmp_path / 'no' / 'where'}: No such file or directory",
    )
    assert runner.invoke(app, ["export", str(path), "--to", "helm"]).exit_code == 2
