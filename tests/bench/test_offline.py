"""`mlora bench --offline`: real engines of a tiny shape, and the arithmetic on scripted ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.bench.geometries import NAMES, config_folder, named_config
from multilora_cli.bench.neutral import Shape, make_settings, make_submits
from multilora_cli.bench.offline import Batch, Driver, Turn, figures
from multilora_cli.bench.offline_report import Phases, bound_ms, cells_table, process_age_s
from multilora_cli.cli.app import app
from multilora_cli.cli.console import Console
from multilora_cli.engine.messages import (
    AdapterRef,
    Delta,
    Fault,
    LoadAdapter,
    Reply,
    SamplingParams,
    Snapshot,
    Submit,
    ToEngine,
)
from multilora_cli.errors import BadInput, Refused
from multilora_cli.sizing.budget import base_bytes
from multilora_cli.sizing.geometry import geometry_from_config, read_geometry
from multilora_cli.sizing.hardware import find_gpu
from multilora_cli.sizing.quantization_config import read_quantization

TINY = ("--model", "tiny", "--device", "cpu", "--adapters", "4", "--batch", "1,4",
        "--lengths", "16:8", "--kv", "32MiB", "--tight-pool", "4MiB")  # fmt: skip


def offline(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", "--offline", *TINY, *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_every_setting_is_measured_and_each_cell_is_a_line_on_disk(tmp_path: Path) -> None:
    output = tmp_path / "engine.jsonl"
    result = offline("--gpu", "h200", "--output", str(output), "--commit", "abc")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    starts = [line for line in lines if line["kind"] == "start"]
    cells = {(line["setting"], line["batch"]): line for line in lines if line["kind"] == "cell"}
    assert [start["settings"] for start in starts] == ["base,one,distinct,mixed", "pool"]
    assert {"import", "plan", "weights", "pool", "first token"} <= set(starts[0]["start_s"])
    settings = ("base", "one", "distinct", "mixed", "pool")
    assert set(cells) == {(setting, batch) for setting in settings for batch in (1, 4)}
    for (setting, batch), cell in cells.items():
        assert cell["output"] == 8 and cell["input"] == 16 and cell["commit"] == "abc"
        assert cell["step_ms"] > cell["bound_ms"] > 0, setting
        assert cell["output_tokens_per_s"] * cell["wall_s"] == pytest.approx(batch * 8, rel=0.01)
        assert cell["command"].startswith("mlora ") and cell["host_ms"]["step"] > 0
    assert cells["base", 4]["adapters"] == 0 and cells["distinct", 4]["adapters"] == 4
    # Four adapters are read where four are asked; one where one is.
    reads = [cells["distinct", 4]["bound_ms"], cells["one", 4]["bound_ms"]]
    assert reads[0] > reads[1] > cells["base", 4]["bound_ms"]
    for text in ("distinct", "B=4 ms/step", "first token"):
        assert text in result.stdout


def test_adapters_are_loaded_beside_answers_that_go_on(tmp_path: Path) -> None:
    output = tmp_path / "loads.jsonl"
    result = offline("--settings", "base", "--loads", "2", "--output", str(output))
    assert "2 loads beside B=4" in result.output
    found = [json.loads(line) for line in output.read_text().splitlines()]
    (record,) = [line for line in found if line["kind"] == "loads"]
    for name in ("first_ms", "again_ms", "warm_ms"):
        assert len(record[name]) == 2 and min(record[name]) > 0
    assert record["gap_max_ms"] >= record["gap_median_ms"] > 0 and record["step_ms"] > 0
    assert record["batch"] == 4 and record["adapter_bytes"] > 0
    assert record["prompt_tokens"] > 1000 and record["prompt_gap_max_ms"] > 0


def test_an_answer_that_ends_too_early_is_told() -> None:
    few = ("--settings", "base", "--loads", "3", "--max-model-len", "48")
    result = offline(*few, code=1)
    assert "ended before what was to be measured" in result.output


def test_a_pool_too_small_for_all_adapters_makes_them_take_turns(tmp_path: Path) -> None:
    """Four attention adapters of rank 16 take 112 KiB each in float32, and 24 tokens 32 KiB."""
    value = json.loads(
        offline("--settings", "pool", "--batch", "4", "--tight-pool", "320KiB", "--json").stdout
    )
    [cell] = [line for line in value if line["kind"] == "cell"]
    assert cell["rows"] < 4 and cell["adapter_evictions"] > 0


@pytest.mark.parametrize("quantization", ["fp8", "awq"])
def test_dummy_bases_may_be_quantised(quantization: str) -> None:
    value = json.loads(
        offline("--quantization", quantization, "--settings", "one", "--json").stdout
    )
    cells = [line for line in value if line["kind"] == "cell"]
    assert [(c["quantization"], c["batch"]) for c in cells] == [
        (quantization, 1),
        (quantization, 4),
    ]


def test_what_fails_is_told_and_the_rest_is_measured() -> None:
    """A pool without room for one request: the failure is a line, and the exit code 1."""
    result = offline("--tight-pool", "96KiB", "--settings", "base,pool", "--json", code=1)
    value = json.loads(result.stdout)
    kinds = [line["kind"] for line in value]
    assert kinds.count("failure") == 1 and kinds.count("cell") == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--settings", "base,nobody"), "--settings nobody"),
        (("--quantization", "int3"), "--quantization int3"),
        (("--batch", "1,many"), "--batch 1,many"),
        (("--kv", "much"), "--kv"),
        (("--lengths", "128"), "--lengths 128"),
        (("--gpu", "abacus"), "--gpu abacus"),
    ],
)
def test_wrong_flags_are_named(flags: Sequence[str], told: str) -> None:
    assert told in offline(*flags, code=2).output


def test_an_unknown_shape_lists_the_known_ones() -> None:
    result = CliRunner().invoke(
        app, ["bench", "--offline", "--model", "llama-9", "--device", "cpu"]
    )
    assert result.exit_code == 2 and "llama-3-8b" in result.output


# ---- shapes and prompts


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.738), ("llama-2-13b", 13.016), ("llama-3-8b", 8.030), ("llama-3-70b", 70.55)],
)
def test_named_shapes_have_the_published_parameters(name: str, billions: float) -> None:
    geometry = geometry_from_config(named_config(name), name)
    assert base_bytes(geometry, 1).total / 1e9 == pytest.approx(billions, abs=0.005)
    assert name in NAMES


def test_a_model_is_a_name_a_folder_or_its_config(tmp_path: Path) -> None:
    written, other = config_folder("tiny", "none", tmp_path), tmp_path / "other"
    assert config_folder(str(written), "fp8", other) == written
    assert config_folder(str(written / "config.json"), "none", other) == written
    with pytest.raises(BadInput, match="neither a folder"):
        config_folder(str(tmp_path), "none", tmp_path)


def test_a_16_bit_shape_becomes_an_awq_one_and_an_awq_one_stays(tmp_path: Path) -> None:
    plain = config_folder("tiny", "none", tmp_path)
    made = config_folder(str(plain), "awq", tmp_path / "other")
    assert read_geometry(plain).quantization is None and made != plain
    found = read_quantization(read_geometry(made).quantization, "made")
    assert (found.method, found.group_size) == ("awq", 128)
    assert config_folder(str(made), "awq", tmp_path / "third") == made


def test_requests_take_adapters_in_turn_and_share_no_prefix() -> None:
    refs = [AdapterRef(f"a{index}", str(index), "", 1) for index in range(3)]
    first = make_submits(Shape(8, 4), 5, refs, 1000, first_id=1)
    second = make_submits(Shape(8, 4), 5, refs, 1000, first_id=6)
    names = [submit.adapter.name for submit in first if submit.adapter is not None]
    assert names == ["a0", "a1", "a2", "a0", "a1"]
    prompts = {tuple(submit.prompt[:4]) for submit in first + second}
    assert len(prompts) == 10
    assert {submit.request_id for submit in first + second} == set(range(1, 11))
    assert all(submit.params.stop_token_ids == () for submit in first)  # ends are ignored


def test_settings_name_the_adapters_of_the_neutral_workload() -> None:
    base, one, distinct, mixed, pool = make_settings(("base", "one", "distinct", "mixed", "pool"))
    assert not base.sources and len(one.sources) == 1
    assert len(set(distinct.sources)) == len(set(mixed.sources)) == 64
    ranks = [source.split("rank=")[1].split(",")[0] for source in mixed.sources]
    assert {rank: ranks.count(rank) for rank in ranks} == {"8": 16, "16": 16, "32": 16, "64": 16}
    assert pool.is_tight and all("targets=attention" in source for source in pool.sources)


# ---- arithmetic


def batch(*steps: tuple[float, Sequence[int]]) -> Batch:
    """Steps as (time, ids of the requests that got a token)."""
    turns = tuple(Turn(at, [Delta(i, 0, [7]) for i in ids]) for at, ids in steps)
    size = len({i for _, ids in steps for i in ids})
    tokens = sum(len(ids) for _, ids in steps)
    return Batch(
        size,
        tokens,
        turns,
        {
            "steps": len(steps) + 2,
            "plan_seconds": 0.5,
            "prompt_steps": 2,
            "prompt_plan_seconds": 0.1,
        },
    )


def test_a_cpu_is_not_given_an_8b_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shape is measured is said, and a named one is taken as it is."""
    monkeypatch.setattr("multilora_cli.sizing.hardware.local_card", lambda: None)
    arguments = [arg for arg in TINY if arg not in ("--model", "tiny")]
    result = CliRunner().invoke(app, ["bench", "--offline", *arguments, "--settings", "base"])
    assert result.exit_code == 0, result.output
    assert "on a CPU the shape tiny is measured; another one: --model llama-3-8b" in result.stderr
    assert "the shape tiny" not in offline("--settings", "base").stderr

    from multilora_cli.cli.bench_offline import usual_model

    monkeypatch.setattr("multilora_cli.sizing.hardware.local_card", lambda: object())
    for device, shape in (("auto", "llama-3-8b"), ("cuda:0", "llama-3-8b"), ("cpu", "tiny")):
        assert usual_model(Console(), device, "measured") == shape


def test_only_steps_in_which_all_decode_are_timed() -> None:
    """Prompts end at 1.0 and 3.0; the step that ends the last of them is not a decode step."""
    found = figures([batch((1.0, [1]), (3.0, [1, 2]), (3.1, [1, 2]), (3.4, [1, 2]), (9.0, [2]))])
    assert (found.steps, found.step_ms) == (2, pytest.approx(200))
    assert found.decode_tokens_per_s == pytest.approx(10)
    assert found.output_tokens_per_s == pytest.approx(8 / 9)
    assert (found.ttft_median_ms, found.ttft_last_ms) == (2000, 3000)
    assert found.host_ms == {"plan": pytest.approx(80)}
    assert found.prompt_host_ms == {"plan": pytest.approx(50)}


def test_where_never_all_run_steps_that_begin_no_answer_are_timed() -> None:
    found = figures([batch((1.0, [1]), (1.5, [1]), (4.0, [2]), (4.3, [2]))])
    assert (found.steps, found.rows) == (2, 1.0)
    assert found.step_ms == pytest.approx(400)


def test_one_token_an_answer_leaves_nothing_to_time() -> None:
    with pytest.raises(Refused, match="more output tokens"):
        figures([batch((1.0, [1, 2]))])


class Scripted:
    """An engine that gives what a test says, a list of deltas a step."""

    idle_wait_s: float | None = 0.0

    def __init__(self, steps: list[list[Delta]], replies: list[Reply] | None = None) -> None:
        self.steps, self.replies, self.taken = steps, replies or [], list[ToEngine]()

    def handle(self, message: ToEngine) -> None:
        self.taken.append(message)

    def step(self) -> list[Delta]:
        if not self.steps:
            self.idle_wait_s = None
        return self.steps.pop(0) if self.steps else []

    def take_events(self) -> list[Any]:
        return []

    def take_replies(self) -> list[Reply]:
        replies, self.replies = self.replies, []
        return replies

    def snapshot(self) -> Snapshot:
        return Snapshot(0, 0, 0, 0, 0, 0, 0, {"steps": 3.0}, {}, {}, [])


def submit(tokens: int) -> Submit:
    return Submit(1, [5], SamplingParams(max_tokens=tokens))


def test_an_answer_of_another_length_or_a_fault_is_no_measurement() -> None:
    short = Scripted([[Delta(1, 0, [7], finish_reason="length")]])
    with pytest.raises(Refused, match="2 tokens got 1"):
        Driver(short).run([submit(2)])
    fault = Fault("internal_error", "broken")
    with pytest.raises(Refused, match="internal_error: broken"):
        Driver(Scripted([[Delta(1, 0, [], finish_reason="error", fault=fault)]])).run([submit(1)])


def test_an_engine_that_stops_is_noticed() -> None:
    with pytest.raises(Refused, match="has stopped"):
        Driver(Scripted([[Delta(1, 0, [7])]])).run([submit(2)])


def test_a_refused_adapter_is_named() -> None:
    engine = Scripted([[], []], [Reply(1, fault=Fault("adapter_refused", "no room"))])
    with pytest.raises(Refused, match="adapter a cannot be loaded: no room"):
        Driver(engine).load([AdapterRef("a", "d", "/a", 1)])
    assert isinstance(engine.taken[0], LoadAdapter) and engine.taken[0].hot


def test_phases_add_up_and_a_phase_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr("multilora_cli.bench.offline_report.perf_counter", lambda: next(now))
    phases = Phases()
    with phases.watching("import"):
        phases.report("weights", 0, 2)
        phases.report("weights", 2, 2)
        phases.report("pool", 0, 1)
        phases.report("weights", 2, 2)
    assert phases.seconds == {"import": 1.0, "weights": 2.0 + 4.0, "pool": 3.0}


def test_the_bound_is_that_of_the_design_example() -> None:
    """Llama-3-8B in BF16 at B = 1 on an H200: 15 GB of weights at 4.3 TB/s are 3.5 ms."""
    geometry = geometry_from_config(named_config("llama-3-8b"), "llama-3-8b")
    base, gpu = base_bytes(geometry, 2), find_gpu("h200")
    per_token = geometry.kv_bytes_per_token(2)
    alone = bound_ms(base, per_token, Shape(), 1, (), gpu)
    assert alone == pytest.approx(3.50, abs=0.02)
    with_adapters = bound_ms(base, per_token, Shape(), 64, [83_886_080] * 64, gpu)
    without = bound_ms(base, per_token, Shape(), 64, (), gpu)
    assert with_adapters - without == pytest.approx(1.25, abs=0.01)


def test_batches_stand_side_by_side() -> None:
    row = {"kind": "cell", "quantization": "none", "setting": "base", "step_ms": 4.4,
           "output_tokens_per_s": 2900.0}  # fmt: skip
    columns, rows = cells_table([{**row, "batch": 16, "bound_ms": 3.6}, {**row, "batch": 1}])
    assert columns[2:] == ("B=1 ms/step (bound) tok/s", "B=16 ms/step (bound) tok/s")
    assert cells_table([{**row, "batch": 4}])[0][2:] == ("B=4 ms/step tok/s",)
    assert rows == [("none", "base", "4.40 2,900", "4.40 (3.60) 2,900")]


def test_a_process_is_older_than_nothing() -> None:
    age = process_age_s()
    assert age is not None and 0 < age < 86400
