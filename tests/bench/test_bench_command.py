"""`mlora bench` at the command line, against pretended servers and once against our own."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import multilora_cli.cli
from multilora_cli.bench.loopback import Loopback, Script
from multilora_cli.bench.stream import error_message
from multilora_cli.bench.tables import against_table
from multilora_cli.cli.app import app
from multilora_cli.cli.bench_options import BenchOptions, parse_rate, pick_preset
from multilora_cli.cli.bench_view import describe
from multilora_cli.errors import BadInput
from tests.e2e.serving import Served, start

FLEET = Path(__file__).parents[2] / "fleet.example.yaml"
MODELS = ("base", "org/a", "b", "c", "not-a-folder")


class Threaded:
    """A pretended server in a thread of its own."""

    def __init__(self, script: Script) -> None:
        self.server = Loopback(script)
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Loopback:
        self._thread.start()
        assert self._started.wait(30)
        return self.server

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with self.server:
            self._started.set()
            await self._stop.wait()


@pytest.fixture
def server() -> Iterator[Loopback]:
    with Threaded(Script(models=MODELS)) as running:
        yield running


def bench(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_heterogeneous_against_any_server_prints_one_table(server: Loopback) -> None:
    result = bench("--url", server.url, "--heterogeneous", "--requests", "8", "--lengths", "8:3")
    for label in ("base", "identical", "skewed", "uniform", "distinct", "TTFT p99", "vs base"):
        assert label in result.stdout
    assert "the load generator took" in result.stdout


def test_json_is_one_value_whose_counts_add_up(server: Loopback) -> None:
    """A-OUT-12, A-API-18: names that are no folders are measured like any other, and counted."""
    result = bench("--url", server.url + "/v1", "--json", "--requests", "8", "--rounds", "1",
                   "--lengths", "8:3")  # fmt: skip
    value = json.loads(result.stdout)
    assert value["schema"] == "mlora.bench/1" and value["servers"][0]["own"] is False
    # The warm-up: each once, and the eight of the skewed arm, the first that asks all adapters.
    asked = {"base": 1, "org/a": 1 + 4, "b": 1 + 2, "c": 1 + 1, "not-a-folder": 1 + 1}
    for arm in value["arms"]:
        for group in arm["measures"]["per_adapter"]:
            name = "base" if group["name"] == "(base)" else group["name"]
            asked[name] += group["requests"]
    assert asked == dict(server.asked)
    assert sum(asked.values()) == 5 * 8 + 5 + 8


def test_files_are_written_and_compared(server: Loopback, tmp_path: Path) -> None:
    for name in ("a", "b"):
        bench("--url", server.url, "--preset", "smoke", "--report", str(tmp_path / f"{name}.html"),
              "--output", str(tmp_path / f"{name}.json"), "-q")  # fmt: skip
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    result = bench("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json")
    value = json.loads(result.stdout)
    assert [row["arm"] for row in value["arms"]] == ["base", "skewed"]
    assert value["differing"] == []
    table = bench("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")).stdout
    assert "skewed\ttok/s\t" in table


def test_a_command_that_is_run_again_sends_prompts_of_its_own(server: Loopback) -> None:
    """A server that runs on has the first run's prompts cached: a third of a base's tokens were."""
    command = ("--url", server.url, "--preset", "smoke", "--json", "--prompts", "ids")
    draws = {json.loads(bench(*command).stdout)["prompt_draw"] for _ in range(2)}
    sent = [tuple(body["prompt"]) for body in server.bodies if len(body["prompt"]) > 4]
    assert len(draws) == 2 and len(sent) == len(set(sent)) >= 2 * 2 * 8


def test_against_a_second_server_gives_ratios(server: Loopback) -> None:
    with Threaded(Script(models=MODELS, gap_s=0.02)) as slower:
        result = bench("--url", server.url, "--against", slower.url, "--preset", "smoke",
                       "--rounds", "2", "--json")  # fmt: skip
    value = json.loads(result.stdout)
    sides = [server.url.removeprefix("http://"), slower.url.removeprefix("http://")]
    assert [s["label"] for s in value["servers"]] == sides
    rows = [r for r in value["against"] if r["metric"] == "output_tokens_per_s"]
    names = {name for _, name, *_ in against_table(value)[1]}
    assert names == {"tok/s", "TTFT mean", "ITL mean"}  # a person's words, as in every other table
    assert [row["arm"] for row in rows] == ["base", "skewed"]
    assert all(row["rounds"] == 2 and row["min"] <= row["mean"] <= row["max"] for row in rows)
    assert server.asked == slower.asked


def test_a_named_card_gives_shares_of_the_bound(server: Loopback) -> None:
    result = bench(str(FLEET), "--url", server.url, "--gpu", "h200", "--rounds", "1",
                   "--requests", "8", "--lengths", "8:3", "--json")  # fmt: skip
    arms = {arm["label"]: arm for arm in json.loads(result.stdout)["arms"]}
    rates = [arm["bound"]["output_tokens_per_s"] for arm in arms.values()]
    assert all(rate > 0 for rate in rates)
    for arm in arms.values():
        bound, found = arm["bound"], arm["measures"]["output_tokens_per_s"]
        assert bound["share"] == pytest.approx(found / bound["output_tokens_per_s"])
    assert "--gpu: needs FLEET" in bench("--url", server.url, "--gpu", "h200", code=2).stderr
    text = bench(str(FLEET), "--url", server.url, "--gpu", "h200", "--preset", "smoke").stdout
    assert "of bound" in text


def test_flags_arrive_as_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths as paths, in every version of Typer: 0.27 leaves a context's params as text."""
    seen: list[BenchOptions] = []
    monkeypatch.setattr(
        "multilora_cli.cli.bench._run", lambda console, options, *_: seen.append(options)
    )
    bench("x.yaml", "--trace", "t.jsonl", "--rows", "r.jsonl", "--requests", "3", "--rate", "inf",
          "--for", "2", "--no-ignore-eos")  # fmt: skip
    (options,) = seen
    assert (options.fleet, options.trace, options.rows) == (
        Path("x.yaml"), Path("t.jsonl"), Path("r.jsonl"),
    )  # fmt: skip
    assert (options.requests, options.rate, options.limit) == (3, float("inf"), 2.0)
    assert options.ignore_eos is False and options.preset == "trace" and not options.offline


def test_no_command_reads_what_typer_has_not_converted() -> None:
    """A context's params are text or values, by Typer's version; parameters are always values."""
    folder = Path(multilora_cli.cli.__file__).parent
    users = [file.name for file in sorted(folder.glob("*.py")) if ".params" in file.read_text()]
    assert users == ["commands.py"]  # whose --debug is a switch


def test_a_row_is_on_disk_as_soon_as_its_load_has_ended(server: Loopback, tmp_path: Path) -> None:
    """Appended, so that a run that is stopped loses only what follows."""
    file, names = tmp_path / "rows.jsonl", tmp_path / "two.names"
    file.write_text('{"older": 1}\n')
    names.write_text("c\nb\n")
    result = bench(
        str(FLEET), "--url", server.url, "--gpu", "h200", "--requests", "4", "--lengths", "8:3",
        "--compare", "distinct,base", "--rows", str(file), "--adapters-from", str(names),
        "--for", "20", "--commit", "abc", "--rounds", "2", "--json",
    )  # fmt: skip
    older, *rows = (json.loads(line) for line in file.read_text().splitlines())
    assert older == {"older": 1}
    assert [(row["load"], row["round"]) for row in rows] == [
        ("distinct", 0), ("base", 0), ("distinct", 1), ("base", 1),
    ]  # fmt: skip
    report = json.loads(result.stdout)
    for row in rows:
        assert row["schema"] == "mlora.bench.row/1" and row["commit"] == "abc"
        assert row["settings"]["quantization"] == "none" and row["settings"]["for_s"] == 20
        assert row["settings"]["adapters_from"] == str(names) and row["mean_output"] == 3
        assert (row["requests"], row["completed"], row["cut"], row["errors"]) == (4, 4, 0, {})
        assert row["bound"]["share"] > 0 and row["itl"]["count"] == 8
        (arm,) = (arm for arm in report["arms"] if arm["label"] == row["load"])
        told = arm["rounds"][row["round"]]["output_tokens_per_s"]
        assert row["output_tokens_per_s"] == pytest.approx(told, rel=1e-4)
    assert [row["adapters"] for row in rows] == [2, 0, 2, 0]
    missing = bench("--url", server.url, "--rows", str(tmp_path / "no" / "x"), code=2)
    assert "--rows" in missing.stderr and "a folder that exists" in missing.stderr


def test_a_load_that_is_ended_says_what_was_cut() -> None:
    with Threaded(Script(models=MODELS, gap_s=0.4)) as slow:
        result = bench("--url", slow.url, "--preset", "smoke", "--for", "1")
    assert "answers in flight when a load ended (" in result.stdout
    assert "of skewed): their tokens count" in result.stdout


def test_a_recorded_load_is_replayed_at_its_times(server: Loopback, tmp_path: Path) -> None:
    rows = [("b", 5.0, 7, 2), (None, 5.1, 9, 3), ("org/a", 5.05, 8, 4)]
    lines = [json.dumps({"time": t, "adapter": a, "input": i, "output": o}) for a, t, i, o in rows]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    value = json.loads(bench("--url", server.url, "--trace", str(trace), "--json").stdout)
    base, replayed = (arm["measures"] for arm in value["arms"])
    assert {g["name"]: g["output_tokens"] for g in replayed["per_adapter"]} == {
        "b": 2, "org/a": 4, "(base)": 3,
    }  # fmt: skip
    assert base["output_length"]["total"] == 9 and base["adapters"] == 0
    assert replayed["offered_rate"] == pytest.approx(3 / 0.1)
    assert server.asked == {"base": 1 + 1 + 3 + 1, "b": 1 + 1 + 1, "org/a": 1 + 1 + 1}
    trace.write_text(lines[0].replace('"b"', '"nobody"'))
    assert "no adapter nobody" in bench("--url", server.url, "--trace", str(trace), code=2).stderr
    result = bench("--url", server.url, "--trace", str(trace), "--preset", "smoke", code=2)
    assert "leave out the preset" in result.stderr


def test_an_objective_adds_goodput_to_the_table(server: Loopback) -> None:
    result = bench("--url", server.url, "--preset", "smoke", "--slo", "ttft=5s,itl=1s")
    assert "goodput/s" in result.stdout


def test_adapters_from_a_file_set_the_order_and_must_exist(
    server: Loopback, tmp_path: Path
) -> None:
    names = tmp_path / "names"
    names.write_text("c\n# a comment\n\nb\nc\n")
    result = bench("--url", server.url, "--adapters-from", str(names), "--requests", "8",
                   "--rounds", "1", "--lengths", "8:2", "--json")  # fmt: skip
    arms = {arm["label"]: arm for arm in json.loads(result.stdout)["arms"]}
    assert [g["name"] for g in arms["identical"]["measures"]["per_adapter"]] == ["c"]
    assert set(server.asked) == {"base", "b", "c"}
    names.write_text("c\nnobody\n")
    result = bench("--url", server.url, "--adapters-from", str(names), code=2)
    assert "no adapter nobody" in result.stderr and "Traceback" not in result.output
    result = bench("--url", server.url, "--adapters-from", str(tmp_path / "none"), code=2)
    assert "one name a line" in result.stderr


def test_a_server_that_lists_no_adapters_is_asked_for_those_named(tmp_path: Path) -> None:
    """SGLang serves `base:adapter`; some of its versions list the base alone."""
    names = tmp_path / "names"
    names.write_text("base:b\nbase:a\n")
    with Threaded(Script(models=("base",), unlisted=("base:a", "base:b"))) as server:
        flags = ("--url", server.url, "--adapters-from", str(names), "--requests", "8",
                 "--compare", "uniform", "--rounds", "1", "--lengths", "8:2")  # fmt: skip
        [arm] = json.loads(bench(*flags, "--json").stdout)["arms"]
        groups = {group["name"]: group["requests"] for group in arm["measures"]["per_adapter"]}
        assert set(groups) == {"base:a", "base:b"} and sum(groups.values()) == 8
        names.write_text("base:c\n")
        assert "warm-up: base:c: http_404" in bench(*flags, code=1).stderr


def test_an_adapter_that_another_model_answers_for_ends_the_warm_up(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("b\n")
    script = Script(models=MODELS, failures=(("b", "other"),))
    with Threaded(script) as server:
        result = bench("--url", server.url, "--adapters-from", str(names), code=1)
    assert "warm-up: b: wrong_model" in result.stderr


def test_a_server_that_refuses_ignore_eos_is_measured_without_it() -> None:
    """Seen on transformers' own server: 422 for fields that OpenAI does not have."""
    with Threaded(Script(models=("base",), strict=True)) as server:
        result = bench("--url", server.url, "--preset", "smoke", code=1)
        assert "--no-ignore-eos" in result.stderr
        bench("--url", server.url, "--preset", "smoke", "--no-ignore-eos", "--prompts", "chat")


def test_a_server_that_may_take_no_token_ids_is_told_how_else_to_ask() -> None:
    """Seen on guidellm's mock server: 400 with a validation error of many lines."""
    refusing = Script(models=("base",), failures=(("base", "http_400"),))
    with Threaded(refusing) as server:
        result = bench("--url", server.url, "--preset", "smoke", code=1)
        assert "--prompts text, or chat" in result.stderr
        result = bench("--url", server.url, "--preset", "smoke", "--prompts", "chat", code=1)
        assert "--prompts" not in result.stderr
    raw = b'{"message": "prompt:\\n  should be   a string"}'
    assert error_message(raw) == "prompt: should be a string"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--preset", "punika"), "--preset punika: expected one of"),
        (("--preset", "smoke", "--heterogeneous"), "give one of them"),
        (("--rate", "-1"), "--rate -1"),
        (("--rate", "nan"), "--rate nan"),
        (("--model", "nobody"), "--model nobody"),
        (("--prompts", "poems"), "poems"),
        (("--slo", "speed=1"), "--slo speed=1"),
        (("--lengths", "x"), "--lengths x"),
        (("--against", "nowhere"), "--against nowhere"),
        (("--report", "/no/such/folder/x.html"), "--report /no/such/folder/x.html"),
    ],
)
def test_mistakes_are_one_line_each(server: Loopback, arguments, text) -> None:
    result = bench("--url", server.url, *arguments, code=2)
    assert f"error: {text}" in result.stderr or text in result.stderr
    assert "Traceback" not in result.output
    assert sum(server.asked.values()) == 0


def test_a_server_that_is_not_there_is_exit_code_3() -> None:
    result = bench("--url", "http://127.0.0.1:9", "--heterogeneous", code=3)
    assert "127.0.0.1:9" in result.stderr and "Traceback" not in result.output


def test_a_fleet_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    result = bench(str(tmp_path / "none.yaml"), code=2)
    assert "none.yaml" in result.stderr


def test_rates_presets_and_the_live_line() -> None:
    from multilora_cli.bench.load import Progress

    assert parse_rate(None) is None and parse_rate("inf") == float("inf")
    assert pick_preset(None, True) == "heterogeneous" and pick_preset("churn", False) == "churn"
    with pytest.raises(BadInput):
        pick_preset("x", False)
    text = describe("skewed", Progress(3, 9, 2, 1, 41.6, 0.25))
    assert text == "skewed: 3 of 9 done, 2 in flight, 42 tok/s, TTFT 250 ms, 1 failed"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = start(
        FLEET,
        "--port",
        "0",
        "--set",
        "server.state_file=off",
        log=tmp_path_factory.mktemp("demo") / "log",
    )
    try:
        yield served
    finally:
        served.stop()


def test_the_demo_fleet_agrees_with_our_counts(demo: Served) -> None:
    """A-API-18, A-OUT-12 on the real server: its own counters say what the report says."""
    before = {name: row["requests"] for name, row in demo.adapters().items()}
    result = bench("--url", demo.url, "--preset", "smoke", "--requests", "6", "--json")
    value = json.loads(result.stdout)
    sent = dict.fromkeys(before, 0)
    for arm in value["arms"]:
        found = arm["measures"]
        assert found["errors"] == {} and found["completed"] == 6 and found["usage_counted"]
        assert found["server_agrees"] is True
        assert found["output_length"]["total"] == sum(
            group["output_tokens"] for group in found["per_adapter"]
        )
        for group in found["per_adapter"]:
            if group["name"] != "(base)":
                sent[group["name"]] += group["requests"]
    skewed = value["arms"][1]["measures"]
    assert skewed["hit_ratio"] == 1.0 and skewed["loads"] == 0  # the warm-up loaded them
    used = {name for name, count in sent.items() if count}
    for name, row in demo.adapters().items():
        # Each once, and the beginning of the skewed arm, which is all of it.
        warm_up = 1 + sent[name] if name in used else 0
        assert row["requests"] == before[name] + sent[name] + warm_up


def test_churn_on_the_demo_fleet_shows_no_errors(demo: Served) -> None:
    result = bench("--url", demo.url, "--preset", "churn", "--requests", "8", "--rounds", "1",
                   "--concurrency", "2", "--lengths", "8:24", "--json")  # fmt: skip
    value = json.loads(result.stdout)
    calm, churn = value["arms"]
    assert calm["measures"]["errors"] == churn["measures"]["errors"] == {}
    marks = churn["timeline"]["marks"]
    assert marks and not any(mark["error"] for mark in marks)
    assert len(demo.adapters()) == 8  # whatever was unloaded is back


def test_cold_start_on_the_demo_fleet_tells_tiers(demo: Served) -> None:
    """A-PERF-05: first uses, resident and freshly loaded adapters are told apart."""
    result = bench("--url", demo.url, "--preset", "cold-start", "--lengths", "8:4", "--json")
    value = json.loads(result.stdout)
    arms = {arm["label"]: arm["measures"] for arm in value["arms"]}
    places = {"resident": "hot", "from host memory": "warm", "from disk": "stored"}
    assert list(arms) == ["first use", *places, "after reload", "base"]
    for label, tier in places.items():
        assert [(g["name"], g["requests"]) for g in arms[label]["per_tier"]] == [(tier, 8)]
    assert arms["from host memory"]["loads"] == 0 and arms["from disk"]["loads"] == 8
    assert arms["resident"]["loads"] == 0 and arms["resident"]["hit_ratio"] == 1.0
    assert [g["name"] for g in arms["after reload"]["per_tier"]] == ["warm"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--compare base,foo", "--compare foo: expected some of base, identical"),
        ("--lengths 10", "--lengths 10: expected IN:OUT"),
        ("--preset punica --lengths 16:16", "the preset punica has the published lengths"),
        ("--gpu rtx-4099", "did you mean rtx-4090"),
        ("--trace /nowhere.jsonl", "/nowhere.jsonl: No such file or directory"),
        ("--trace fleet.example.yaml", "fleet.example.yaml:1: not JSON, expected a line like"),
    ],
)
def test_a_wrong_flag_is_told_before_a_server_is_started(flags: str, said: str) -> None:
    """An 8B takes a minute to start: they were told after it."""
    ran = CliRunner().invoke(app, ["bench", "fleet.example.yaml", *flags.split()])
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert "starting" not in ran.stderr
