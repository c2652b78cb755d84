"""Metrics: vLLM's names verbatim, own series per adapter, bounded whatever clients send."""

import asyncio
import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multilora_cli.adapters.entry import AdapterEntry, AdapterRequest
from multilora_cli.engine.messages import AdapterEvent, AdapterStatus
from multilora_cli.server.traffic import AdapterTable, RequestMeter, Traffic
from tests.fakes import Behaviour
from tests.server.conftest import InProcess

BODY_HI = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def samples(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found, name, **labels):
    rows = [v for (n, ls), v in found.items() if n == name and labels.items() <= dict(ls).items()]
    (row,) = rows
    return row


async def _scrape(app):
    reply = await app.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return reply.text


async def _counts(folder) -> None:
    async with InProcess(folder) as app:
        before = samples(await _scrape(app))
        assert value(before, "mlora_engine_up") == 1
        for model in ("upper", "upper", "demo"):
            body = BODY_HI | {"model": model, "max_tokens": 9}
            reply = await app.http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200
        await app.http.post("/v1/chat/completions", json=BODY_HI | {"model": "nobody"})
        after = samples(await _scrape(app))
        assert value(after, "mlora_adapter_requests_total", adapter="upper") == 2
        assert value(after, "mlora_adapter_output_tokens_total", adapter="upper") == 18
        assert value(after, "mlora_adapter_prompt_tokens_total", adapter="upper") == 40
        assert value(after, "mlora_adapter_ttft_seconds_count", adapter="upper") == 2
        assert value(after, "mlora_adapter_pages", adapter="upper") == 3
        assert value(after, "mlora_adapter_requests_total", adapter="other") == 0
        assert value(after, "vllm:generation_tokens_total", model_name="demo") == 27
        assert value(after, "vllm:prompt_tokens_total", model_name="demo") == 60
        assert value(after, "vllm:time_to_first_token_seconds_count", model_name="demo") == 3
        assert value(after, "vllm:inter_token_latency_seconds_count", model_name="demo") == 24
        assert value(after, "vllm:request_success_total", finished_reason="length") == 3
        assert value(after, "mlora_http_replies_total", status="404") == 1
        assert value(after, "mlora_adapters", tier="hot") == 1
        assert value(after, "mlora_pages_total") == 64


def test_counts(tmp_path):
    asyncio.run(_counts(tmp_path))


async def _lora_info(folder) -> None:
    async with InProcess(folder, Behaviour(silent=True), max_loras=7) as app:
        body = BODY_HI | {"model": "acme/legal"}
        pending = asyncio.create_task(app.http.post("/v1/chat/completions", json=body))
        while not app.client.num_sequences:
            await asyncio.sleep(0.01)
        text = await _scrape(app)
        (line,) = re.findall(r"^vllm:lora_requests_info\{.*", text, re.MULTILINE)
        assert line.startswith(
            'vllm:lora_requests_info{max_lora="7",running_lora_adapters="acme/legal",'
            'waiting_lora_adapters=""} 1'
        )
        found = samples(text)
        assert value(found, "vllm:num_requests_running", model_name="demo") == 1
        assert value(found, "vllm:num_requests_waiting", model_name="demo") == 0
        assert 0 < value(found, "vllm:kv_cache_usage_perc", model_name="demo") < 1
        pending.cancel()


def test_lora_requests_info_is_vllms(tmp_path):
    asyncio.run(_lora_info(tmp_path))


async def _loading(folder) -> None:
    async with InProcess(folder, max_loras=7) as app:
        body = BODY_HI | {"max_tokens": 4}
        for model in ("upper", "upper", "demo"):
            await app.http.post("/v1/chat/completions", json=body | {"model": model})
        warmed = {"hot": True, "pin": True}
        await app.http.post("/v1/adapters/acme/legal/warm", json=warmed)
        await app.http.post("/v1/adapters/upper/evict", json={"cold": True})
        await app.http.post("/v1/adapters/upper/evict", json={"cold": True})  # nothing to free
        digest = app.registry.get("upper").digest
        for tier in ("stored", "warm", "hot", "warm", "hot"):
            status = AdapterStatus(digest, tier, 3, 9, 0, False, 1, 1, 0.0, "", 0.2, 0.004)
            app.client._receive(AdapterEvent(status))
        app.client.query = lambda *_: asyncio.sleep(0)  # the fake engine knows nothing of these
        found = samples((await app.http.get("/metrics")).text)
        assert value(found, "mlora_adapter_cold_starts_total", adapter="upper") == 1
        assert value(found, "mlora_adapter_itl_seconds_count", adapter="upper") == 6
        assert value(found, "mlora_adapter_load_seconds_count", hop="stored_warm") == 1
        assert value(found, "mlora_adapter_load_seconds_sum", hop="stored_warm") == 0.2
        assert value(found, "mlora_adapter_load_seconds_count", hop="warm_hot") == 3
        assert value(found, "vllm:lora_adapter_load_seconds_count") == 1
        assert value(found, "mlora_adapter_evictions_total", reason="operator") == 1
        assert value(found, "mlora_adapter_evictions_total", reason="room") == 0
        assert value(found, "mlora_adapter_tier", adapter="upper") == 2
        loaded = {"adapter_name": "acme/legal", "level": "gpu", "pinned": "true", "rank": "4"}
        assert value(found, "vllm:lora_adapter_loaded", **loaded) == 1
        assert value(found, "vllm:num_gpu_loaded_lora_adapters", model_name="demo") == 2
        assert value(found, "vllm:num_cpu_loaded_lora_adapters", model_name="demo") == 0
        assert value(found, "vllm:max_gpu_lora_adapters", model_name="demo") == 7
        for name in ("queue", "prefill", "decode", "inference"):
            assert value(found, f"vllm:request_{name}_time_seconds_count", engine="0") == 3
        assert value(found, "vllm:request_prompt_tokens_sum", engine="0") == 60
        assert value(found, "vllm:request_generation_tokens_sum", engine="0") == 12
        assert value(found, "vllm:request_time_per_output_token_seconds_count", engine="0") == 3


def test_where_adapters_are_and_what_it_took(tmp_path):
    """API 3.5: the names that are proposed for vLLM, and our own by adapter, hop and reason."""
    asyncio.run(_loading(tmp_path))


def test_times_of_a_request_add_up(monkeypatch):
    """Queue, prefill and decode are parts of one request: they sum to its time."""
    clock = iter((10.0, 14.0, 16.0, 19.0, 19.5))  # came, first token, two more, last, ended
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    traffic = Traffic(4)
    meter = RequestMeter(traffic, "a", 30)
    meter.queued(1.5)
    for count in (1, 2, 1):
        meter.tokens(count)
    meter.ended()
    totals = {name: buckets.total for name, buckets in traffic.times.by_name.items()}
    assert totals == {
        "time_to_first_token_seconds": 4.0,
        "inter_token_latency_seconds": 4.0,
        "e2e_request_latency_seconds": 9.5,
        "request_queue_time_seconds": 1.5,
        "request_prefill_time_seconds": 2.5,
        "request_decode_time_seconds": 5.0,
        "request_inference_time_seconds": 7.5,
        "request_time_per_output_token_seconds": pytest.approx(5 / 3),
        "request_prompt_tokens": 30,
        "request_generation_tokens": 4,
    }
    assert traffic.adapters.named["a"].queue_s == 1.5


async def _many_names(folder) -> int:
    async with InProcess(folder, names=()) as app:
        for index in range(2000):
            name = f"tenant-{index}/adapter"
            status = AdapterStatus(f"{index:064x}", "hot", 3, 9, 0, True, 1, 1, 0.0)
            app.registry._entries.put(
                AdapterEntry(AdapterRequest(name, "x"), "", index, 0.0, digest=status.digest)
            )
            app.client.statuses[status.digest] = status
            app.front.metrics.meter(name, 5).tokens(2)
        app.client.query = lambda *_: asyncio.sleep(0)
        for index in range(300):
            body = BODY_HI | {"model": f"invented-{index}"}
            assert (await app.http.post("/v1/chat/completions", json=body)).status_code == 404
        text = await _scrape(app)
        assert "invented" not in text
        return len([line for line in text.splitlines() if not line.startswith("#")])


def test_g23_series_are_few_however_many_adapters_and_names(tmp_path):
    """2,000 adapters, all pinned and asked for, and invented names: at most 5,000 series."""
    assert 2000 < asyncio.run(_many_names(tmp_path)) <= 5000


def test_series_are_bounded_and_only_grow():
    """The busiest have series of their own; every sum stays right, no series ever shrinks."""
    table = AdapterTable(limit=3)
    last = {}
    for turn in range(600):
        name = f"a{turn % 7}" if turn < 300 else f"b{turn % 2}"
        table.counts(name).requests += 1
        assert len(table.named) <= 3
        rows = {**table.named, "other": table.other}
        assert sum(counts.requests for counts in rows.values()) == turn + 1
        assert rows["other"].requests >= last.get("other", 0)
        last = {"other": rows["other"].requests}
    assert {"b0", "b1"} <= set(table.named)
    table.forget("b0")
    assert "b0" not in table.named
    assert sum(c.requests for c in (*table.named.values(), table.other)) == 600
