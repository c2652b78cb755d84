"""Ten thousand adapters: what is told about all of them leaves the event loop to everybody else,
and a scrape looks at those alone that it shows."""

import asyncio
import gc
import random
import time
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from multilora_cli.adapters.entry import AdapterEntry, AdapterRequest
from multilora_cli.engine.messages import AdapterStatus, Query, Reply
from multilora_cli.server import long_replies
from multilora_cli.server.buckets import Buckets
from multilora_cli.server.families import counter, counters, gauge, gauges, histogram, labelled
from multilora_cli.server.statuses import Statuses
from multilora_cli.server.upkeep import Upkeep
from tests.fakes import Behaviour
from tests.server.conftest import InProcess

MANY = 3000


def status(number: int, tier: str = "warm", pinned: bool = False) -> AdapterStatus:
    return AdapterStatus(f"{number:064x}", tier, 3, 9, 0, pinned, 1, 1, 0.0)  # type: ignore[arg-type]


def register(app: InProcess, count: int) -> None:
    for index in range(count):
        told = status(index, ("hot", "warm", "stored")[index % 3], pinned=index < 5)
        request = AdapterRequest(f"tenant-{index}/adapter", f"/srv/{index}")
        entry = AdapterEntry(request, request.source, index, 0.0, digest=told.digest, rank=8)
        app.registry._entries.put(entry)
        app.client.statuses[told.digest] = told
    app.client.query = lambda *_: asyncio.sleep(0)


def long_ago(app: InProcess) -> None:
    """Every name was used, but not lately."""
    used_s = time.monotonic() - 100
    app.front.adapters.names._used = dict.fromkeys(
        (entry.name for entry in app.registry.entries()), used_s
    )


class Turns:
    """Counts how often the loop came round while something else ran."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1


async def _answer(app: InProcess, path: str) -> tuple[bytes, int]:
    """The body of a reply, without httpx, and how many turns others had meanwhile."""
    sent: list[bytes] = []
    headers = {}

    async def send(message) -> None:
        sent.append(message.get("body", b""))
        headers.update(message.get("headers", ()))

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
             "headers": [(b"host", b"127.0.0.1")], "query_string": b"", "root_path": "",
             "http_version": "1.1", "scheme": "http"}  # fmt: skip
    turns = Turns()
    others = asyncio.create_task(turns.run())
    await app.app(scope, receive, send)
    others.cancel()
    body = b"".join(sent)
    assert int(headers[b"content-length"]) == len(body)
    return body, turns.count


@pytest.mark.parametrize("path", ["/v1/models", "/v1/lora_adapters"])
def test_what_is_told_about_all_adapters_is_made_in_turns(tmp_path, monkeypatch, path) -> None:
    """With no time at all to a turn, others come on after every 32 adapters."""
    monkeypatch.setattr(long_replies, "TURN_S", -1.0)

    async def main() -> None:
        async with InProcess(tmp_path, names=()) as app:
            register(app, MANY)
            body, turns = await _answer(app, path)
            assert turns >= MANY // 32
            rows = msgspec.json.decode(body)["data"]
            names = [row["id"] for row in rows if row["id"] != "demo"]
            assert names == [f"tenant-{index}/adapter" for index in range(MANY)]

    asyncio.run(main())


def test_what_is_done_by_itself_is_done_in_turns(tmp_path, monkeypatch) -> None:
    """A look at every time to live once a second, and at every name where room is needed."""
    monkeypatch.setattr(long_replies, "TURN_S", -1.0)

    async def turns_of(work) -> int:
        turns = Turns()
        others = asyncio.create_task(turns.run())
        await work()
        others.cancel()
        return turns.count

    async def main() -> None:
        async with InProcess(tmp_path, names=()) as app:
            register(app, MANY)
            for entry in app.registry.entries():
                request = replace(entry.request, via="pattern", ttl=1e6)
                app.registry._entries.put(replace(entry, request=request))
            assert app.registry.num_resolved == MANY
            adapters = app.front.adapters
            assert await turns_of(Upkeep(adapters).tick) >= MANY - 1
            long_ago(app)
            adapters.names.touch("tenant-7/adapter")
            freed = []
            adapters.background = lambda work: freed.append(work.close())
            assert await turns_of(adapters._forget_idle) >= MANY - 1
            assert len(freed) == 64 and app.registry.num_resolved == MANY - 64
            assert app.registry.get("tenant-7/adapter") is not None
            app.registry._entries.check_integrity()

    asyncio.run(main())


def test_a_name_that_is_used_while_others_are_looked_at_stays(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(long_replies, "TURN_S", -1.0)

    async def main() -> None:
        async with InProcess(tmp_path, names=()) as app:
            register(app, 8)
            for entry in app.registry.entries():
                app.registry._entries.put(
                    replace(entry, request=replace(entry.request, via="pattern"))
                )
            adapters = app.front.adapters
            adapters.background = lambda work: work.close()
            long_ago(app)
            forgetting = asyncio.create_task(adapters._forget_idle())
            while not forgetting.done():
                adapters.names.touch("tenant-0/adapter")
                await asyncio.sleep(0)
            assert [entry.name for entry in app.registry.entries()] == ["tenant-0/adapter"]

    asyncio.run(main())


def test_what_stands_when_the_server_is_ready_is_not_collected_any_more(server) -> None:
    """A walk of the collector over ten thousand adapters kept all streams waiting for 70 ms."""
    assert server.url and gc.get_freeze_count() > 1000
    assert not gc.is_tracked(status(1))


def test_the_listing_of_none_and_of_held_versions(tmp_path) -> None:
    async def main() -> None:
        async with InProcess(tmp_path, names=()) as app:
            empty = msgspec.json.decode((await _answer(app, "/v1/lora_adapters"))[0])
            assert (empty["data"], empty["generations"], empty["resident_bytes"]) == ([], [], 0)
            register(app, 9)
            retired = status(99, "hot")
            app.client.statuses[retired.digest] = retired
            told = msgspec.json.decode((await _answer(app, "/v1/lora_adapters"))[0])
            assert (told["resident_generations"], told["retired_generations"]) == (7, 1)
            assert told["resident_bytes"] == 7 * 9
            (row,) = [row for row in told["generations"] if row["retired"]]
            assert row["digest"].endswith(retired.digest) and row["aliases"] == []

    asyncio.run(main())


def test_a_scrape_looks_at_those_that_it_shows(tmp_path, monkeypatch) -> None:
    """100 busiest and 5 pinned ones of 3,000; all of them were walked three times."""
    looks: Counter[str] = Counter()

    async def main() -> None:
        async with InProcess(tmp_path, names=()) as app:
            register(app, MANY)
            for index in range(MANY - 200, MANY):
                app.front.metrics.meter(f"tenant-{index}/adapter", 5).tokens(1)
            get = Statuses.__getitem__

            def counted(self, digest):
                looks["status"] += 1
                return get(self, digest)

            def refused(*_):
                raise AssertionError("a scrape walks all adapters")

            with monkeypatch.context() as patch:
                patch.setattr(Statuses, "__getitem__", counted)
                patch.setattr(Statuses, "__iter__", refused)
                patch.setattr(app.registry, "entries", refused)
                text = (await _answer(app, "/metrics"))[0].decode()
            assert 100 <= looks["status"] <= 300
            found = {
                (sample.name, sample.labels.get("tier"), sample.labels.get("adapter_name")): sample
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            for tier in ("hot", "warm", "stored"):
                assert found["mlora_adapters", tier, None].value == MANY // 3
            assert found["vllm:num_cpu_loaded_lora_adapters", None, None].value == MANY // 3
            loaded = [key[2] for key in found if key[0] == "vllm:lora_adapter_loaded"]
            assert len(loaded) == sum(1 for i in range(MANY - 200, MANY - 100) if i % 3 < 2)

    asyncio.run(main())


def test_two_names_of_one_content_both_have_their_series(tmp_path) -> None:
    async def main() -> None:
        async with InProcess(tmp_path, names=()) as app:
            register(app, 1)
            twin = AdapterRequest("twin", "/srv/0")
            digest = status(0).digest
            app.registry._entries.put(AdapterEntry(twin, "/srv/0", 2, 0.0, digest=digest))
            for name in ("twin", "tenant-0/adapter"):
                app.front.metrics.meter(name, 5)
            text = (await _answer(app, "/metrics"))[0].decode()
            for name in ("twin", "tenant-0/adapter"):
                assert f'mlora_adapter_pages{{adapter="{name}"}} 3.0\n' in text

    asyncio.run(main())


def test_statuses_count_what_they_hold() -> None:
    choose, statuses, plain = random.Random(3), Statuses(), {}
    for _ in range(3000):
        number = choose.randrange(40)
        if choose.random() < 0.3:
            digest = status(number).digest
            assert (statuses.pop(digest, None) is None) == (plain.pop(digest, None) is None)
        else:
            tier = choose.choice(("cold", "stored", "warm", "hot", "failed"))
            told = status(number, tier, choose.random() < 0.3)
            statuses[told.digest] = plain[told.digest] = told
        if choose.random() < 0.01:
            statuses.clear()
            plain.clear()
        assert dict(statuses) == plain and len(statuses) == len(plain)
        assert +statuses.tiers == Counter(each.tier for each in plain.values())
        held = {each.digest for each in plain.values() if each.tier in ("warm", "hot")}
        assert {each.digest for each in statuses.held} == held
        assert {e.digest for e in statuses.pinned} == {d for d, e in plain.items() if e.pinned}


def test_what_changed_counts_even_if_nobody_waits_for_the_answer_any_more(tmp_path) -> None:
    """An engine says once what changed: an answer that comes late must not be lost."""

    async def main() -> None:
        async with InProcess(tmp_path, Behaviour(silent=True)) as app:
            client, number = app.client, 7
            send, client._send = client._send, lambda message: None
            await client.query(0.01)  # is not answered in time
            snapshot = (await asyncio.wait_for(_snapshot(client, send), 5)).snapshot
            late = msgspec.structs.replace(snapshot, adapters=[status(number, "hot")])
            client._receive(Reply(10**6, snapshot=late))
            assert client.statuses[status(number).digest].tier == "hot"
            gone = msgspec.structs.replace(snapshot, adapters=[], gone=[status(number).digest])
            client._receive(Reply(10**6, snapshot=gone))
            assert status(number).digest not in client.statuses

    async def _snapshot(client, send):
        client._calls[10**7] = answer = asyncio.get_running_loop().create_future()
        send(Query(10**7))
        return await answer

    asyncio.run(main())


def _parsed(text: str):
    return [
        (family.name, family.type, family.documentation, sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in sorted(family.samples, key=lambda s: (s.name, sorted(s.labels.items())))
    ]


def test_the_text_says_what_the_library_would() -> None:
    """prometheus_client is the oracle: its text of the same values reads the same."""
    choose = random.Random(5)
    buckets = Buckets((0.005, 1, 2.5, 1e3))
    for _ in range(500):
        buckets.observe(choose.expovariate(0.5))
    values = {"plain": 3, 'with "quotes", \\ and\nlines': 1.5e-7, "large": 123456789.25}
    ours = [
        counter("requests", "How many.", 7),
        gauge("now", "When.", 1796096819.721979, {"model": "a", "engine": "0"}),
        counters("by_one", "By one.", "who", values),
        gauges("gauges", "By one.", "who", values),
        labelled("rows", "gauge", "Rows.", [({"b": "2", "a": "1"}, 4), ({"b": "", "a": "x"}, 0)]),
        histogram("seconds", "Seconds.", [({}, buckets)]),
        histogram("times", "Times.", [({"who": who}, buckets) for who in values]),
    ]
    rows = [*zip(("0.005", "1", "2.5", "1000.0", "+Inf"), _running(buckets.counts), strict=True)]
    library = [
        CounterMetricFamily("requests", "How many.", 7),
        GaugeMetricFamily("now", "When.", labels=("model", "engine")),
        CounterMetricFamily("by_one", "By one.", labels=("who",)),
        GaugeMetricFamily("gauges", "By one.", labels=("who",)),
        GaugeMetricFamily("rows", "Rows.", labels=("b", "a")),
        HistogramMetricFamily("seconds", "Seconds.", buckets=rows, sum_value=buckets.total),
        HistogramMetricFamily("times", "Times.", labels=("who",)),
    ]
    library[1].add_metric(("a", "0"), 1796096819.721979)
    for who, value in values.items():
        library[2].add_metric((who,), value)
        library[3].add_metric((who,), value)
        library[6].add_metric((who,), rows, buckets.total)
    library[4].add_metric(("2", "1"), 4)
    library[4].add_metric(("", "x"), 0)

    class Collected:
        def collect(self):
            return library

    registry = CollectorRegistry()
    registry.register(Collected())
    assert _parsed("".join(ours)) == _parsed(generate_latest(registry).decode())


def _running(counts):
    total = 0
    for count in counts:
        total += count
        yield float(total)
