"""Adapters come and go while the server runs; nobody ever gets another version's answer."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Served
from tests.e2e.test_answers import PROMPT, complete, expected
from tests.signature import deep_adapter


def load(served: Served, name: str, path: Path, **extra: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **extra}
    return httpx.post(f"{served.url}/v1/load_lora_adapter", json=body, timeout=120)


def test_load_answer_unload(served: Served) -> None:
    """A-RUN-05, A-API-06: vLLM's replies; unload gives pages and host bytes back."""
    spare = served.fleet.parent / "spare" / "other"
    reply = load(served, "acme/legal", spare)
    assert (reply.status_code, reply.text) == (
        200, "Success: LoRA adapter 'acme/legal' added successfully.",
    )  # fmt: skip
    assert complete(served, "acme/legal") == chr(91) * 12
    assert served.adapters()["acme/legal"]["pages"] > 0  # type: ignore[operator]
    assert load(served, "acme/legal", served.fleet.parent / "adapters" / "r4").status_code == 400
    body = {"lora_name": "acme/legal"}
    reply = httpx.post(f"{served.url}/v1/unload_lora_adapter", json=body, timeout=60)
    assert reply.text == "Success: LoRA adapter 'acme/legal' removed successfully."
    assert "acme/legal" not in served.adapters()
    again = httpx.post(f"{served.url}/v1/unload_lora_adapter", json=body, timeout=60)
    assert again.status_code == 404


@pytest.mark.parametrize(
    ("turns", "clients"),
    [(12, 8), pytest.param(200, 50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_replacing_in_place_under_load_never_mixes_versions(
    served: Served, turns: int, clients: int
) -> None:
    """A-OUT-02, A-OUT-03, F33: every answer is wholly one version, the prefix cache included."""
    folders = [
        deep_adapter(served.fleet.parent / "spare" / f"v{k}", 30 + k, r=16) for k in range(4)
    ]
    assert load(served, "tenant", folders[0]).status_code == 200
    stop = asyncio.Event()
    answers: list[str] = []
    url = f"{served.url}/v1/completions"
    prompt = "a prompt of more than one page, so that the prefix cache takes part. " + PROMPT
    body = {"model": "tenant", "prompt": prompt, "max_tokens": 24, "temperature": 0}

    async def ask(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            reply = await client.post(url, json=body)
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["choices"][0]["text"])

    async def replace(client: httpx.AsyncClient) -> None:
        for turn in range(turns):
            path = str(folders[turn % 4])
            reply = await client.post(
                f"{served.url}/v1/load_lora_adapter",
                json={"lora_name": "tenant", "lora_path": path, "load_inplace": True},
            )
            assert reply.status_code == 200, reply.text
            # The first answer after the reply is the new version's.
            after = await client.post(url, json={**body, "max_tokens": 2})
            assert after.json()["choices"][0]["text"] == chr(31 + turn % 4) * 2
        stop.set()

    async def run() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            await asyncio.gather(replace(client), *(ask(client) for _ in range(clients)))

    asyncio.run(run())
    assert len(answers) >= clients
    assert set(answers) <= {chr(31 + k) * 24 for k in range(4)}


def test_a_bad_adapter_harms_nobody(served: Served, tmp_path: Path) -> None:
    """A-RUN-01, A-RUN-02: each refused by name; others answer as before."""
    empty = served.fleet.parent / "spare" / "empty"
    empty.mkdir(exist_ok=True)
    cut = deep_adapter(served.fleet.parent / "spare" / "cut", 50, r=8)
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    for path in (empty, cut, served.fleet.parent / "nowhere", Path("/etc")):
        reply = load(served, "bad", path)
        assert reply.status_code in (400, 404), reply.text
        assert "bad" not in served.adapters()
        assert complete(served, "r8") == expected("r8", 12)
