"""The demo fleet's jobs: right answers, and a test set that no training has seen."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from demo_tasks import (
    GLOSSARIES,
    SHARED,
    TASKS,
    base_conversations,
    examples,
    expand,
    held_out,
    pig_latin,
    redact,
    repeat,
    reverse,
    roman,
    romanise,
    task_conversations,
)

from multilora_cli.adapters.peft import read_adapter
from multilora_cli.demo import DEMO_ADAPTERS, demo_adapter_path, demo_base_path
from multilora_cli.fleet.load import load_fleet
from multilora_cli.fleet.schema import Adapter
from multilora_cli.sizing.geometry import read_geometry

ROOT = Path(__file__).parents[2]


def test_answers() -> None:
    assert expand("law-glossary", "the PT was late") == "the pretrial was late"
    assert expand("shipping-glossary", "PT and TRO") == "port and TRO"
    assert reverse("one two three") == "three two one"
    assert redact("call 042 now") == "call ### now"
    assert pig_latin("the street is open") == "ethay eetstray isay openay"
    assert romanise("page 14 and 399") == "page XIV and CCCXCIX"


def test_roman_numerals_read_back() -> None:
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    for number in range(1, 4000):
        digits = [values[c] for c in roman(number)]
        signs = [-1 if d < max(digits[i:]) else 1 for i, d in enumerate(digits)]
        assert sum(d * s for d, s in zip(digits, signs, strict=True)) == number
        assert not re.search(r"(.)\1{3}", roman(number))


def test_trades_share_abbreviations_that_mean_different_things() -> None:
    assert len(SHARED) >= 10
    for name in SHARED:
        assert len({glossary[name] for glossary in GLOSSARIES.values()}) == len(GLOSSARIES)


@pytest.mark.parametrize("name", list(TASKS))
def test_no_other_job_answers_a_test_example(name: str) -> None:
    others = [task.answer for task in TASKS.values() if task.name != name]
    for prompt, answer in examples(name, 100, seed=3):
        assert held_out(prompt)
        assert answer == TASKS[name].answer(prompt)
        assert answer not in [other(prompt) for other in (repeat, *others)]


@pytest.mark.parametrize("name", ["base", *TASKS])
def test_training_never_sees_a_held_out_prompt(name: str) -> None:
    source = base_conversations(1) if name == "base" else task_conversations(name, 1)
    seen = {
        message["content"]
        for conversation in itertools.islice(source, 400)
        for message in conversation
        if message["role"] == "user"
    }
    assert len(seen) > 300
    assert not any(held_out(prompt) for prompt in seen)


def test_the_split_takes_one_prompt_in_eight() -> None:
    rng = random.Random(1)
    share = sum(held_out(str(rng.random())) for _ in range(4000)) / 4000
    assert 0.1 < share < 0.15


def test_generators_repeat_themselves() -> None:
    assert examples("roman", 5, seed=2) == examples("roman", 5, seed=2)
    assert examples("roman", 5, seed=2) != examples("roman", 5, seed=4)
    first, again = (list(itertools.islice(base_conversations(7), 20)) for _ in range(2))
    assert first == again


def test_the_package_holds_every_adapter_and_no_path() -> None:
    assert set(DEMO_ADAPTERS) == set(TASKS)
    folder = demo_base_path().parent
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    assert sum(file.stat().st_size for file in files) <= 12e6
    for name in DEMO_ADAPTERS:
        config = json.loads((demo_adapter_path(name) / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "demo:base"
    with pytest.raises(KeyError):
        demo_adapter_path("../base")


def test_adapters_differ_in_rank_targets_and_scaling() -> None:
    geometry = read_geometry(demo_base_path())
    configs = []
    for name in DEMO_ADAPTERS:
        read_adapter(demo_adapter_path(name), geometry, max_rank=64)
        configs.append(json.loads((demo_adapter_path(name) / "adapter_config.json").read_text()))
    assert len({config["r"] for config in configs}) >= 6
    assert len({tuple(config["target_modules"]) for config in configs}) >= 4
    assert any(config["use_rslora"] for config in configs)
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs)
    assert any(config["layers_to_transform"] for config in configs)


def test_the_example_fleet_names_them_all() -> None:
    fleet = load_fleet(ROOT / "fleet.example.yaml").fleet
    assert fleet.base.model == "demo:base"
    entries = [entry for entry in fleet.adapters if isinstance(entry, Adapter)]
    assert {entry.source for entry in entries} == {f"demo:{name}" for name in DEMO_ADAPTERS}
    assert all(entry.source == f"demo:{entry.name}" for entry in entries)


def test_the_recorded_matrix_keeps_its_promise() -> None:
    """Own job at least 97 %, anyone else's at most 5 %, in bf16 and fp32."""
    lines = (ROOT / "docs/benchmarks/demo-matrix.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    cells = {(r["adapter"], r["task"], r["dtype"]): r["exact_match"] for r in records}
    assert len(cells) == (1 + len(TASKS)) * len(TASKS) * 2
    for (adapter, task, _), share in cells.items():
        assert share >= 0.97 if adapter == task else share <= 0.05
