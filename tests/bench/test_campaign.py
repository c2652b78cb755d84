"""Turns, counts that add up, churn: whole programs against pretended servers."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from multilora_cli.bench.arms import Program, Room, Workload, make_program
from multilora_cli.bench.bound import arrival_bound, workload_bound
from multilora_cli.bench.campaign import Pass, Settings, Side, run_program
from multilora_cli.bench.churn import churning
from multilora_cli.bench.loopback import Loopback, Script
from multilora_cli.bench.prompts import PromptMaker
from multilora_cli.bench.target import Target, public_url
from multilora_cli.bench.workload import BenchRequest
from multilora_cli.cli.api import clean_url
from multilora_cli.errors import BadInput, MloraError, Unreachable
from tests.bench.test_workload_bound import costs

SMALL = Workload(requests=6, lengths="8:3", rounds=2)
MODELS = ("base", "a", "b", "c", "d")


def run(
    program: Program | None = None, *scripts: Script, settings: Settings | None = None
) -> tuple[list[Pass], list[str], list[Loopback]]:
    async def go() -> tuple[list[Pass], list[str], list[Loopback]]:
        async with AsyncExitStack() as stack:
            servers, sides = [], []
            for index, script in enumerate(scripts or (Script(models=MODELS),)):
                server = await stack.enter_async_context(Loopback(script))
                target = await stack.enter_async_context(Target(server.url, timeout_s=30))
                fleet = await target.fleet()
                sides.append(Side(f"s{index}" if scripts else "", target, fleet, fleet.adapters))
                servers.append(server)
            passes, notes = await run_program(
                sides,
                program or make_program("heterogeneous", SMALL, Room(4)),
                settings or Settings(),
            )
            return passes, notes, servers

    return asyncio.run(go())


def test_what_the_server_lists_is_what_is_used() -> None:
    async def go() -> None:
        async with Loopback(Script(models=MODELS)) as server, Target(server.url) as target:
            fleet = await target.fleet()
            assert (fleet.base, fleet.names, fleet.max_model_len) == ("base", MODELS[1:], 4096)
            assert fleet.adapters[0].path == "/adapters/a" and fleet.ranks == {}

    asyncio.run(go())


def test_the_bound_is_that_of_what_was_done() -> None:
    """Of the first side alone, and of the tokens that came; arrivals have a bound of their own."""
    settings = Settings(costs=costs())
    passes, _, _ = run(None, Script(models=MODELS), Script(models=MODELS), settings=settings)
    for done in passes:
        assert (done.bound is None) == (done.side == "s1")
        assert done.mean_output == 3
    whole = passes[0]
    requests = [BenchRequest(None, r.input_tokens, 3) for r in whole.result.records]
    assert whole.bound == workload_bound(requests, 16, costs())

    slow = Script(models=MODELS, gap_s=0.2)
    cut, _, _ = run(None, slow, settings=Settings(costs=costs(), limit_s=0.3))
    assert all(done.measures.cut == 6 and done.bound is not None for done in cut)
    came = [BenchRequest(None, 8, r.output_tokens) for r in cut[0].result.records]
    assert {request.output_tokens for request in came} == {2}
    assert cut[0].bound == workload_bound(came, 16, costs())

    open_loop = make_program("heterogeneous", replace(SMALL, rate=100.0), Room(4))
    for done in run(open_loop, settings=settings)[0]:
        (arm,) = (arm for arm in open_loop.arms if arm.label == done.arm)
        assert done.bound == arrival_bound(arm.requests, None, costs())


def test_arms_take_turns_and_requests_per_adapter_add_up() -> None:
    """A-OUT-12: what the report counts per adapter is what arrived at the server."""
    passes, _, (server,) = run()
    labels = ["base", "identical", "skewed", "uniform", "distinct"]
    assert [(p.arm, p.round) for p in passes] == [(n, r) for r in (0, 1) for n in labels]
    told: Counter[str] = Counter()
    for done in passes:
        assert sum(g.requests for g in done.measures.per_adapter) == done.measures.requests == 6
        told.update({g.name: g.requests for g in done.measures.per_adapter})
    # Each once, and the six of the distinct arm, which asks most adapters.
    warm_up = Counter({"base": 1, "a": 1 + 2, "b": 1 + 2, "c": 1 + 1, "d": 1 + 1})
    told["base"] = told.pop("(base)")
    assert server.asked == told + warm_up
    assert not any(done.measures.errors for done in passes)


def test_no_prompt_is_sent_twice() -> None:
    """A prefix cache must never answer for the model."""
    _, _, (server,) = run()
    prompts = [(body["model"], tuple(body["prompt"])) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)


def test_two_sides_get_the_same_prompts_and_swap_who_is_first() -> None:
    script = Script(models=MODELS)
    program = make_program("smoke", Workload(requests=4, lengths="8:3", rounds=2), Room(4))
    passes, _, (first, second) = run(program, script, script)
    assert [p.side for p in passes] == ["s0", "s1", "s0", "s1", "s1", "s0", "s1", "s0"]
    assert first.asked == second.asked
    key = lambda body: (body["model"], tuple(body["prompt"]))  # noqa: E731
    assert sorted(map(key, first.bodies)) == sorted(map(key, second.bodies))


def test_failing_requests_are_figures_but_a_failing_warm_up_ends_it() -> None:
    with pytest.raises(MloraError, match="warm-up: b: http_500"):
        run(None, Script(models=MODELS, failures=(("b", "http_500"),)))


def test_a_cold_start_without_leave_to_load_leaves_that_arm_out() -> None:
    program = make_program("cold-start", Workload(lengths="8:2"), Room(4))
    passes, notes, (server,) = run(program, Script(models=MODELS, admin=False))
    assert [p.arm for p in passes] == ["first use", "resident", "base"]
    for label in ("after reload", "from disk", "from host memory"):
        assert any(f"{label} is left out" in note for note in notes)
    assert server.asked["a"] == 2  # no warm-up


def test_reloads_before_an_arm_touch_what_it_uses() -> None:
    program = make_program("cold-start", Workload(lengths="8:2", requests=2), Room(4))
    passes, _, (server,) = run(program, Script(models=MODELS))
    assert [p.arm for p in passes] == [
        "first use", "resident", "from host memory", "from disk", "after reload", "base",
    ]  # fmt: skip
    evicted = [(path, b["cold"]) for path, b in server.admin_calls if "evict" in path]
    assert evicted == [
        (f"/v1/adapters/{name}/evict", cold) for cold in (False, True) for name in ("a", "b")
    ]
    unloaded = [b["lora_name"] for path, b in server.admin_calls if "unload" in path]
    assert unloaded == ["a", "b"]


def test_churn_replaces_what_is_asked_and_moves_the_rest() -> None:
    program = make_program("churn", Workload(requests=8, lengths="8:8", rounds=1), Room(4))
    passes, _, (server,) = run(program, Script(models=MODELS, gap_s=0.15))
    calm, churned = passes
    assert calm.marks == () and len(churned.marks) >= 2
    assert not any(mark.error for mark in churned.marks)
    for mark in churned.marks:
        assert mark.adapter in (("a", "b") if mark.kind == "replace" else ("c", "d"))
        assert 0 <= mark.time_s <= churned.result.duration_s + 1
    replaced = [b for path, b in server.admin_calls if b.get("load_inplace")]
    assert {b["lora_name"] for b in replaced} <= {"a", "b"}
    assert all(b["lora_path"] == f"/adapters/{b['lora_name']}" for b in replaced)


def test_churn_without_leave_is_refused_before_anything_is_unloaded() -> None:
    async def go() -> list[tuple[str, dict[str, object]]]:
        async with Loopback(Script(admin=False)) as server, Target(server.url) as target:
            fleet = await target.fleet()
            with pytest.raises(BadInput, match="refuses to load"):
                async with churning(target, fleet.adapters[:1], fleet.adapters[1:]):
                    pass
            return server.admin_calls

    assert [path for path, _ in asyncio.run(go())] == ["/v1/load_lora_adapter"]


def test_a_server_that_goes_away_ends_the_run() -> None:
    async def go() -> None:
        async with Loopback(Script(models=MODELS)) as server:
            url = server.url
            async with Target(url) as target:
                fleet = await target.fleet()
        async with Target(url) as target:
            side = Side("", target, fleet, fleet.adapters)
            program = make_program("smoke", SMALL, Room(4))
            await run_program([side], program, Settings(PromptMaker()))

    with pytest.raises((Unreachable, MloraError), match=r"unreachable|refused|Connect"):
        asyncio.run(go())


def test_an_unreachable_server_is_one_error() -> None:
    async def go() -> None:
        async with Target("http://127.0.0.1:9") as target:
            await target.fleet()

    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
        asyncio.run(go())


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "https://"])
def test_addresses_are_checked(url: str) -> None:
    with pytest.raises(BadInput, match="--against"):
        clean_url(url, "--against")


def test_addresses_are_shown_without_secrets() -> None:
    assert clean_url("http://h:1/v1/") == "http://h:1"
    assert public_url("http://user:secret@h:1/p?key=secret") == "http://h:1/p"
