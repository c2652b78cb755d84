"""`mlora warm` and `mlora evict` on a running server: tiers, pins, globs, what is freed."""

import json
import subprocess
import sys
from typing import Any

import httpx

from tests.e2e.serving import RANKS, Served
from tests.e2e.test_answers import complete, expected


def mlora(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "multilora_cli", *arguments, "--url", served.url, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def moved(served: Served, *arguments: str) -> list[dict[str, Any]]:
    ran = mlora(served, *arguments)
    assert ran.returncode == 0, ran.stderr
    rows: list[dict[str, Any]] = json.loads(ran.stdout)
    return rows


def test_up_and_down_the_ladder(served: Served) -> None:
    """A-RUN-05, A-PERF-05: warm really moves, evict really frees, answers stay right."""
    assert served.adapters()["r16"]["tier"] == "cold"
    (row,) = moved(served, "warm", "r16")
    assert (row["tier"], row["pages"]) == ("warm", 0)
    (row,) = moved(served, "warm", "r16", "--hot", "--pin")
    assert row["tier"] == "hot" and row["pages"] > 0 and row["pinned"]
    refused = mlora(served, "evict", "r16")
    assert refused.returncode != 0 and "pinned" in refused.stderr
    assert complete(served, "r16") == expected("r16", 12)
    (row,) = moved(served, "evict", "r16", "--unpin", "--cold")
    assert row["tier"] == "stored" and row["freed_pages"] > 0 and row["freed_host_bytes"] > 0
    assert served.adapters()["r16"]["host_bytes"] == 0
    assert complete(served, "r16") == expected("r16", 12)


def test_globs_and_unknown_names(served: Served) -> None:
    rows = moved(served, "warm", "r*", "--hot")
    assert {row["id"] for row in rows} == set(RANKS)
    assert {row["tier"] for row in rows} == {"hot"}
    rows = moved(served, "evict", "r1*")
    assert {row["id"]: row["tier"] for row in rows} == {"r12": "warm", "r16": "warm"}
    unknown = mlora(served, "warm", "nobody")
    assert unknown.returncode == 2 and "nobody" in unknown.stderr
    reply = httpx.post(f"{served.url}/v1/adapters/nobody/warm", json={}, timeout=30)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_evicting_under_load_lets_running_requests_end(served: Served) -> None:
    """A-RUN-04: the running request keeps its version; the reply comes when pages are free."""
    import threading

    answers: list[str] = []
    thread = threading.Thread(
        target=lambda: answers.append(complete(served, "r32", max_tokens=200))
    )
    thread.start()
    while not served.adapters()["r32"]["in_flight"] and thread.is_alive():
        pass
    (row,) = moved(served, "evict", "r32", "--cold")
    thread.join(120)
    assert answers == [expected("r32", 200)]
    assert row["tier"] == "stored" and row["freed_pages"] > 0
