"""Every door gives each adapter's own answer, alone and in company."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI

from tests.e2e.serving import RANKS, Served

PROMPT = "hello, who is this?"


def expected(name: str, count: int) -> str:
    """What `name` must say: its own byte repeated; the base counts up from the last byte."""
    if name == "counter":
        last = PROMPT.encode()[-1]
        return bytes(range(last + 1, last + 1 + count)).decode("latin-1")
    return chr(10 + list(RANKS).index(name) + 1) * count


def complete(served: Served, name: str, prompt: str = PROMPT, **extra: Any) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0, **extra}
    reply = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("name", ["counter", *RANKS])
def test_each_adapter_alone(shared: Served, name: str) -> None:
    """A-OUT-06 and F2 deepened: all tiles, layers and pages are at work in every step."""
    assert complete(shared, name) == expected(name, 12)


def test_sixty_four_streams_over_all_adapters_answer_as_each_alone(shared: Served) -> None:
    """A-OUT-04, A-OUT-05, A-PERF-06: nothing outside a request decides its adapter."""
    names = ["counter", *RANKS]

    async def stream(client: AsyncOpenAI, index: int) -> tuple[str, str]:
        name = names[index % len(names)]
        await asyncio.sleep(0.002 * index)
        text = ""
        chunks = await client.completions.create(
            model=name, prompt=PROMPT, max_tokens=40, temperature=0, stream=True
        )
        async for chunk in chunks:
            text += chunk.choices[0].text
            assert chunk.model == name
        return name, text

    async def run() -> list[tuple[str, str]]:
        async with AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="-", timeout=300) as client:
            return await asyncio.gather(*(stream(client, i) for i in range(64)))

    for name, text in asyncio.run(run()):
        assert text == expected(name, 40)


def test_prefix_cache_never_crosses_adapters(shared: Served) -> None:
    """A-OUT-01: the same long prompt for A, then B, then the base, then A again."""
    prompt = "system: " + "the same words for everybody, " * 4 + PROMPT
    for name in ("r16", "r64", "counter", "r16"):
        assert complete(shared, name, prompt=prompt) == expected(name, 12)


def test_six_doors_one_result(shared: Served) -> None:
    """A-OUT-12: chat and completions, streamed and not, and `mlora chat`."""
    name = "r24"
    answer = expected(name, 8)
    client = OpenAI(base_url=f"{shared.url}/v1", api_key="-", timeout=120)
    messages: Any = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(
        model=name, messages=messages, max_completion_tokens=8, temperature=0
    )
    assert chat.choices[0].message.content == answer
    chunks = client.chat.completions.create(
        model=name, messages=messages, max_completion_tokens=8, temperature=0, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer
    for field in ("lora_path", "adapter_id"):
        assert complete(shared, "counter", **{field: name})[:8] == answer
    for model in (f"counter:{name}", f"counter::{name}"):
        assert complete(shared, model)[:8] == answer
    command = [sys.executable, "-m", "multilora_cli", "chat", "-a", name, "--url", shared.url]
    ran = subprocess.run(
        [*command, "--max-tokens", "8", "--json"],
        input=PROMPT + "\n", capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(ran.stdout) == {"model": name, "content": answer}


def test_unknown_names_are_404_and_never_the_base(shared: Served) -> None:
    """A-API-03, A-OUT-12: at the API and at the command line."""
    client = OpenAI(base_url=f"{shared.url}/v1", api_key="-", max_retries=0)
    with pytest.raises(NotFoundError):
        client.completions.create(model="nobody", prompt=PROMPT, max_tokens=1)
    command = [sys.executable, "-m", "multilora_cli", "chat", "-a", "nobody", "--url", shared.url]
    ran = subprocess.run(command, input="x\n", capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "nobody" in ran.stderr and "Traceback" not in ran.stderr


def test_list_shows_every_adapter(shared: Served) -> None:
    command = [sys.executable, "-m", "multilora_cli", "list", "--url", shared.url, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rows = {row["id"]: row for row in json.loads(ran.stdout)}
    assert {name: rows[name]["rank"] for name in RANKS} == RANKS
