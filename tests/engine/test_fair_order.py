"""Shares take turns: what tenants are served, whoever sends more. No torch."""

from collections import Counter

import pytest

from multilora_cli.engine.fair_order import FairBy
from multilora_cli.engine.messages import Abort
from tests.engine.bookkeeping_kit import Books, FakeVersion
from tests.engine.scheduler_rig import Rig

PLACES = 4


class _Market:
    """Tenants that compete for four places; `served` is in prices: 1 a prompt token, 2 an output
    token, divided by the tenant's weight."""

    def __init__(self, by: FairBy = "tenant", **weights: float) -> None:
        self.rig = Rig(
            books=Books(num_pages=400),
            max_num_seqs=PLACES,
            max_num_batched_tokens=256,
            fair_by=by,
        )
        self.weights = weights
        self.served: Counter[str] = Counter()
        self.tenant: dict[int, str] = {}
        self.prompt: dict[int, int] = {}
        self.began: list[int] = []

    def send(self, tenant: str, prompt: int, output: int, most: int | None = None) -> int:
        """A request that ends after `output` tokens, although it may have `most`."""
        request = self.rig.submit(
            [3] * prompt, tenant=tenant, weight=self.weights.get(tenant, 1.0),
            max_tokens=output if most is None else most,
        )  # fmt: skip
        self.tenant[request] = tenant
        self.prompt[request] = prompt
        return request

    def step(self) -> list[int]:
        """One step; the requests that ended."""
        ends = []
        for delta in self.rig.step():
            request = delta.request_id
            price = 2 * len(delta.token_ids)
            if request not in self.began:
                self.began.append(request)
                price += self.prompt[request]
            tenant = self.tenant[request]
            self.served[tenant] += price / self.weights.get(tenant, 1.0)
            if delta.finish_reason is not None:
                ends.append(request)
        return ends

    def waits(self, tenant: str) -> bool:
        """Whether the tenant has a request that has not begun."""
        began = set(self.began)
        return any(t == tenant and r not in began for r, t in self.tenant.items())


def _gap(market: _Market, lengths: dict[str, tuple[int, int]], steps: int) -> float:
    """The largest difference in service while every tenant always has requests that wait.

    The first tenant sends all it has at once, the others keep a few waiting.
    """
    first, *others = lengths
    for _ in range(300):
        market.send(first, *lengths[first])
    for tenant in others:
        for _ in range(8):
            market.send(tenant, *lengths[tenant])
    gap = 0.0
    for _ in range(steps):
        for request in market.step():
            tenant = market.tenant[request]
            if tenant in others:
                market.send(tenant, *lengths[tenant])
        assert all(market.waits(tenant) for tenant in lengths), "not backlogged any more"
        gap = max(gap, max(market.served.values()) - min(market.served.get(t, 0) for t in lengths))
    return gap


@pytest.mark.parametrize(
    ("lengths", "weights"),
    [
        ({"a": (20, 30), "b": (20, 30)}, {}),
        ({"a": (100, 10), "b": (5, 40)}, {}),
        ({"a": (10, 40), "b": (100, 4)}, {}),
        ({"a": (20, 30), "b": (20, 30)}, {"a": 1.0, "b": 3.0}),
        ({"a": (10, 8), "b": (10, 60)}, {"a": 2.0, "b": 0.5}),
        ({"a": (10, 20), "b": (10, 20), "c": (60, 5)}, {}),
    ],
)
def test_service_of_backlogged_tenants_stays_within_the_bound(
    lengths: dict[str, tuple[int, int]], weights: dict[str, float]
) -> None:
    """Virtual token counters promise 2 x max(largest prompt, tokens of a batch); half is kept."""
    dearest = max(
        (prompt + 2 * output) / weights.get(tenant, 1.0)
        for tenant, (prompt, output) in lengths.items()
    )
    assert _gap(_Market(**weights), lengths, 400) <= PLACES * dearest


def test_without_fairness_the_one_who_sends_more_gets_more() -> None:
    """The bound above means something: arrival order breaks it many times over."""
    gap = _gap(_Market("none"), {"a": (20, 30), "b": (20, 30)}, 400)
    assert gap > 3 * PLACES * (20 + 2 * 30)


def test_answers_shorter_than_allowed_are_charged_as_they_were() -> None:
    """b may have 200 tokens and is stopped at 6; a has 6 and means it."""
    market = _Market()
    for _ in range(150):
        market.send("a", 10, 6)
        market.send("b", 10, 6, most=200)
    gap = 0.0
    tokens: Counter[int] = Counter()
    for _ in range(250):
        for delta in market.rig.engine.parts.scheduler.sequences():
            tokens[delta.request_id] = delta.num_outputs
        for request, count in list(tokens.items()):
            if market.tenant[request] == "b" and count >= 6:
                market.rig.engine.handle(Abort(request))
                del tokens[request]
        market.step()
        if market.waits("a") and market.waits("b"):
            gap = max(gap, abs(market.served["a"] - market.served["b"]))
    # The first answers of b are charged the first guess of 128 tokens until they end.
    assert gap <= 2 * PLACES * (10 + 2 * 128)
    assert market.served["b"] > 0.6 * market.served["a"]


def test_an_idle_tenant_saves_nothing_up() -> None:
    market = _Market()
    for _ in range(200):
        market.send("a", 20, 30)
    for _ in range(300):
        market.step()
    for _ in range(100):
        market.send("b", 20, 30)
    before = market.served.copy()
    for _ in range(200):
        market.step()
    gained = market.served - before
    assert abs(gained["a"] - gained["b"]) <= PLACES * (20 + 60)


def test_a_first_request_passes_a_flood() -> None:
    """Ten tenants, one with 300 waiting: nobody else waits for more than the next free places."""
    market = _Market()
    for _ in range(300):
        market.send("flood", 20, 30)
    for _ in range(50):
        market.step()
    victims = [market.send(f"v{i}", 20, 5) for i in range(9)]
    began = len(market.began)
    while not set(victims) <= set(market.began):
        market.step()
    between = market.began[began:]
    assert sum(market.tenant[request] == "flood" for request in between) <= 3, between


def test_shares_by_adapter() -> None:
    """A stream of a popular adapter does not push a rare one back."""
    popular, rare = FakeVersion("popular", 1), FakeVersion("rare", 1)
    rig = Rig(books=Books(num_pages=200), max_num_seqs=PLACES, fair_by="adapter")
    for _ in range(100):
        rig.submit([3] * 20, popular, max_tokens=20)
    for _ in range(60):
        rig.books.loaders.run_one(rig.random)
        rig.step()
    late = rig.submit([3] * 20, rare, max_tokens=3)
    steps = 0
    while (late, 0) not in rig.ends:
        rig.books.loaders.run_one(rig.random)
        rig.step()
        steps += 1
    assert steps < 40, "one answer of 20 steps, a load and its own"
    rig.finish()
