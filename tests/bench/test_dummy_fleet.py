"""Fleets of random weights: served like any other, and every id gives text."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.adapters.source.dummy import parse_spec
from multilora_cli.bench.arms import Arm, Program, only
from multilora_cli.bench.dummy_fleet import tokenizer
from multilora_cli.cli.app import app
from multilora_cli.cli.plan_request import plan_request
from multilora_cli.cli.startup import prepare
from multilora_cli.errors import BadInput, Refused
from multilora_cli.fleet.load import load_fleet
from multilora_cli.text.tokenizer import Tokenizer
from tests.e2e.serving import start


def make(folder: Path, *arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", "dummy", str(folder), *arguments])
    assert result.exit_code == code, result.output
    return result


def test_a_dummy_fleet_is_planned_like_any_other(tmp_path: Path) -> None:
    """64 adapters of rank 16 on all seven projections of an 8B: 41,943,040 numbers each."""
    make(tmp_path, "--model", "llama-3-8b")
    request = plan_request(tmp_path / "fleet.yaml", (), None, "rank=16,targets=all,count=64")
    assert request.geometry.vocab_size == 128256 and request.fleet.base.load_format == "dummy"
    assert request.cost(request.adapters[0].ranks).parameters == 41_943_040
    loaded = load_fleet(tmp_path / "fleet.yaml").fleet
    assert len(loaded.adapters) == 64 and loaded.base.quantization == "none"


def test_a_dummy_fleet_fits_the_machine_that_it_is_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An 8B in float32 ends a machine of 24 GiB; whoever wants one without a card names it."""
    monkeypatch.setattr("multilora_cli.sizing.hardware.local_card", lambda: None)
    result = make(tmp_path / "here")
    assert "on a CPU the shape tiny is written; another one: --model llama-3-8b" in result.stderr
    assert load_fleet(tmp_path / "here" / "fleet.yaml").fleet.base.served_name == "tiny"
    assert "on a CPU" not in make(tmp_path / "8b", "--model", "llama-3-8b").stderr


def test_a_dummy_awq_base_says_so_in_its_config(tmp_path: Path) -> None:
    make(tmp_path, "--model", "tiny", "--quantization", "awq", "--adapters", "2")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
    assert load_fleet(tmp_path / "fleet.yaml").fleet.base.quantization == "auto"


def test_s_loras_settings_share_a_server(tmp_path: Path) -> None:
    """Thousands of adapters, of published ranks, none of them pinned; files say which are whose."""
    make(tmp_path, "--setting", "s1,s2", "--adapters", "300", "--layers", "1")
    adapters = load_fleet(tmp_path / "fleet.yaml").fleet.adapters
    assert len(adapters) == 600
    sources = {adapter.name: adapter.source for adapter in adapters}  # type: ignore[union-attr]
    assert len(set(sources.values())) == 600
    assert {adapter.pin for adapter in adapters} == {None}  # type: ignore[union-attr]
    names = [(tmp_path / f"{name}.names").read_text().split() for name in ("s1", "s2")]
    assert [*names[0], *names[1]] == list(sources)
    ranks = [parse_spec(sources[name].partition(":")[2]) for name in (*names[0][:2], *names[1][:5])]
    assert [spec.rank for spec in ranks] == [8, 8, 64, 32, 16, 8, 64]
    assert {(len(spec.targets), spec.layers) for spec in ranks} == {(4, 1)}


def test_it_is_served_and_measured(tmp_path: Path) -> None:
    make(tmp_path, "--model", "tiny", "--adapters", "3", "--quantization", "fp8")
    server = start(tmp_path / "fleet.yaml", "--port", "0", log=tmp_path / "server.log")
    try:
        result = CliRunner().invoke(
            app,
            ["bench", "--url", server.url, "--compare", "distinct,base", "--requests", "6",
             "--lengths", "8:12", "--rounds", "1", "--json"],
        )  # fmt: skip
        value = json.loads(result.stdout)
        assert [arm["label"] for arm in value["arms"]] == ["distinct", "base"]
        assert [arm["measures"]["completed"] for arm in value["arms"]] == [6, 6]
        assert {arm["measures"]["output_length"]["mean"] for arm in value["arms"]} == {12}
    finally:
        server.stop()


def test_every_id_of_a_dummy_vocabulary_has_text() -> None:
    text = Tokenizer(json.dumps(tokenizer(2000)))
    assert text.vocab_size == 2000
    pieces = [text.pieces.piece(token_id) for token_id in range(2000)]
    assert all(pieces[:-1]) and pieces[-1] == b""  # the end is special
    assert len(set(pieces)) == 2000
    assert text.decode(text.encode("any text: \u00e9")) == "any text: \u00e9"
    # Clients count tokens by encoding the text again: every word is one token again.
    words = list(range(256, 1999))
    assert [text.encode(text.decode([token_id])) for token_id in words] == [[i] for i in words]
    assert text.encode(text.decode(words[65:])) == words[65:]  # those that begin with a space


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    assert "--setting nobody" in make(tmp_path, "--setting", "nobody", code=2).output
    assert "int3" in make(tmp_path, "--quantization", "int3", code=2).output


def test_only_some_arms_in_the_order_asked_for() -> None:
    arms = tuple(Arm(label, (), None) for label in "abc")
    program = Program("smoke", arms, 1, notes=("a is new", "b is old", "all are equal"))
    kept = only(program, ["c", "a", "c"])
    assert [arm.label for arm in kept.arms] == ["c", "a"]
    assert kept.notes == ("a is new", "all are equal")
    with pytest.raises(BadInput, match="--compare d: expected some of a, b, c"):
        only(program, ["a", "d"])


def test_a_base_that_this_machine_cannot_hold_is_refused_before_adapters_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An 8B on a CPU was killed a minute later, after 5 GiB of random adapters were written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("multilora_cli.sizing.host_memory.free_host_bytes", lambda: 16 * 2**30)
    make(tmp_path / "8b", "--model", "llama-3-8b")
    with pytest.raises(Refused, match=r"take 29.9 GiB on a CPU, 16 GiB of this machine's memory"):
        prepare(tmp_path / "8b" / "fleet.yaml", ("memory.device=cpu", "server.port=0"))
    assert not (tmp_path / "cache").exists()


def test_a_plan_of_random_adapters_writes_none_of_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 adapters of an 8B are 5 GiB; a plan reads their headers, which are all the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(tmp_path / "8b", "--model", "llama-3-8b")
    request = plan_request(tmp_path / "8b" / "fleet.yaml", (), None, None)
    assert len({adapter.name for adapter in request.adapters}) == 64
    assert {request.cost(a.ranks).parameters for a in request.adapters} == {41_943_040}
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(path.stat().st_blocks * 512 for path in files) < 4 * 2**20
    with pytest.raises(BadInput, match="targets: found 'most'"):
        settings = ["adapters=[{name: a, source: 'dummy:targets=most'}]"]
        plan_request(tmp_path / "8b" / "fleet.yaml", settings, None, None)
