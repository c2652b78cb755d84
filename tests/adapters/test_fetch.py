"""What fetching has in common, without a server: pauses, rates, hosts."""

from dataclasses import replace

import httpx
import pytest

from multilora_cli.adapters.source.fetch import FetchLimits, RateFloor, TransientError, Tries
from multilora_cli.adapters.source.http import Hosts, retry_after_s

LIMITS = FetchLimits(tries=3, backoff_s=0.01, total_s=30.0)


def test_f61_retry_after_is_honoured() -> None:
    """F61: waits as long as it is asked to, gives up where that is beyond the time allowed."""
    waits: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    tries = Tries(replace(LIMITS, tries=9), sleep=sleep, clock=lambda: now[0], jitter=lambda: 0.5)
    asked = iter([None, 2.0, 60.0])

    def attempt() -> None:
        raise TransientError("busy", retry_after_s=next(asked))

    with pytest.raises(TransientError):
        tries.run(attempt)
    assert waits == [0.01, 2.0]
    assert retry_after_s("7") == 7 and retry_after_s("Mon, 01 Jan 2001 00:00:00 GMT") == 0
    assert [retry_after_s(text) for text in (None, "", "soon", "-1", "9" * 40)] == [None] * 5


def test_f61_total_time_and_jitter() -> None:
    """F60, F61: whatever happens, no try starts after the total; waits differ by jitter."""
    for jitter, expected in ((0.0, 0.005), (0.999, 0.015)):
        waits: list[float] = []
        tries = Tries(LIMITS, sleep=waits.append, jitter=lambda value=jitter: value)

        def attempt() -> None:
            raise TransientError("no")

        with pytest.raises(TransientError):
            tries.run(attempt)
        assert waits[0] == pytest.approx(expected, rel=0.01) and len(waits) == LIMITS.tries - 1
    clock = iter([0.0, *[100.0] * 9])
    with pytest.raises(TransientError):
        Tries(LIMITS, sleep=waits.append, clock=lambda: next(clock)).run(attempt)
    assert len(waits) == LIMITS.tries - 1  # no more were added


def test_f63_rate_floor() -> None:
    """F63: measured over whole windows, so that a pause in a fast transfer is no failure."""
    now = [0.0]
    floor = RateFloor(FetchLimits(stall_s=10, floor_bytes_per_s=100), clock=lambda: now[0])
    for moment, num_bytes in ((1, 1500), (11, 0), (20, 100), (22, 1500), (33, 1200)):
        now[0] = moment
        floor.count(num_bytes)
    now[0] = 44
    with pytest.raises(TransientError, match="too slow: 9 bytes/s over 11 s"):
        floor.count(100)


def test_f67_declared_hosts() -> None:
    """F67: where the Hub keeps large files is declared; only https on the default port."""
    hosts = Hosts("https://hub.acme.test", ("hf.co",))
    for url, allowed in {
        "https://cas-bridge.xethub.hf.co/x": True,
        "https://hf.co/x": True,
        "https://HF.CO/x": True,
        "https://hub.acme.test/x": True,
        "https://hub.acme.test:443/x": True,
        "http://hub.acme.test/x": False,
        "https://hub.acme.test:8443/x": False,
        "http://cdn.hf.co/x": False,
        "https://evilhf.co/x": False,
        "https://hf.co@evil.test/x": False,
        "https://hf.co.evil.test/x": False,
    }.items():
        assert hosts.allows(httpx.URL(url)) is allowed, url
    assert not hosts.is_endpoint(httpx.URL("https://cdn.hf.co/x"))  # no token there
