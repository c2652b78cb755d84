"""Metrics: vLLM's names verbatim, own series per adapter, bounded whatever clients send."""

import asyncio
import re

from prometheus_client.parser import text_string_to_metric_families

from multilora_cli.server.metrics import AdapterTable
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
            'waiting_lora_adapters=""} 1.'
        )
        found = samples(text)
        assert value(found, "vllm:num_requests_running", model_name="demo") == 1
        assert value(found, "vllm:num_requests_waiting", model_name="demo") == 0
        assert 0 < value(found, "vllm:kv_cache_usage_perc", model_name="demo") < 1
        pending.cancel()


def test_lora_requests_info_is_vllms(tmp_path):
    asyncio.run(_lora_info(tmp_path))


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
