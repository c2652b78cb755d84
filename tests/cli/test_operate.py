"""list, warm, evict, diff and apply against a server on loopback: names, tables, exit codes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_cli.adapters.entry import AdapterRequest
from multilora_cli.cli.api import Api
from multilora_cli.cli.app import app
from multilora_cli.cli.fleet_diff import fleet_body
from multilora_cli.cli.listing import retry_words, row_cells
from multilora_cli.cli.tiers import matching_names
from multilora_cli.errors import AdapterUnavailable, BadInput, Refused
from multilora_cli.fleet.declared import declared_adapters, declared_settings
from multilora_cli.fleet.load import load_fleet
from multilora_cli.server.changes import RuntimeChanges, ServedFleet, by_name, request_of
from multilora_cli.units import format_span
from tests.fakes import Behaviour, Spawner, write_adapter
from tests.server.conftest import Server

runner = CliRunner()
NAMES = ("upper", "acme/legal", "acme/medical", "other/legal")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of four adapters, and a fleet file that says the same."""
    folder = tmp_path_factory.mktemp("server")
    for seed, name in enumerate(NAMES):
        write_adapter(folder / "adapters" / name.replace("/", "-"), seed=seed)
    (folder / "fleet.yaml").write_text(fleet_text(*NAMES))
    loaded = load_fleet(folder / "fleet.yaml")
    fleet = ServedFleet(
        path=str(loaded.path),
        settings=declared_settings(loaded),
        written=declared_settings(loaded),
        requests=by_name(map(request_of, declared_adapters(loaded))),
    )
    broken = Behaviour(broken={"other/legal": "adapter_unavailable"})
    running = Server(folder, Spawner(broken), names=NAMES, changes=RuntimeChanges(fleet))
    running.registry.enter_failed(
        AdapterRequest("late", "s3://b/late/"), AdapterUnavailable("down")
    )
    running.start()
    yield running
    running.stop()


def fleet_text(*names: str, port: int = 8000) -> str:
    adapters = "".join(
        f"  - {{name: {name}, source: ./adapters/{name.replace('/', '-')}}}\n" for name in names
    )
    return f"base: {{model: demo:base}}\nserver: {{port: {port}}}\nadapters:\n{adapters}"


def mlora(server: Server, *arguments: str, exit_code: int = 0) -> str:
    """What a command prints on stdout; on a failure, on stderr."""
    ran = runner.invoke(app, [*arguments, "--url", server.url])
    assert ran.exit_code == exit_code, ran.output
    return ran.stderr if exit_code > 1 else ran.output


def test_names_globs_and_folders(server: Server) -> None:
    rows = json.loads(mlora(server, "warm", "acme/", "upp*", "upper", "--hot", "--json"))
    assert [row["id"] for row in rows] == ["acme/legal", "acme/medical", "upper"]
    assert {row["tier"] for row in rows} == {"hot"}
    lines = mlora(server, "evict", "acme/*", "--cold").splitlines()
    assert [line for line in lines if "freed" in line] == [
        "acme/legal: stored, 3 pages and 12 KiB freed",
        "acme/medical: stored, 3 pages and 12 KiB freed",
    ]
    for pattern in ("nobody", "nobody/", "x*"):
        assert "nobody" in mlora(server, "warm", pattern, exit_code=2) or pattern == "x*"


def test_one_failure_leaves_the_others_be(server: Server) -> None:
    ran = runner.invoke(app, ["warm", "*/legal", "--url", server.url])
    assert ran.exit_code == 3  # it cannot be had now
    assert "acme/legal: warm, in host memory" in ran.stdout
    assert ran.stderr.count("error: ") == 1 and "other/legal" in ran.stderr


def test_pins_with_a_time(server: Server) -> None:
    line = mlora(server, "warm", "upper", "--hot", "--pin", "--ttl", "90m")
    assert "upper: hot, 3 pages, pinned, until unused for 90 min" in line
    assert "--ttl" in mlora(server, "warm", "upper", "--ttl", "soon", exit_code=2)
    (header, *rows) = [line.split("\t") for line in mlora(server, "list").splitlines()][:6]
    assert header == [
        "adapter", "tier", "rank", "modules", "size", "pages", "pin, ttl", "in flight", "last use",
        "uses", "loads", "digest",
    ]  # fmt: skip
    cells = dict(zip(header, next(row for row in rows if row[0] == "upper"), strict=True))
    assert cells["tier"] == "hot" and cells["pin, ttl"].startswith("hot, ")
    assert cells["pin, ttl"] == "hot, 90 min left" and cells["last use"].endswith(" s ago")
    assert len(cells["digest"]) == 12 and cells["modules"] == "q v"
    mlora(server, "evict", "upper", "--unpin")
    assert json.loads(mlora(server, "list", "--json"))[0]["pin"] is None


def test_a_refusal_says_what_to_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def pinned(api: Api, name: str, **how: bool) -> dict[str, object]:
        raise Refused(f"adapter {name} is pinned hot")

    with monkeypatch.context() as patched:
        patched.setattr(Api, "evict", pinned)
        ran = runner.invoke(app, ["evict", "acme/", "--url", server.url])
    assert ran.exit_code == 1 and ran.stderr.count("error: ") == 2
    assert ran.stderr.endswith("hint: a pinned one goes with --unpin\n")
    assert "hint: mlora list" in mlora(server, "warm", "nobody", exit_code=2)


def test_what_another_name_keeps(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept(api: Api, name: str, **how: bool) -> dict[str, object]:
        row = {"id": name, "tier": "hot", "freed_pages": 0, "freed_host_bytes": 0}
        return {**row, "kept_by": "twin"}

    with monkeypatch.context() as patched:
        patched.setattr(Api, "evict", kept)
        shown = mlora(server, "evict", "upper", "--unpin")
    assert "upper: unpinned, hot all the same: the same content is pinned as twin" in shown


def test_failed_ones_say_why_and_when(server: Server) -> None:
    ran = runner.invoke(app, ["list", "--url", server.url])
    assert "late: down (attempt 2 in " in ran.stderr
    assert retry_words({"id": "x", "retry_in_s": None}) == " (mlora warm x tries it again)"


def test_spans() -> None:
    assert [format_span(s) for s in (0.7, 59, 119, 120, 5400, 7200, 86400 * 3)] == [
        "1 s", "59 s", "119 s", "2 min", "90 min", "2 h", "3 d",
    ]  # fmt: skip


def test_cells_of_a_bare_row() -> None:
    """A server that tells less than ours."""
    assert row_cells({"id": "x"}) == ("x", "-", "-", "-", "-", 0, "-", 0, "-", 0, 0, "-")


def test_matching() -> None:
    known = ["a/x", "a/y", "b/x", "ab"]
    assert matching_names(["a/"], known) == ["a/x", "a/y"]
    assert matching_names(["*/x", "a/x", "new/one"], known) == ["a/x", "b/x", "new/one"]
    assert matching_names(["a[b]"], known) == ["ab"]
    with pytest.raises(BadInput, match="no adapter matches c/"):
        matching_names(["c/"], known)


def test_diff_and_apply(server: Server) -> None:
    """0 same, 1 different, 2 bad input; a table for people; refused without a change."""
    path = server.folder / "fleet.yaml"
    assert mlora(server, "diff", str(path)).strip().endswith("nothing differs")
    write_adapter(server.folder / "adapters" / "new", seed=30)
    far = f"a{'-long' * 12}-folder/new"
    write_adapter(server.folder / "adapters" / far, seed=31)
    path.write_text(
        fleet_text("upper", "acme/legal", "new").replace("s/upper}", f"s/{far}, pin: hot}}")
    )
    lines = [
        line.split("\t") for line in mlora(server, "diff", str(path), exit_code=1).splitlines()
    ]
    removed = f"{server.folder}/adapters/acme-medical"
    assert ["-", "acme/medical", removed] in lines, "however long the folder is"
    found = {line[1]: (line[0], line[2]) for line in lines if len(line) == 3}
    assert found["new"] == ("+", f"source {server.folder}/adapters/new")
    was, now = (f"{server.folder}/adapters/{each}" for each in ("upper", far))
    assert found["upper"] == ("~", f"source {was} -> {now}, pin none -> hot")
    report = json.loads(mlora(server, "diff", str(path), "--json", exit_code=1))
    assert {row["change"] for row in report["changes"]} == {"added", "removed", "changed"}
    assert "applied, 4 changed" in mlora(server, "apply", str(path))
    assert "nothing differs" in mlora(server, "apply", str(path))
    path.write_text(fleet_text("upper", port=9000))
    ran = runner.invoke(app, ["apply", str(path), "--url", server.url])
    assert ran.exit_code == 1 and "server.port: running 8000, the file says 9000" in ran.stderr
    assert "! " in mlora(server, "diff", str(path), exit_code=1).replace("\t", " ")
    path.write_text(fleet_text("upper", "absent"))
    assert "absent" in runner.invoke(app, ["apply", str(path), "--url", server.url]).stderr
    path.write_text("base: {model: x}\nadapters: [{name: ../x, source: y}]\n")
    assert "adapters.0.name" in mlora(server, "diff", str(path), exit_code=2)
    assert runner.invoke(app, ["diff", str(path), "--url", "http://127.0.0.1:9"]).exit_code == 2


def test_a_file_as_the_server_takes_it(tmp_path: Path) -> None:
    """Globs, patterns and times resolved; secrets stay references."""
    write_adapter(tmp_path / "adapters" / "x", seed=1)
    (tmp_path / "fleet.yaml").write_text(
        "base: {model: demo:base}\nserver: {api_keys: [env:KEY]}\nadapters:\n"
        "  - folder: ./adapters/*\n"
        '  - {name: y, source: "hf://a/b", ttl: 1h}\n'
        '  - {pattern: "{t}/{n}", source: "./tenants/{t}/{n}"}\n'
    )
    body = fleet_body(load_fleet(tmp_path / "fleet.yaml"))
    assert [(a["name"], a["source"], a["ttl"]) for a in body["adapters"]] == [
        ("x", str(tmp_path / "adapters" / "x"), None), ("y", "hf://a/b", 3600.0),
    ]  # fmt: skip
    assert body["patterns"][0]["source"] == f"{tmp_path}/tenants/{{t}}/{{n}}"
    assert body["settings"]["server.api_keys"] == ["env:KEY"]
    json.dumps(body)


def test_plan_says_what_it_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(
        "base: {model: demo:base}\nadapters:\n"
        '  - {pattern: "{t}/{n}", source: "s3://bucket/{t}/{n}/"}\n'
    )
    ran = runner.invoke(app, ["plan", str(tmp_path / "fleet.yaml"), "--gpu", "h200"])
    assert ran.exit_code == 0, ran.output
    assert "note: pattern {t}/{n}: its adapters are not known" in ran.stdout
    assume = ["--assume", "rank=16,targets=attention,count=20"]
    ran = runner.invoke(app, ["plan", str(tmp_path / "fleet.yaml"), "--gpu", "h200", *assume])
    assert ran.exit_code == 0 and "pattern {t}/{n}" not in ran.stdout
