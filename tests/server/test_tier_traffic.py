"""What requests found: counted at admission, shown by metrics, the listing and `mlora list`."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from multilora_cli.cli.app import app as mlora
from multilora_cli.engine.messages import AdapterStatus
from multilora_cli.server.buckets import Buckets
from multilora_cli.server.tier_traffic import TierTraffic, found_tier
from tests.server.conftest import InProcess
from tests.server.test_metrics import BODY_HI, samples, value


def test_quantiles_lie_in_the_bucket_of_the_true_one() -> None:
    buckets = Buckets((1.0, 2.0, 4.0))
    assert buckets.quantile(0.5) is None
    for number in (0.5, 1.5, 1.5, 3.0):
        buckets.observe(number)
    assert buckets.quantile(0.25) == 1.0
    assert buckets.quantile(0.5) == 1.5
    assert buckets.quantile(0.75) == 2.0
    assert buckets.quantile(1.0) == 4.0
    for _ in range(100):
        buckets.observe(99.0)
    assert buckets.quantile(0.95) == 4.0, "beyond the last bound nothing is known"


@pytest.mark.parametrize(
    ("tier", "found"),
    [("hot", "hot"), ("warm", "warm"), ("stored", "stored"), ("failed", "stored")],
)
def test_the_tier_of_a_request(tier: str, found: str) -> None:
    status = AdapterStatus("d", tier, 0, 0, 0, False, 0, 0, -1.0)  # type: ignore[arg-type]
    assert found_tier({"d": status}, "d") == found
    assert found_tier({}, "d") == "stored"


def test_ratios() -> None:
    traffic = TierTraffic()
    assert traffic.hit_ratio is None and traffic.summary()["hit_ratio"] is None
    for tier, ttft_s in (("hot", 0.004), ("hot", 0.006), ("warm", 0.02), ("stored", 0.3)):
        traffic.admitted(tier)
        traffic.answered(tier, ttft_s)
    assert (traffic.hit_ratio, traffic.cold_starts) == (0.5, 1)
    tiers = traffic.summary()["tiers"]
    assert tiers["hot"]["ttft_p95_s"] <= 0.0075 < tiers["warm"]["ttft_p95_s"]
    assert 0.25 < tiers["stored"]["ttft_p95_s"] <= 0.4


async def _requests(folder) -> None:
    async with InProcess(folder) as app:
        for model in ("upper", "upper", "upper", "acme/legal", "demo"):
            reply = await app.http.post(
                "/v1/chat/completions", json=BODY_HI | {"model": model, "max_tokens": 3}
            )
            assert reply.status_code == 200
        found = samples((await app.http.get("/metrics")).text)
        assert value(found, "mlora_tier_requests_total", tier="stored") == 2
        assert value(found, "mlora_tier_requests_total", tier="hot") == 2
        assert value(found, "mlora_tier_ttft_seconds_count", tier="hot") == 2
        assert value(found, "mlora_cold_starts_total") == 2
        assert value(found, "mlora_adapter_hit_ratio") == 0.5
        traffic = (await app.http.get("/v1/lora_adapters")).json()["traffic"]
        assert traffic["requests"] == 4, "a request of the base has no adapter to find"
        assert traffic["tiers"]["stored"]["ttft_p95_s"] > 0
        found = samples((await app.http.get("/metrics")).text)
        assert value(found, "mlora_waiting_sequences", reason="adapter_slot") == 2
        assert value(found, "mlora_wait_seconds_total", reason="adapter_slot") == 7.5
        assert value(found, "mlora_waiting_sequences", reason="place") == 0


def test_the_first_request_of_an_adapter_is_a_cold_start(tmp_path) -> None:
    asyncio.run(_requests(tmp_path))


def test_list_says_what_requests_found(server, http) -> None:
    runner = CliRunner()
    for _ in range(3):
        http.post("/v1/chat/completions", json=BODY_HI | {"model": "upper", "max_tokens": 2})
    shown = runner.invoke(mlora, ["list", "--url", server.url])
    assert shown.exit_code == 0, shown.output
    assert "with a hot adapter" in shown.output and "TTFT p95" in shown.output
    shown = runner.invoke(mlora, ["list", "--traffic", "--url", server.url])
    assert [line.split("\t")[0] for line in shown.output.splitlines()[:4]] == [
        "found", "hot", "warm", "stored",
    ]  # fmt: skip
    shown = runner.invoke(mlora, ["list", "--traffic", "--json", "--url", server.url])
    found = json.loads(shown.output)
    assert found["requests"] >= 3 and found["tiers"]["hot"]["requests"] >= 2
