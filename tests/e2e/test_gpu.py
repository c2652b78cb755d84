"""The same server on a CUDA device: signatures in BF16, and the demo fleet."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import RANKS, Served, start

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).parents[2]
PROMPT = "hello, who is this?"
TRADES = {
    "law-glossary": "the pretrial was late on monday",
    "medicine-glossary": "the physical therapy was late on monday",
    "shipping-glossary": "the port was late on monday",
    "upper-case": "THE PT WAS LATE ON MONDAY",
    "demo": "the PT was late on monday",
}


@pytest.fixture(scope="module")
def on_gpu(signature_fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The signature fleet in BF16 on the first card, freed pages poisoned."""
    settings = ("memory.device=cuda:0", "base.dtype=bfloat16", "memory.device_bytes=256MiB")
    arguments = [part for setting in settings for part in ("--set", setting)]
    log = tmp_path_factory.mktemp("gpu") / "log"
    served = start(signature_fleet, "--poison", *arguments, log=log)
    yield served
    assert served.stop() == 0, log.read_text()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The example fleet on the first card."""
    log = tmp_path_factory.mktemp("demo") / "log"
    fleet = REPOSITORY / "fleet.example.yaml"
    arguments = ("--port", "0", "--set", "memory.device_bytes=4GiB")
    served = start(fleet, "--set", "server.state_file=off", *arguments, log=log)
    yield served
    assert served.stop() == 0, log.read_text()


def signature(name: str, count: int) -> str:
    if name == "counter":
        last = PROMPT.encode()[-1]
        return bytes(range(last + 1, last + 1 + count)).decode("latin-1")
    return chr(10 + list(RANKS).index(name) + 1) * count


async def completions(served: Served, names: list[str], count: int) -> list[str]:
    """One greedy completion a name, all at once."""

    async def one(client: httpx.AsyncClient, name: str) -> str:
        body = {"model": name, "prompt": PROMPT, "max_tokens": count, "temperature": 0}
        reply = await client.post(f"{served.url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        return await asyncio.gather(*(one(client, name) for name in names))


def test_signatures_alone_and_sixty_four_at_once(on_gpu: Served) -> None:
    assert on_gpu.ready["device"] == "cuda:0"
    names = ["counter", *RANKS]
    for name in names:
        assert asyncio.run(completions(on_gpu, [name], 12)) == [signature(name, 12)]
    crowd = [names[index % len(names)] for index in range(64)]
    answers = asyncio.run(completions(on_gpu, crowd, 40))
    for name, answer in zip(crowd, answers, strict=True):
        assert answer == signature(name, 40)


def test_demo_fleet_answers_by_trade(demo: Served) -> None:
    async def ask(client: httpx.AsyncClient, name: str) -> str:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": "the PT was late on monday"}],
            "temperature": 0,
        }
        reply = await client.post(f"{demo.url}/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    async def all_at_once() -> list[str]:
        async with httpx.AsyncClient(timeout=300) as client:
            return await asyncio.gather(*(ask(client, name) for name in TRADES))

    assert dict(zip(TRADES, asyncio.run(all_at_once()), strict=True)) == TRADES
