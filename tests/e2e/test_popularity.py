"""Many registered adapters under Zipf traffic: right answers, and what `mlora list` says of it."""

import asyncio
import json
import random
import re
import subprocess
import sys
from bisect import bisect
from itertools import accumulate
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import start
from tests.signature import signature_adapter, signature_base

FIRST, LAST = 33, 125  # printable signatures


def _fleet(folder: Path, count: int) -> list[tuple[str, str]]:
    """A fleet of `count` adapters, each of a content of its own; (name, what it says)."""
    signature_base(folder / "base")
    adapters = []
    for index in range(count):
        signature = FIRST + index % (LAST - FIRST)
        rank = 1 + index // (LAST - FIRST)
        name = f"t{index:04d}"
        signature_adapter(folder / "adapters" / name, signature, r=rank)
        adapters.append((name, chr(signature + 1)))
    (folder / "fleet.yaml").write_text(
        "base: {model: ./base, name: counter, dtype: float32}\n"
        "memory: {device: cpu, device_bytes: 12MiB, host_adapters: 6MiB, kv_reserve: 0.5}\n"
        "limits: {max_num_seqs: 32, max_num_batched_tokens: 256}\n"
        "adapters: [{folder: ./adapters/*}]\n"
        "server: {port: 0, state_file: off}\n"
    )
    return adapters


async def _traffic(url: str, adapters: list[tuple[str, str]], count: int) -> int:
    """Zipf 1.0 from 16 clients; how many answers were wrong."""
    choose = random.Random(count)
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(adapters))))
    wanted = [adapters[bisect(weights, choose.random() * weights[-1])] for _ in range(count)]
    wrong = 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal wrong
        while wanted:
            name, text = wanted.pop()
            body = {"model": name, "prompt": "abcdefghijklmnopqrst", "max_tokens": 2}
            reply = await http.post("/v1/completions", json=body | {"temperature": 0})
            assert reply.status_code == 200, reply.text
            wrong += reply.json()["choices"][0]["text"] != text * 2

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await asyncio.gather(*(client(http) for _ in range(16)))
    return wrong


@pytest.mark.parametrize(
    ("registered", "requests"),
    [
        (60, 300),
        pytest.param(2000, 6000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_zipf(
    tmp_path: Path, registered: int, requests: int, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = _fleet(tmp_path, registered)
    served = start(tmp_path / "fleet.yaml", log=tmp_path / "log")
    try:
        assert served.ready["adapters"] == registered
        assert asyncio.run(_traffic(served.url, adapters, requests)) == 0
        command = [sys.executable, "-m", "multilora_cli", "list", "--traffic"]
        ran = subprocess.run([*command, "--url", served.url], capture_output=True, text=True)
        found = json.loads(
            subprocess.run(
                [*command, "--json", "--url", served.url], capture_output=True, text=True
            ).stdout
        )
        metrics = served.metrics()
    finally:
        served.close()
    with capsys.disabled():
        print(f"\n{registered} adapters:\n{ran.stdout}{ran.stderr}")
    assert found["requests"] == requests
    assert sum(row["requests"] for row in found["tiers"].values()) == requests
    assert 0 < found["cold_starts"] < requests and 0.2 < found["hit_ratio"] < 1
    for tier, row in found["tiers"].items():
        counted = re.search(rf'^mlora_tier_requests_total{{tier="{tier}"}} (\S+)$', metrics, re.M)
        assert counted is not None and float(counted[1]) == row["requests"]
    assert f"{requests:,} requests" in ran.stderr and "TTFT p95 hot" in ran.stderr
    assert "mlora_adapter_hit_ratio" in metrics and "mlora_cold_starts_total" in metrics
