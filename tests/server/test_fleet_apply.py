"""A changed fleet file on a running server: all of it or nothing, and nothing that did not change;
what operators changed, over a restart and over a changed file."""

import asyncio
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.adapters.entry import AdapterRequest
from multilora_cli.fleet.pattern import NamePattern
from multilora_cli.fleet.statefile import StateFile
from multilora_cli.server.changes import RuntimeChanges, ServedFleet, by_name, merge
from tests.fakes import Behaviour, tiny_registry, write_adapter
from tests.server.conftest import InProcess

SETTINGS = {"base.model": "x", "memory.kv_reserve": 0.25, "server.port": 8000}


class Fleet:
    """A fleet "file", the server that was started with it, and its state file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = StateFile(folder / "fleet.state.json", folder / "fleet.yaml")
        self.adapters: dict[str, dict[str, Any]] = {}
        self.patterns: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = dict(SETTINGS)
        for seed, name in enumerate(("a", "b", "c")):
            self.add(name, seed)

    def add(self, name: str, seed: int, **fields: Any) -> None:
        """An adapter with weights of its own, in the file."""
        folder = write_adapter(self.folder / "adapters" / f"{name}-{seed}", seed=seed)
        self.adapters[name] = {"name": name, "source": str(folder), **fields}

    def start(self, *behaviours: Behaviour) -> InProcess:
        """A server started with the file and the state as they are now."""
        requests = by_name(AdapterRequest(**fields) for fields in self.adapters.values())
        self.file.close()
        self.file = StateFile(self.file.path, self.folder / "fleet.yaml")
        fleet = ServedFleet(
            path=str(self.folder / "fleet.yaml"),
            settings=dict(self.settings) | {"server.port": 9999},  # by a flag
            written=dict(self.settings),
            requests=requests,
            patterns=tuple(NamePattern(**fields) for fields in self.patterns),
        )
        merged, changes, self.notes = merge(fleet, self.file.read())
        registry = tiny_registry(self.folder, ())
        registry.register_all(merged)
        running = RuntimeChanges(fleet, self.file, changes)
        return InProcess(self.folder, *behaviours, registry=registry, changes=running)

    def body(self, *, dry_run: bool = False) -> dict[str, Any]:
        """What `mlora apply` sends."""
        return {
            "settings": self.settings,
            "adapters": list(self.adapters.values()),
            "patterns": self.patterns,
            "dry_run": dry_run,
        }

    async def apply(self, app: InProcess, status: int = 200, **how: bool) -> dict[str, Any]:
        """The report, or the error."""
        reply = await app.http.post("/v1/fleet", json=self.body(**how))
        assert reply.status_code == status, reply.text
        value: dict[str, Any] = reply.json()
        return value if status == 200 else value["error"]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Adapters a, b and c."""
    return Fleet(tmp_path)


def changes_of(report: Mapping[str, Any]) -> dict[str, str]:
    return {row["name"]: row["change"] for row in report["changes"]}


def versions(app: InProcess) -> dict[str, tuple[int, str]]:
    return {e.name: (e.generation, e.path) for e in app.registry.entries()}


async def says(app: InProcess, model: str) -> str:
    body = {"model": model, "prompt": "x", "max_tokens": 4}
    reply = await app.http.post("/v1/completions", json=body)
    return (
        reply.json()["choices"][0]["text"] if reply.status_code == 200 else str(reply.status_code)
    )


async def post(app: InProcess, path: str, **body: Any) -> None:
    reply = await app.http.post(path, json=body)
    assert reply.status_code == 200, reply.text


def test_what_did_not_change_is_not_touched(fleet: Fleet) -> None:
    """Added, removed and changed ones; a dry run says the same and does nothing; applied twice,
    the second time nothing differs."""

    async def run() -> None:
        async with fleet.start() as app:
            for name in "abc":
                await says(app, name)
            before = versions(app)
            report = await fleet.apply(app, dry_run=True)
            assert (report["changes"], report["restart"], report["applied"]) == ([], [], False)
            fleet.add("b", 7)
            fleet.add("d", 8, pin="hot", ttl=60.0)
            del fleet.adapters["c"]
            told = await fleet.apply(app, dry_run=True)
            assert versions(app) == before
            done = await fleet.apply(app)
            assert changes_of(done) == {"b": "changed", "c": "removed", "d": "added"}
            assert told == done | {"applied": False}
            (row,) = [row for row in done["changes"] if row["name"] == "b"]
            assert list(row["fields"]) == ["source"]
            assert row["fields"]["source"]["file"] == fleet.adapters["b"]["source"]
            after = versions(app)
            assert after["a"] == before["a"] and set(after) == {"a", "b", "d"}
            assert after["b"][0] > before["b"][0]
            assert await says(app, "b") == f"<b#{after['b'][0]}"[:4]
            assert await says(app, "a") == f"<a#{before['a'][0]}"
            assert await says(app, "c") == "404"
            held = {call.digest for call in app.spawner.engine.calls if hasattr(call, "unpin")}
            assert len(held) == 2  # b's old version and c, nothing else
            again = await fleet.apply(app)
            assert again["changes"] == [] and versions(app) == after

    asyncio.run(run())


def test_kept_in_another_way(fleet: Fleet) -> None:
    """Pin, ttl and priority change without a new version; a pin that went is undone in the
    engine."""

    async def run() -> None:
        async with fleet.start() as app:
            before = versions(app)
            fleet.adapters["a"] |= {"pin": "hot", "priority": 3}
            fleet.adapters["b"] |= {"ttl": 60}
            assert set(changes_of(await fleet.apply(app)).values()) == {"changed"}
            await asyncio.sleep(0.1)
            assert versions(app) == before
            rows = {r["id"]: r for r in (await app.http.get("/v1/lora_adapters")).json()["data"]}
            assert (rows["a"]["pin"], rows["a"]["pinned"], rows["a"]["priority"]) == (
                "hot",
                True,
                3,
            )
            assert rows["b"]["ttl_s"] == 60
            fleet.adapters["a"]["pin"] = None
            await fleet.apply(app)
            await asyncio.sleep(0.1)
            call = app.spawner.engine.calls[-1]
            assert (type(call).__name__, call.unpin) == ("EvictAdapter", True)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["broken", "absent", "outside", "other-digest", "base-name"])
def test_all_or_nothing(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory, how: str) -> None:
    """F08, F81: one refused adapter, and the server is as before, state file included."""

    async def run() -> None:
        async with fleet.start() as app:
            for name in "abc":
                await says(app, name)
            before, entries = versions(app), app.registry.entries()
            fleet.add("b", 7)
            del fleet.adapters["c"]
            fleet.add("bad", 9)
            bad = fleet.adapters["bad"]
            if how == "broken":
                write_adapter(Path(bad["source"]), use_dora=True)
            elif how == "absent":
                shutil.rmtree(bad["source"])
            elif how == "outside":
                bad["source"] = str(write_adapter(tmp_path_factory.mktemp("outside"), seed=1))
            elif how == "other-digest":
                bad["digest"] = "sha256:" + "0" * 64
            else:
                fleet.adapters["bad"]["name"] = "demo"
            error = await fleet.apply(app, 400)
            assert error["code"] == "fleet_refused" and "nothing was changed" in error["message"]
            assert (bad["name"] in error["message"]) and versions(app) == before
            assert app.registry.entries() == entries
            assert not fleet.file.path.exists()
            assert changes_of(await fleet.apply(app, dry_run=True)) == {
                "b": "changed", "c": "removed", bad["name"]: "added",
            }  # fmt: skip

    asyncio.run(run())


def test_a_new_version_that_the_engine_refuses(fleet: Fleet) -> None:
    """What is served is replaced only by what the engine has read to the last byte."""

    async def run() -> None:
        async with fleet.start(Behaviour(broken={"b": "adapter_unavailable"})) as app:
            app.registry.with_digest("b")
            before = versions(app)
            fleet.add("a", 6)
            fleet.add("b", 7)
            error = await fleet.apply(app, 400)
            assert "adapter b: lora_A: 3 values are not finite" in error["message"]
            assert versions(app) == before

    asyncio.run(run())


def test_what_needs_a_restart(fleet: Fleet) -> None:
    """F81: refused by name before anything is changed; what a flag overrides is no difference."""

    async def run() -> None:
        async with fleet.start() as app:
            before = versions(app)
            fleet.settings |= {"memory.kv_reserve": 0.5, "base.model": "y"}
            del fleet.adapters["c"]
            report = await fleet.apply(app, dry_run=True)
            assert report["restart"] == [
                {"key": "base.model", "running": "x", "file": "y"},
                {"key": "memory.kv_reserve", "running": 0.25, "file": 0.5},
            ]
            error = await fleet.apply(app, 400)
            assert error["code"] == "restart_needed" and error["param"] == "base.model"
            assert "memory.kv_reserve: running 0.25, the file says 0.5" in error["message"]
            assert versions(app) == before
            fleet.settings = dict(SETTINGS) | {"server.port": 9999}
            assert changes_of(await fleet.apply(app)) == {"c": "removed"}

    asyncio.run(run())


def test_patterns_change(fleet: Fleet) -> None:
    """Names of a pattern that went are gone; a name that was unknown is looked for again."""
    write_adapter(fleet.folder / "tenants" / "acme" / "x", seed=30)
    write_adapter(fleet.folder / "other" / "acme" / "x", seed=31)
    pattern = {
        "pattern": "{tenant}/{name}", "source": f"{fleet.folder}/tenants/{{tenant}}/{{name}}",
    }  # fmt: skip

    async def run() -> None:
        async with fleet.start() as app:
            assert await says(app, "acme/x") == "404"
            fleet.patterns = [pattern]
            report = await fleet.apply(app)
            assert [(r["kind"], r["change"]) for r in report["changes"]] == [("pattern", "added")]
            assert await says(app, "acme/x") == "<acm"
            first = versions(app)["acme/x"]
            source = f"{fleet.folder}/other/{{tenant}}/{{name}}"
            fleet.patterns = [pattern | {"source": source}]
            await fleet.apply(app)
            assert "acme/x" not in versions(app)
            assert await says(app, "acme/x") == "<acm"
            assert versions(app)["acme/x"] != first
            fleet.patterns = []
            await fleet.apply(app)
            assert await says(app, "acme/x") == "404"

    asyncio.run(run())


def test_applies_at_once_come_out_as_one_of_them(fleet: Fleet) -> None:
    """F82: many at the same time: each whole, the last one wins."""

    async def run() -> None:
        async with fleet.start() as app:
            bodies = []
            for turn in range(10):
                fleet.add("a", 40 + turn)
                fleet.add("b", 60 + turn)
                bodies.append(fleet.body())
            posts = [app.http.post("/v1/fleet", json=body) for body in bodies]
            assert {reply.status_code for reply in await asyncio.gather(*posts)} == {200}
            paths = {name: path for name, (_, path) in versions(app).items()}
            assert paths["a"].endswith("a-49") and paths["b"].endswith("b-69")

    asyncio.run(run())


# ---- what operators changed


async def _operate(app: InProcess, fleet: Fleet) -> None:
    """One of everything: loaded, replaced, unloaded, pinned."""
    await post(app, "/v1/unload_lora_adapter", lora_name="a")
    new = str(write_adapter(fleet.folder / "new", seed=20))
    await post(app, "/v1/load_lora_adapter", lora_name="b", lora_path=new, load_inplace=True)
    await post(app, "/v1/adapters/c/warm", hot=True, pin=True, ttl="1h")
    own = str(write_adapter(fleet.folder / "own", seed=21))
    await post(app, "/v1/load_lora_adapter", lora_name="own", lora_path=own, pinned=True)


def test_changes_survive_a_restart(fleet: Fleet) -> None:
    """Load, unload, replace and pin, each as it was; undone by hand, nothing is left of them."""

    async def run() -> None:
        async with fleet.start() as app:
            await _operate(app, fleet)
        async with fleet.start() as app:
            assert fleet.notes == []
            await asyncio.sleep(0.2)
            rows = {r["id"]: r for r in (await app.http.get("/v1/lora_adapters")).json()["data"]}
            assert set(rows) == {"b", "c", "own"}
            assert rows["b"]["source"] == str(fleet.folder / "new")
            assert (rows["c"]["pin"], rows["c"]["ttl_s"], rows["c"]["pinned"]) == (
                "hot",
                3600,
                True,
            )
            assert (rows["own"]["pin"], rows["own"]["via"]) == ("hot", "api")
            report = await fleet.apply(app, dry_run=True)
            assert report["changes"] == [] and report["runtime"] == ["a", "b", "c", "own"]
            await post(app, "/v1/unload_lora_adapter", lora_name="own")
            await post(app, "/v1/adapters/c/evict", unpin=True)
            source = fleet.adapters["a"]["source"]
            await post(app, "/v1/load_lora_adapter", lora_name="a", lora_path=source)
            source = fleet.adapters["b"]["source"]
            await post(
                app, "/v1/load_lora_adapter", lora_name="b", lora_path=source, load_inplace=True
            )
        assert fleet.file.read() == {}

    asyncio.run(run())


def test_unpinning_leaves_the_ttl_of_the_file(fleet: Fleet) -> None:
    """What an operator sets and takes back leaves what the file says, and no change behind."""
    fleet.adapters["a"] |= {"ttl": 90.0}

    async def run() -> None:
        async with fleet.start() as app:
            await post(app, "/v1/adapters/a/warm", hot=True, pin=True, ttl="1h")
            assert app.registry.resolve("a").request.ttl == 3600
            assert set(fleet.file.read()) == {"a"}
            await post(app, "/v1/adapters/a/evict", unpin=True)
            assert app.registry.resolve("a").request.ttl == 90
            assert fleet.file.read() == {}

    asyncio.run(run())


def test_the_file_wins_where_it_changed(fleet: Fleet) -> None:
    """By a restart and by apply alike; what the file says as before keeps its change."""

    async def serve(restarted: bool) -> dict[str, str]:
        async with fleet.start() as app:
            await _operate(app, fleet)
            fleet.add("b", 50)
            fleet.adapters["a"] |= {"priority": 1}
            fleet.add("own", 51)
            if not restarted:
                await fleet.apply(app)
                return {e.name: e.source for e in app.registry.entries()}
        async with fleet.start() as app:
            assert sorted(note.split(":")[0] for note in fleet.notes) == [
                "adapter a", "adapter b", "adapter own",
            ]  # fmt: skip
            return {e.name: e.source for e in app.registry.entries()}

    expected = {
        "a": str(fleet.folder / "adapters" / "a-0"), "b": str(fleet.folder / "adapters" / "b-50"),
        "c": str(fleet.folder / "adapters" / "c-2"),
        "own": str(fleet.folder / "adapters" / "own-51"),
    }  # fmt: skip
    original = {name: dict(fields) for name, fields in fleet.adapters.items()}
    assert asyncio.run(serve(restarted=True)) == expected
    fleet.file.close()
    fleet.file.path.unlink()
    fleet.adapters = original
    assert asyncio.run(serve(restarted=False)) == expected
    assert set(fleet.file.read()) == {"c"}


def test_pins_of_pattern_names(fleet: Fleet) -> None:
    """Kept as long as the pattern says the same; gone with the pattern, by both ways."""
    write_adapter(fleet.folder / "tenants" / "acme" / "x", seed=30)
    pattern = {
        "pattern": "{tenant}/{name}", "source": f"{fleet.folder}/tenants/{{tenant}}/{{name}}",
    }  # fmt: skip

    async def run() -> None:
        fleet.patterns = [pattern]
        async with fleet.start() as app:
            await post(app, "/v1/adapters/acme/x/warm", pin=True)
        async with fleet.start() as app:
            assert app.registry.resolve("acme/x").pin == "warm"
            fleet.patterns = []
            await fleet.apply(app)
            assert app.registry.get("acme/x") is None and fleet.file.read() == {}
        fleet.patterns = [pattern]
        async with fleet.start() as app:
            await post(app, "/v1/adapters/acme/x/warm", pin=True)
        fleet.patterns = []
        async with fleet.start() as app:
            assert fleet.notes[0].startswith("adapter acme/x: the fleet file has changed")
            assert app.registry.get("acme/x") is None

    asyncio.run(run())


def test_a_state_that_cannot_be_written(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """The change is made, and the log says that it will not survive."""

    async def run() -> None:
        async with fleet.start() as app:
            other = StateFile(fleet.file.path, fleet.folder / "fleet.yaml")
            other.write({})
            await post(app, "/v1/unload_lora_adapter", lora_name="a")
            assert "a" not in versions(app)
            listed = (await app.http.get("/v1/lora_adapters")).json()
            assert "kept by another server" in listed["unsaved"]
            other.close()

    asyncio.run(run())
    assert "will not survive a restart" in caplog.text


def test_what_a_client_loaded_stays_below_the_roots(fleet: Fleet, tmp_path: Path) -> None:
    """A state file is no way around adapter_roots: what lies outside them now is refused."""

    async def run() -> None:
        async with fleet.start() as app:
            await _operate(app, fleet)
        merged, _, _ = merge(ServedFleet(), fleet.file.read())
        (own,) = [request for request in merged if request.name == "own"]
        registry = tiny_registry(tmp_path / "elsewhere", ())
        ((name, error),) = registry.register_all([own, replace(own, name="other", via="fleet")])
        assert name == "own" and "not below a folder" in error.message

    asyncio.run(run())


def test_hostile_fleets(fleet: Fleet) -> None:
    """Twins, names, patterns and fields that are none: 400, nothing changed."""

    async def run() -> None:
        async with fleet.start() as app:
            before = versions(app)
            good = fleet.body()
            adapter = fleet.adapters["a"]
            for change in (
                {"adapters": [adapter, adapter | {"name": "A"}]},
                {"adapters": [adapter | {"name": "../a"}]},
                {"adapters": [adapter | {"more": 1}]},
                {"adapters": [adapter | {"digest": "x"}]},
                {"adapters": [adapter | {"ttl": -1}]},
                {"adapters": [adapter | {"source": ""}]},
                {"adapters": [adapter | {"name": "x", "source": "http://127.0.0.1:1/x"}]},
                {"adapters": [adapter | {"name": "x", "source": "file:///etc"}]},
                {"adapters": [adapter | {"name": "x", "source": "/etc"}]},
                {"patterns": [{"pattern": "{a}{b}", "source": "./{a}{b}"}]},
                {"patterns": [{"pattern": "x", "source": "./x"}]},
                {"settings": None},
            ):
                reply = await app.http.post("/v1/fleet", json=good | change)
                assert reply.status_code == 400, change
                assert versions(app) == before, change

    asyncio.run(run())


def test_the_order_of_the_file_stays(fleet: Fleet) -> None:
    """A changed adapter is listed where it was; one that is only in the state comes last."""

    async def run() -> None:
        async with fleet.start() as app:
            await _operate(app, fleet)
        changes = fleet.file.read()
        requests = by_name(AdapterRequest(**fields) for fields in fleet.adapters.values())
        merged, standing, _ = merge(ServedFleet(requests=requests), changes)
        assert [request.name for request in merged] == ["b", "c", "own"]
        assert standing == changes

    asyncio.run(run())


async def _random_operator(app: InProcess, fleet: Fleet, rng: random.Random) -> None:
    """One thing that an operator may do, if it can be done."""
    name = rng.choice(["a", "b", "c", "d", "own"])
    known = app.registry.get(name) is not None
    folder = str(fleet.folder / "adapters" / rng.choice(["a-0", "b-1", "c-2"]))
    deed = rng.choice(["load", "unload", "pin", "unpin"])
    if deed == "load":
        await post(
            app, "/v1/load_lora_adapter", lora_name=name, lora_path=folder, load_inplace=True,
            pinned=rng.random() < 0.3,
        )  # fmt: skip
    elif known and deed == "unload":
        await post(app, "/v1/unload_lora_adapter", lora_name=name)
    elif known and deed == "pin":
        ttl = rng.choice([None, "1h", "2h"])
        await post(app, f"/v1/adapters/{name}/warm", hot=rng.random() < 0.5, pin=True, ttl=ttl)
    elif known and deed == "unpin" and not _twin_is_pinned(app, name):
        await post(app, f"/v1/adapters/{name}/evict", unpin=True)


def _twin_is_pinned(app: InProcess, name: str) -> bool:
    digest = app.registry.with_digest(name).digest
    others = [entry for entry in app.registry.entries() if entry.name != name]
    return any(entry.pin and entry.digest == digest for entry in others)


def _random_edit(fleet: Fleet, rng: random.Random) -> None:
    """One thing that an editor may do to the file."""
    name = rng.choice(["a", "b", "c", "d"])
    if rng.random() < 0.3:
        fleet.adapters.pop(name, None)
    elif name not in fleet.adapters or rng.random() < 0.5:
        fleet.add(name, rng.choice([0, 1, 2, 50, 51]))
    else:
        fleet.adapters[name] |= {"pin": rng.choice([None, "hot"]), "ttl": rng.choice([None, 9.0])}


def _served(app: InProcess) -> dict[str, tuple[Any, ...]]:
    app.registry._entries.check_integrity()
    return {
        entry.name: (entry.source, entry.pin, entry.request.ttl, entry.state)
        for entry in app.registry.entries()
    }


@pytest.mark.parametrize("turns", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_apply_is_what_a_restart_would_be(tmp_path: Path, turns: int) -> None:
    """Whatever operators and editors did: apply, apply and restart, and restart alone give the same
    fleet; nothing of it is left over in the engine."""

    async def run(fleet: Fleet, rng: random.Random) -> None:
        async with fleet.start() as app:
            for _ in range(rng.randrange(1, 8)):
                await _random_operator(app, fleet, rng)
            before = fleet.file.read()
            for _ in range(rng.randrange(0, 5)):
                _random_edit(fleet, rng)
            await fleet.apply(app)
            applied = _served(app)
            assert (await fleet.apply(app))["changes"] == []
            await app.client.query()
            held = set(app.client.statuses) - {"", None}
            assert held <= {entry.digest for entry in app.registry.entries()}
        async with fleet.start() as app:
            assert _served(app) == applied and fleet.notes == []  # apply left nothing stale behind
        fleet.file.close()
        fleet.file.path.unlink(missing_ok=True)
        if before:
            StateFile(fleet.file.path, fleet.folder / "fleet.yaml").write(before)
        async with fleet.start() as app:
            assert _served(app) == applied

    for seed in range(turns):
        folder = tmp_path / str(seed)
        folder.mkdir()
        asyncio.run(run(Fleet(folder), random.Random(seed)))
