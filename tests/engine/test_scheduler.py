"""The scheduler under random traffic, against a model of what lies in every page. No torch."""

import random
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest

from multilora_cli.adapters.lease import Version
from multilora_cli.engine.batch_plan import RowResult, Sampled, ScheduledBatch, ScheduledRow
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.engine import Engine, EngineParts
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.messages import Abort, Delta, EvictAdapter, Ready, SamplingParams, Submit
from multilora_cli.engine.scheduler import Limits, Scheduler
from multilora_cli.engine.sequence import Sequence
from multilora_cli.memory.page_pool import PageUse
from tests.engine.bookkeeping_kit import Books, FakeVersion

VERSIONS = [FakeVersion(f"d{i}", pages) for i, pages in enumerate((1, 2, 3, 5, 8))]
VOCAB = 50


@dataclass
class LateFence:
    """A step that ends after it was asked for some times."""

    left: int

    def done(self) -> bool:
        """Whether it was asked often enough."""
        self.left -= 1
        return self.left < 0


class PageModel:
    """Runs batches on a model of the pool: every token's place knows all that led to it."""

    def __init__(self, books: Books, limits: Limits, choose: random.Random) -> None:
        self.books = books
        self.limits = limits
        self.choose = choose
        self.content: dict[int, int] = {}  # page * 16 + offset -> hash of owner and tokens so far
        self.faults = 0.0
        self.prompt_tokens: Counter[int] = Counter()
        self.batches: list[ScheduledBatch] = []

    def forget(self, pages: Items[int]) -> None:
        """Pages that were given back."""
        for page in pages:
            for offset in range(16):
                self.content.pop(page * 16 + offset, None)

    def run(self, batch: ScheduledBatch) -> tuple[RowResult, ...]:
        """Check the decision, then write and sample."""
        self.batches.append(batch)
        assert batch.num_tokens <= self.limits.max_num_batched_tokens
        assert len(batch.rows) <= self.limits.max_num_seqs
        assert batch.num_adapters <= self.limits.max_adapters
        assert [r.length > 1 for r in batch.rows] == sorted(r.length > 1 for r in batch.rows)
        assert len({row.sequence.seq_id for row in batch.rows}) == len(batch.rows)
        for source, target in batch.copies:
            for offset in range(16):
                if source * 16 + offset in self.content:
                    self.content[target * 16 + offset] = self.content[source * 16 + offset]
        self._check_writes(batch)
        return tuple(self._row(row) for row in batch.rows)

    def fence(self) -> LateFence:
        """Steps end one or two turns late, as on a device."""
        return LateFence(self.choose.randrange(3))

    def _check_writes(self, batch: ScheduledBatch) -> None:
        """A page that is written belongs to one row."""
        written = Counter(
            page
            for row in batch.rows
            for page in {row.pages[p // 16] for p in range(row.start, row.start + row.length)}
        )
        assert all(count == 1 for count in written.values())

    def _row(self, row: ScheduledRow) -> RowResult:
        sequence = row.sequence
        if sequence.adapter is not None:
            assert self.books.reads(sequence.slot, sequence.owner), "another adapter's weights"
        else:
            assert sequence.slot == 0
        chain = self._chain(sequence, row.start + row.length)
        for position in range(row.start):
            place = row.pages[position // 16] * 16 + position % 16
            assert self.content.get(place) == chain[position], "KV of something else"
        if self.choose.random() < self.faults:
            return RowResult(error="fault")
        for position in range(row.start, row.start + row.length):
            self.content[row.pages[position // 16] * 16 + position % 16] = chain[position]
        self.prompt_tokens[sequence.request_id] += row.length
        finite = self.choose.random() >= self.faults
        return RowResult(tuple(Sampled(self.choose.randrange(VOCAB), finite) for _ in row.samples))

    def _chain(self, sequence: Sequence, length: int) -> list[int]:
        chain, state = [], hash((sequence.root, sequence.owner))
        for token in sequence.tokens[:length]:
            state = hash((state, token))
            chain.append(state)
        return chain


@dataclass(frozen=True)
class Ref:
    """What the engine needs of an AdapterRef."""

    version: FakeVersion

    @property
    def digest(self) -> str:
        """As the version's."""
        return self.version.digest

    @property
    def name(self) -> str:
        """As the version's."""
        return self.version.digest


@dataclass
class Rig:
    """An engine over fakes. `now` is the books' time."""

    seed: int = 0
    books: Books = field(default_factory=Books)
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 24
    max_adapters: int = 3

    def __post_init__(self) -> None:
        books = self.books
        self.random = random.Random(self.seed)
        limits = Limits(
            self.max_num_seqs, self.max_num_batched_tokens, self.max_adapters,
            books.pool.usable, 2.0, 60.0,
        )  # fmt: skip
        self.model = PageModel(books, limits, self.random)
        poison = books.pool._poison
        assert poison is not None

        def forget(pages: Items[int]) -> None:
            poison(pages)
            self.model.forget(pages)

        books.pool._poison = forget
        self.scheduler = Scheduler(limits, books.kv, books.residency, lambda: books.now)
        self.engine = Engine(
            EngineParts(
                config=EngineConfig(model_path="", debug=True, max_queue=10**6),
                base_digest="base",
                max_model_len=400,
                vocab_size=VOCAB,
                pool=books.pool,
                prefixes=books.prefixes,
                kv=books.kv,
                residency=books.residency,
                scheduler=self.scheduler,
                runner=self.model,
                ready=Ready("", "", 0, 0, 0, {}, {}),
                failpoints=Failpoints(),
                now=lambda: books.now,
            )
        )
        self.ends: dict[tuple[int, int], Delta] = {}
        self.open: set[tuple[int, int]] = set()
        self.preempted_at: dict[int, int] = {}
        self.next_id = 0
        preempt = self.scheduler._preempt

        def spy(sequence: Sequence) -> None:
            last = self.preempted_at.get(sequence.seq_id, -1)
            assert len(sequence.tokens) > last, "preempted twice without a token between"
            self.preempted_at[sequence.seq_id] = len(sequence.tokens)
            preempt(sequence)

        self.scheduler._preempt = spy  # type: ignore[method-assign]

    def submit(
        self, prompt: list[int], version: Version | None = None, n: int = 1, **params: object
    ) -> int:
        """Send a request; its id."""
        self.next_id += 1
        settings = SamplingParams(**({"max_tokens": 5} | params))
        self.engine.handle(Submit(self.next_id, prompt, settings, version, n))
        self.open |= {(self.next_id, index) for index in range(n)}
        return self.next_id

    def step(self) -> list[Delta]:
        """One step; every sequence ends at most once and says nothing afterwards."""
        self.books.now += 0.01
        deltas = self.engine.step()
        self.engine.take_replies()
        self.engine.take_events()
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key in self.open, "a delta after the end"
            if delta.finish_reason is not None:
                self.open.remove(key)
                self.ends[key] = delta
        live = {(s.request_id, s.index) for s in self.scheduler.sequences()}
        assert live == self.open, "admitted = waiting + running, at every step"
        return deltas

    def finish(self, most_steps: int = 5_000) -> None:
        """Until every request has ended."""
        for _ in range(most_steps):
            if not self.open:
                break
            self.books.loaders.run_one(self.random)
            for copy in self.books.copier.copies:
                copy.finished = True
            self.step()
        assert not self.open, "a request never ended"
        self.step()
        assert self.books.pool.count(PageUse.KV) == 0 and len(self.books.kv) == 0
        assert all(s.references == 0 for s in self.books.residency.standings())


def _walk(steps: int, seed: int) -> Counter[str]:
    """Random traffic from start to rest; how often what was seen."""
    rig = Rig(seed, Books(num_pages=36, num_slots=4))
    rig.books.copier.instant = False
    choose = rig.random
    rig.model.faults = choose.choice((0.0, 0.01))
    prompts = [[choose.randrange(VOCAB) for _ in range(120)] for _ in range(3)]
    for _ in range(steps):
        if len(rig.open) < 30 and choose.random() < 0.5:
            prompt = choose.choice(prompts)[: choose.randrange(1, 120)]
            version = choose.choice([None, None, *VERSIONS])
            rig.submit(
                prompt, version, n=choose.choice((1, 1, 1, 2, 4, 8)),
                max_tokens=choose.choice((0, 1, 5, 40, 200)), stop_token_ids=(1,),
            )  # fmt: skip
        if choose.random() < 0.1:
            rig.engine.handle(Abort(choose.randrange(1, rig.next_id + 2)))
        if choose.random() < 0.03:
            digest = choose.choice(VERSIONS).digest
            cold = choose.random() < 0.5
            rig.engine.handle(EvictAdapter(0, digest, "cold" if cold else "warm", purge_cache=cold))
        if choose.random() < 0.5:
            rig.books.loaders.run_one(choose)
        for copy in rig.books.copier.copies:
            copy.finished |= choose.random() < 0.5
        rig.step()
    rig.model.faults = 0.0
    rig.finish()
    seen = Counter({name: int(value) for name, value in rig.engine.snapshot().counters.items()})
    seen.update(delta.finish_reason for delta in rig.ends.values())
    seen["copies"] = sum(len(batch.copies) for batch in rig.model.batches)
    return seen


def test_random_traffic() -> None:
    seen: Counter[str] = Counter()
    for seed in range(5):
        seen += _walk(300, seed)
    for event in ("preemptions", "copies", "cached_tokens", "adapter_evictions", "adapter_loads",
                  "prefix_evictions", "stop", "length", "abort", "error"):  # fmt: skip
        assert seen[event] > 5, f"the walk hardly meets {event}: {seen}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_at_length(seed: int) -> None:
    _walk(2_000, 1000 + seed)


def test_decodes_go_first_and_prompts_fill_the_step() -> None:
    rig = Rig(books=Books(num_pages=100))
    rig.submit([2] * 4, max_tokens=50)
    rig.step()
    rig.submit([3] * 60, max_tokens=2)
    for _ in range(3):
        rig.step()
        assert rig.model.batches[-1].rows[0].length == 1
    lengths = [[row.length for row in batch.rows] for batch in rig.model.batches]
    assert lengths == [[4], [1, 23], [1, 23], [1, 14]]


def test_arrival_order_and_no_overtaking_for_pages() -> None:
    """A sequence that does not find pages is not overtaken by a smaller one behind it."""
    rig = Rig(books=Books(num_pages=10))
    first = rig.submit([2] * 90, max_tokens=40)
    rig.step()
    big, small = rig.submit([3] * 90, max_tokens=1), rig.submit([4] * 3, max_tokens=1)
    ends = []
    while rig.open:
        ends += [delta.request_id for delta in rig.step() if delta.finish_reason]
    assert ends == [first, big, small]


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    rig = Rig(books=Books(num_pages=100), max_num_seqs=8)
    request = rig.submit([2] * 37, n=5, max_tokens=1)
    rig.finish()
    assert rig.model.prompt_tokens[request] == 37


def test_an_overdue_adapter_holds_back_what_it_needs() -> None:
    """Base rows keep running while the pages for the overdue one are kept free."""
    rig = Rig(books=Books(num_pages=60, num_slots=2, kv_reserve=0.2))
    hog = rig.submit([2] * 20, VERSIONS[0], max_tokens=350)
    while rig.scheduler.num_running == 0:
        rig.books.loaders.run_one(rig.random)
        rig.step()
    rare = rig.submit([3] * 20, VERSIONS[4], max_tokens=3)
    rig.step()
    rig.books.loaders.run_one(rig.random)
    rig.books.now += 3.0
    rig.step()
    same = rig.submit([4] * 20, VERSIONS[0], max_tokens=3)
    base = rig.submit([4] * 20, max_tokens=3)
    for _ in range(20):
        rig.step()
    assert (base, 0) in rig.ends, "base rows do not wait for adapters"
    assert (same, 0) in rig.open, "newer rows of the running adapter prolong the wait"
    rig.engine.handle(Abort(hog))
    for _ in range(20):
        rig.step()
    assert (rare, 0) in rig.ends and rig.ends[rare, 0].finish_reason in ("length", "stop")
    rig.finish()


def test_a_slow_load_holds_nobody_back() -> None:
    rig = Rig(books=Books(num_pages=60))
    hot = rig.submit([2] * 20, VERSIONS[0])
    while (hot, 0) not in rig.ends:
        rig.books.loaders.run_one(rig.random)
        rig.step()
    slow = rig.submit([3] * 20, VERSIONS[1])
    rig.step()
    rig.books.now += 30.0
    rig.step()
    others = [rig.submit([4] * 20, VERSIONS[0]), rig.submit([4] * 20)]
    for _ in range(10):
        rig.step()
    assert {(other, 0) for other in others} <= set(rig.ends) and (slow, 0) in rig.open
    rig.finish()


def test_newcomers_to_a_draining_adapter_hold_nobody_back() -> None:
    rig = Rig(books=Books(num_pages=60))
    old = rig.submit([2] * 20, VERSIONS[0], max_tokens=300)
    while rig.scheduler.num_running == 0:
        rig.books.loaders.run_one(rig.random)
        rig.step()
    rig.engine.handle(EvictAdapter(1, VERSIONS[0].digest))
    late = rig.submit([2] * 20, VERSIONS[0])
    other = rig.submit([2] * 20, VERSIONS[1])
    rig.books.now += 30.0
    for _ in range(20):
        rig.books.loaders.run_one(rig.random)
        rig.step()
    assert (other, 0) in rig.ends and {(old, 0), (late, 0)} <= rig.open
    rig.finish()


def test_a_newer_sequence_yields_to_an_older_one_whose_adapter_came_late() -> None:
    """It passed while the adapter was loaded; now adapter and older sequence need all pages."""
    rig = Rig(books=Books(num_pages=21, num_slots=2, kv_reserve=0.2))
    older = rig.submit([2] * 180, VERSIONS[4], max_tokens=2)
    newer = rig.submit([3] * 10, max_tokens=200)
    while len(rig.model.batches) < 20:
        rig.step()
    ends = []
    while rig.open:
        rig.books.loaders.run_one(rig.random)
        ends += [delta for delta in rig.step() if delta.finish_reason]
    assert [delta.request_id for delta in ends] == [older, newer]
    assert [delta.fault for delta in ends] == [None, None]
    assert rig.scheduler.preemptions == 1
