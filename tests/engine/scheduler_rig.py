"""The scheduler over a model of what lies in every page, checked at every step. No torch."""

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from multilora_cli.adapters.lease import Version
from multilora_cli.engine.batch_plan import RowResult, Sampled, ScheduledBatch, ScheduledRow
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.engine import Engine, EngineParts
from multilora_cli.engine.failpoints import Failpoints
from multilora_cli.engine.fair_order import FairBy, FairOrder
from multilora_cli.engine.messages import Delta, Ready, SamplingParams, Submit
from multilora_cli.engine.scheduler import Limits, Scheduler
from multilora_cli.engine.sequence import Sequence
from multilora_cli.memory.page_pool import PageUse
from tests.engine.bookkeeping_kit import Books, FakeVersion

VERSIONS = [FakeVersion(f"d{i}", pages) for i, pages in enumerate((1, 2, 3, 5, 8))]
VOCAB = 50


@dataclass
class Landed:
    """A step whose results are known; `see` is called when the engine asks for them."""

    outcome: tuple[RowResult, ...]
    see: Callable[[], None]

    def results(self) -> tuple[RowResult, ...]:
        """As computed."""
        self.see()
        return self.outcome


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
        self.distinct: list[int] = []  # adapters of each batch
        self.pending: dict[int, list[int]] = {}  # by sequence: tokens that the engine has not seen
        self.failed: set[int] = set()  # sequences with a fault
        self.ahead = 0  # steps launched before the tokens they go on from were seen

    def forget(self, pages: Items[int]) -> None:
        """Pages that were given back."""
        for page in pages:
            for offset in range(16):
                self.content.pop(page * 16 + offset, None)

    def launch(self, batch: ScheduledBatch) -> Landed:
        """Check the decision, then write and sample."""
        self.batches.append(batch)
        self.distinct.append(batch.num_adapters)
        assert batch.num_tokens <= self.limits.max_num_batched_tokens
        assert len(batch.rows) <= self.limits.max_num_seqs
        assert batch.num_adapters <= self.limits.max_adapters
        self._check_adapter_budget(batch)
        assert [r.length > 1 for r in batch.rows] == sorted(r.length > 1 for r in batch.rows)
        assert len({row.sequence.seq_id for row in batch.rows}) == len(batch.rows)
        for source, target in batch.copies:
            for offset in range(16):
                if source * 16 + offset in self.content:
                    self.content[target * 16 + offset] = self.content[source * 16 + offset]
        self._check_writes(batch)
        self.ahead += any(row.sequence.num_pending for row in batch.rows)
        outcome = tuple(self._row(row) for row in batch.rows)
        sampled = [
            (sequence.seq_id, result.sampled[index].token_id if result.sampled else 0)
            for row, result in zip(batch.rows, outcome, strict=True)
            for index, sequence in enumerate(row.samples)
        ]
        for seq_id, token in sampled:
            self.pending.setdefault(seq_id, []).append(token)
        return Landed(outcome, lambda: self._seen([seq_id for seq_id, _ in sampled]))

    def _seen(self, seq_ids: list[int]) -> None:
        """The engine has the oldest pending token of each."""
        for seq_id in seq_ids:
            self.pending[seq_id].pop(0)

    def _check_adapter_budget(self, batch: ScheduledBatch) -> None:
        """Pages of the step's distinct adapters; one alone may have more."""
        slots = {row.sequence.slot for row in batch.rows} - {0}
        most = self.limits.max_adapter_pages
        if most is not None and len(slots) > 1:
            assert sum(len(self.books.table.device[slot]) for slot in slots) <= most

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
        # One step ahead a row may follow one that failed; what it gives is dropped.
        checked = 0 if sequence.seq_id in self.failed else row.start
        for position in range(checked):
            place = row.pages[position // 16] * 16 + position % 16
            assert self.content.get(place) == chain[position], "KV of something else"
        if self.choose.random() < self.faults:
            self.failed.add(sequence.seq_id)
            return RowResult(error="fault")
        for position in range(row.start, row.start + row.length):
            self.content[row.pages[position // 16] * 16 + position % 16] = chain[position]
        self.prompt_tokens[sequence.request_id] += row.length
        finite = self.choose.random() >= self.faults
        return RowResult(tuple(Sampled(self.choose.randrange(VOCAB), finite) for _ in row.samples))

    def _chain(self, sequence: Sequence, length: int) -> list[int]:
        chain, state = [], hash((sequence.root, sequence.owner))
        tokens = [*sequence.tokens, *self.pending.get(sequence.seq_id, ())]
        assert sequence.num_pending == len(tokens) - len(sequence.tokens)
        for token in tokens[:length]:
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
    max_chunk: int = 24
    captured_chunks: tuple[int, ...] = ()
    captured_prompts: int = 16
    max_adapters: int = 3
    max_adapter_pages: int | None = None
    fair_by: FairBy = "tenant"
    steps_ahead: int = 0

    def __post_init__(self) -> None:
        books = self.books
        self.random = random.Random(self.seed)
        limits = Limits(
            self.max_num_seqs, self.max_num_batched_tokens, self.max_chunk, self.max_adapters,
            books.pool.usable, 2.0, 60.0, self.max_adapter_pages, self.captured_chunks,
            self.captured_prompts,
        )  # fmt: skip
        self.model = PageModel(books, limits, self.random)
        poison = books.pool._poison
        assert poison is not None

        def forget(pages: Items[int]) -> None:
            poison(pages)
            self.model.forget(pages)

        books.pool._poison = forget
        self.scheduler = Scheduler(
            limits, books.kv, books.residency, lambda: books.now, FairOrder(self.fair_by)
        )
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
                steps_ahead=self.steps_ahead,
            )
        )
        self.ends: dict[tuple[int, int], Delta] = {}
        self.open: set[tuple[int, int]] = set()
        self.preempted_at: dict[int, int] = {}
        self.next_id = 0
        preempt = self.scheduler._preempt

        def spy(sequence: Sequence) -> None:
            last = self.preempted_at.get(sequence.seq_id, -1)
            assert sequence.length > last, "preempted twice without a token between"
            self.preempted_at[sequence.seq_id] = sequence.length
            preempt(sequence)

        self.scheduler._preempt = spy  # type: ignore[method-assign]

    def submit(
        self,
        prompt: list[int],
        version: Version | None = None,
        n: int = 1,
        *,
        tenant: str = "",
        weight: float = 1.0,
        **params: object,
    ) -> int:
        """Send a request; its id."""
        self.next_id += 1
        settings = SamplingParams(**({"max_tokens": 5} | params))
        self.engine.handle(Submit(self.next_id, prompt, settings, version, n, "", tenant, weight))
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
        assert all(s.references == 0 for s in self.books.residency.reports.standings())
