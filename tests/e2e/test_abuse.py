"""Hostile clients, hostile operators and hard times, on real processes.

After every fault the same is asked: nothing is in flight, no KV page is held, the next answers are
right, and the log holds no traceback.
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.serving import RANKS, Served, start
from tests.e2e.test_answers import PROMPT, complete, expected
from tests.signature import deep_adapter

LONG = "the same words for everybody, " * 4 + PROMPT
COMPLETIONS = "/v1/completions"


def client(served: Served) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=served.url, timeout=240, limits=limits)


def body(name: str, **fields: Any) -> dict[str, Any]:
    return {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}


def assert_clean(served: Served) -> None:
    """Nothing is held and everybody answers as before."""
    deadline = time.monotonic() + 30
    while True:
        flying = {name: row["in_flight"] for name, row in served.adapters().items()}
        held = float(re.findall(r"^mlora_pages_kv (\S+)$", served.metrics(), re.M)[0])
        if not any(flying.values()) and held == 0:
            break
        assert time.monotonic() < deadline, (flying, held)
        time.sleep(0.1)
    for name in ("counter", "r8", "r24"):
        assert complete(served, name) == expected(name, 12)
    assert "Traceback" not in served.log.read_text()


async def streamed(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, str]:
    """Text of a stream and how it ended: done, an error's code, or cut."""
    text, end = "", "cut"
    async with http.stream("POST", COMPLETIONS, json={**asked, "stream": True}) as reply:
        if reply.status_code != 200:
            await reply.aread()
            return "", str(reply.json()["error"]["code"])
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                end = "done"
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    end = str(event["error"]["code"])
                for choice in event.get("choices", ()):
                    text += choice["text"]
    return text, end


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_clients_that_leave_in_every_phase(shared: Served, count: int) -> None:
    """F25, F26, A-RUN-14: before the first byte, in mid-stream, alone and with n answers."""
    rng = random.Random(count)

    async def leave(http: httpx.AsyncClient, index: int) -> None:
        name = list(RANKS)[index % len(RANKS)]
        prompt = PROMPT * rng.randint(1, 20)
        asked = body(name, prompt=prompt, max_tokens=300, ignore_eos=True, n=1 + index % 3)
        lines, wait_s = rng.randint(0, 12), rng.choice((0.01, 0.05, 0.2, 0.5))
        try:
            if index % 2:
                stream = http.stream("POST", COMPLETIONS, json={**asked, "stream": True})
                async with stream as reply:
                    async for _ in reply.aiter_lines():
                        lines -= 1
                        if lines < 0:
                            return
            else:
                await http.post(COMPLETIONS, json=asked, timeout=wait_s)
        except httpx.TimeoutException:
            return

    async def run() -> None:
        async with client(shared) as http:
            await asyncio.gather(*(leave(http, index) for index in range(count)))

    asyncio.run(run())
    assert_clean(shared)


def test_stop_strings_with_several_answers(shared: Served) -> None:
    """A-API-08 with n: every answer ends before its stop string and nothing of it leaks."""
    asked = body("counter", prompt="a", max_tokens=40, n=3, stop=["fgh", "never"])
    whole = httpx.post(f"{shared.url}{COMPLETIONS}", json=asked, timeout=120).json()
    assert [(c["text"], c["finish_reason"]) for c in whole["choices"]] == [("bcde", "stop")] * 3
    texts: Counter[int] = Counter()
    pieces = {0: "", 1: "", 2: ""}
    with httpx.stream(
        "POST", f"{shared.url}{COMPLETIONS}", json={**asked, "stream": True}, timeout=120
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                pieces[choice["index"]] += choice["text"]
                texts[choice["index"]] += choice["finish_reason"] is not None
    assert pieces == dict.fromkeys(range(3), "bcde")
    assert texts == Counter({0: 1, 1: 1, 2: 1})
    assert_clean(shared)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_logprobs_and_several_prompts_together(shared: Served, stream: bool) -> None:
    """A-API-10, A-API-11: each prompt is echoed before each of its answers, with its logprobs."""
    asked = body("r8", prompt=["abc", "de"], max_tokens=3, echo=True, logprobs=2, n=2)
    texts = dict.fromkeys(range(4), "")
    tokens: dict[int, list[str]] = {index: [] for index in range(4)}
    reply = httpx.post(f"{shared.url}{COMPLETIONS}", json={**asked, "stream": stream}, timeout=120)
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    for event in map(json.loads, lines if stream else [reply.text]):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["logprobs"] is not None:
                tokens[choice["index"]] += choice["logprobs"]["tokens"]
    answer = expected("r8", 3)
    assert list(texts.values()) == ["abc" + answer] * 2 + ["de" + answer] * 2
    assert tokens[0] == tokens[1] == ["<s>", *"abc", *answer]
    assert tokens[2] == tokens[3] == ["<s>", *"de", *answer]


@pytest.mark.slow
def test_two_hundred_clients_at_once(shared: Served) -> None:
    """F25, A-OUT-04: more than fit, each with its own adapter's answer."""
    names = ["counter", *RANKS]

    async def run() -> list[tuple[str, str]]:
        async with client(shared) as http:
            asked = [body(names[index % len(names)]) for index in range(200)]
            return await asyncio.gather(*(streamed(http, one) for one in asked))

    results = asyncio.run(run())
    for index, result in enumerate(results):
        assert result == (expected(names[index % len(names)], 12), "done")
    assert_clean(shared)


# ---------------------------------------------------------------- operators


def load(served: Served, name: str, path: Path, **fields: Any) -> httpx.Response:
    asked = {"lora_name": name, "lora_path": str(path), **fields}
    return httpx.post(f"{served.url}/v1/load_lora_adapter", json=asked, timeout=120)


def unload(served: Served, name: str) -> httpx.Response:
    asked = {"lora_name": name}
    return httpx.post(f"{served.url}/v1/unload_lora_adapter", json=asked, timeout=120)


def with_nan(folder: Path, signature: int) -> Path:
    """An adapter whose headers are in order and whose last weight is not a number."""
    deep_adapter(folder, signature, r=8)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    last = sorted(tensors)[-1]
    tensors[last] = tensors[last].clone()
    tensors[last][-1, -1] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_a_failed_replacement_leaves_the_version_before_it(shared: Served) -> None:
    """RELIABILITY 8.6: in the file system, in the headers or in the weights, whatever is broken."""
    spare = shared.fleet.parent / "spare"
    assert load(shared, "tenant", spare / "other").status_code == 200
    generation = shared.adapters()["tenant"]["generation"]
    try:
        for path in (with_nan(spare / "nan", 91), spare / "nowhere"):
            reply = load(shared, "tenant", path, load_inplace=True)
            assert reply.status_code in (400, 404), reply.text
            assert complete(shared, "tenant") == chr(91) * 12
            assert shared.adapters()["tenant"]["generation"] == generation
    finally:
        assert unload(shared, "tenant").status_code == 200
    assert_clean(shared)


@pytest.mark.parametrize("turns", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_loads_and_unloads_while_streams_hit_the_prefix_cache(shared: Served, turns: int) -> None:
    """F35, A-RUN-03: each stream is wholly the adapter's, or a 404; never the base's, never cut."""
    other = shared.fleet.parent / "spare" / "other"
    results: Counter[tuple[str, str]] = Counter()
    over = asyncio.Event()

    async def ask(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            result = await streamed(http, body("tenant", prompt=LONG, max_tokens=20))
            results[result] += 1
            if result[1] != "done":
                await asyncio.sleep(0.02)

    async def operate(http: httpx.AsyncClient) -> None:
        for turn in range(turns):
            asked = {"lora_name": "tenant", "lora_path": str(other)}
            reply = await http.post("/v1/load_lora_adapter", json=asked)
            assert reply.status_code == 200, reply.text
            await asyncio.sleep(0.1 * (1 + turn % 3))
            reply = await http.post("/v1/unload_lora_adapter", json={"lora_name": "tenant"})
            assert reply.status_code == 200, reply.text
        over.set()

    async def run() -> None:
        async with client(shared) as http:
            await asyncio.gather(operate(http), *(ask(http) for _ in range(4)))

    asyncio.run(run())
    assert set(results) <= {(chr(91) * 20, "done"), ("", "model_not_found")}
    assert results[chr(91) * 20, "done"] > 0
    assert_clean(shared)


@pytest.fixture(scope="module")
def mended(signature_fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose fleet has a folder without weights and one with a weight that is NaN."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "adapters" / "empty").mkdir(parents=True)
    shutil.copy(
        signature_fleet.parent / "adapters" / "r4" / "adapter_config.json",
        folder / "adapters" / "empty",
    )
    with_nan(folder / "adapters" / "nan", 92)
    deep_adapter(folder / "adapters" / "goes", 93, r=8)
    fleet = folder / "fleet.yaml"
    text = signature_fleet.read_text().replace("./base", str(signature_fleet.parent / "base"))
    listed = f"[{{folder: ./adapters/*}}, {{folder: {signature_fleet.parent}/adapters/*}}]"
    fleet.write_text(text.replace("[{folder: ./adapters/*}]", listed))
    server = start(fleet, "--poison", log=folder / "log")
    try:
        yield server
    finally:
        server.close()


def test_broken_adapters_in_the_fleet_harm_nobody(mended: Served) -> None:
    """A-RUN-09: shown as failed with the reason; 503 by name; everybody else is served."""
    assert list(mended.ready["refused"]) == ["empty"]  # type: ignore[call-overload]
    assert mended.adapters()["empty"]["tier"] == "failed"
    assert "adapter_model.safetensors" in str(mended.adapters()["empty"]["detail"])
    for name in ("empty", "nan"):
        for _ in range(2):
            reply = httpx.post(f"{mended.url}{COMPLETIONS}", json=body(name), timeout=120)
            assert reply.status_code == 503, reply.text
            error = reply.json()["error"]
            assert error["code"] == "adapter_unavailable"
            assert error["message"].startswith(f"adapter {name}: ")
            assert str(mended.fleet.parent) not in reply.text  # RELIABILITY 3.6: where files lie
            assert "adapter_model.safetensors" in error["message"] or "lora" in error["message"]
    assert_clean(mended)


def test_the_folder_of_an_evicted_adapter_is_gone(mended: Served) -> None:
    """A-RUN-11: named and 503, not fatal; served again once the folder is back."""
    folder = mended.fleet.parent / "adapters" / "goes"
    assert complete(mended, "goes") == chr(94) * 12
    away = folder.with_name(".away")
    folder.rename(away)
    assert complete(mended, "goes") == chr(94) * 12  # what is loaded needs no folder
    evicted = httpx.post(f"{mended.url}/v1/adapters/goes/evict", json={"cold": True}, timeout=120)
    assert evicted.status_code == 200, evicted.text
    reply = httpx.post(f"{mended.url}{COMPLETIONS}", json=body("goes"), timeout=120)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "adapter_unavailable")
    assert reply.json()["error"]["message"] == "adapter goes: its source: no such folder"
    assert str(folder) in str(mended.adapters()["goes"]["detail"])
    assert_clean(mended)
    away.rename(folder)
    deadline = time.monotonic() + 60
    while True:
        reply = httpx.post(f"{mended.url}{COMPLETIONS}", json=body("goes"), timeout=120)
        if reply.status_code == 200 or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert reply.json()["choices"][0]["text"] == chr(94) * 12, reply.text


def test_sigterm_while_adapters_load(mended: Served) -> None:
    """F06: every call is answered, none hangs, and the exit is 0. The last test of this server."""
    spare = mended.fleet.parent / "adapters" / "goes"

    async def run() -> list[int]:
        async with client(mended) as http:
            calls = [
                http.post(
                    "/v1/load_lora_adapter",
                    json={"lora_name": f"new{index}", "lora_path": str(spare)},
                )
                for index in range(12)
            ]
            calls += [http.post(COMPLETIONS, json=body(name)) for name in RANKS]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(0.1)
            mended.process.send_signal(signal.SIGTERM)
            return [reply.status_code for reply in await asyncio.gather(*tasks)]

    assert set(asyncio.run(run())) <= {200, 503}
    assert mended.process.wait(60) == 0
    assert "Traceback" not in mended.log.read_text()


# ---------------------------------------------------------------- hard times


@pytest.mark.parametrize("seconds", [4.5, pytest.param(10.0, marks=pytest.mark.slow)])
def test_f05_a_stopped_engine_is_noticed_and_goes_on(shared: Served, seconds: float) -> None:
    """F05: degraded and not ready, every route answers, streams go on, no restart."""
    engine = shared.engine_pid

    async def run() -> None:
        async with client(shared) as http:
            asked = body("r24", max_tokens=60, ignore_eos=True)
            streams = [asyncio.create_task(streamed(http, asked)) for _ in range(3)]
            await asyncio.sleep(0.3)
            os.kill(engine, signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
                assert (await http.get("/health")).json()["status"] == "degraded"
                assert (await http.get("/readyz")).status_code == 503
                for path in ("/v1/models", "/v1/lora_adapters", "/metrics"):
                    assert (await http.get(path)).status_code == 200
            finally:
                os.kill(engine, signal.SIGCONT)
            for result in await asyncio.gather(*streams):
                assert result == (expected("r24", 60), "done")

    asyncio.run(run())
    shared.wait_ready()
    assert shared.engine_pid == engine
    assert_clean(shared)


@pytest.mark.slow
def test_f03_an_engine_that_keeps_dying_stays_down(served: Served) -> None:
    """F03: five deaths within a minute; then 503 with the reason, what needs no engine works."""
    for _ in range(5):
        served.wait_ready()
        os.kill(served.engine_pid, signal.SIGKILL)
        time.sleep(0.5)
    deadline = time.monotonic() + 30
    while httpx.get(f"{served.url}/health", timeout=30).json()["status"] != "down":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    health = httpx.get(f"{served.url}/health", timeout=30)
    assert (health.status_code, health.json()["status"]) == (503, "down")
    reply = httpx.post(f"{served.url}{COMPLETIONS}", json=body("r8"), timeout=30)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "5 times" in reply.json()["error"]["message"]
    assert set(served.adapters()) == set(RANKS)
    assert served.metrics()
    assert load(served, "new", served.fleet.parent / "spare" / "other").status_code == 503
    assert unload(served, "r4").status_code == 200
    assert served.stop() == 0


@pytest.mark.slow
def test_f22_pages_run_out_and_everybody_is_answered(signature_fleet: Path, tmp_path: Path) -> None:
    """F22, A-RUN-12: adapters that do not fit together, and preemption; answers equal solo."""
    names = ["counter", *RANKS]
    server = start(signature_fleet, "--poison", "--set", "memory.device_bytes=18MiB",
                   log=tmp_path / "log")  # fmt: skip

    async def run() -> list[tuple[str, str]]:
        async with client(server) as http:
            asked = [
                body(names[i % 8], prompt=f"{i} " * 10 + PROMPT, max_tokens=60, ignore_eos=True)
                for i in range(50)
            ]
            return await asyncio.gather(*(streamed(http, one) for one in asked))

    try:
        for index, result in enumerate(asyncio.run(run())):
            assert result == (expected(names[index % 8], 60), "done")
        metrics = server.metrics()
        for counter in ("vllm:num_preemptions_total", "mlora_engine_adapter_evictions_total"):
            (value,) = re.findall(rf"^{counter}\S* (\S+)$", metrics, re.M)
            assert float(value) > 0, counter
        assert_clean(server)
        assert server.stop() == 0
    finally:
        server.close()
