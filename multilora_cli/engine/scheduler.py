"""Who runs in the next step.

Running sequences decode first, then prompts go on in chunks, then waiting sequences are taken up
in order: of arrival, within fair shares (engine.fair_order). A sequence whose adapter is not hot is
passed over; one that waited too long stops those behind it from taking what it needs. When pages
run out the newest sequence gives its pages back and is computed again later. A sequence is taken up
only with pages for all its known tokens and one more, so it always produces a token before it can
be preempted.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from multilora_cli.adapters.lease import Lease
from multilora_cli.engine.batch_plan import ScheduledBatch, ScheduledRow
from multilora_cli.engine.fair_order import FairOrder
from multilora_cli.engine.leases import Leases
from multilora_cli.engine.messages import Delta, Fault, FinishReason
from multilora_cli.engine.sequence import Sequence, Status
from multilora_cli.engine.waits import Reason, Waits, reason_of
from multilora_cli.memory.kv_cache import KVCache
from multilora_cli.memory.page_pool import IntegrityError
from multilora_cli.memory.prefix_cache import extend_keys
from multilora_cli.sizing.pages import pages_for_tokens


@dataclass(frozen=True)
class Limits:
    """The bounds of a step and of waiting."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_beside_decode: int  # prompt tokens of a step in which others decode
    max_adapters: int  # distinct among the running
    usable_pages: int
    adapter_wait_s: float
    adapter_wait_limit_s: float
    max_adapter_pages: int | None = None  # of the distinct adapters among the running
    captured_chunks: tuple[int, ...] = ()  # prompt tokens of steps that are a single launch
    captured_prompts: int = 0  # and of how many prompts


class Scheduler:
    """The waiting and running queues and the rules between them. `now` is monotonic seconds."""

    def __init__(
        self,
        limits: Limits,
        kv: KVCache,
        leases: Leases,
        now: Callable[[], float],
        fair: FairOrder | None = None,
    ) -> None:
        self._limits = limits
        self._kv = kv
        self._leases = leases
        self._now = now
        self.fair = fair or FairOrder()
        self.waits = Waits()
        self._waiting: list[Sequence] = []  # both in order
        self._running: list[Sequence] = []
        self._requests: dict[int, list[Sequence]] = {}
        self._live = 0  # sequences that have not ended
        self._running_adapters: Counter[str] = Counter()
        self._adapter_pages: dict[str, int] = {}  # of the running adapters
        self._ended: list[Delta] = []
        self.preemptions = 0

    # ---- in and out

    def place(self, sequence: Sequence) -> None:
        """Give a sequence that arrives its order, before it takes a lease and is added."""
        if self.fair.needs_settling(sequence.share):
            self._settle()
        head = next((other for other in self._waiting if other.resumed_len < 0), None)
        self.fair.place(sequence, head)

    def add(self, sequences: list[Sequence]) -> None:
        """Admit a request: one sequence that computes the prompt and its FORKING children."""
        first = sequences[0]
        self._requests[first.request_id] = list(sequences)
        self._live += len(sequences)
        first.children = sequences[1:]
        for child in first.children:
            child.status = Status.FORKING
        self._wait(first)

    def abort(self, request_id: int) -> None:
        """End every sequence of the request; it may have ended already."""
        for sequence in list(self._requests.get(request_id, ())):
            if sequence.status is not Status.FINISHED:  # not ended with its parent just now
                self.end(sequence, "abort")

    def end(self, sequence: Sequence, reason: FinishReason, fault: Fault | None = None) -> None:
        """The sequence is over: give back all it holds and report it without a token."""
        self._ended.append(
            Delta(sequence.request_id, sequence.index, [], finish_reason=reason, fault=fault)
        )
        for child in sequence.children:
            if child.status is not Status.FINISHED:
                self.end(child, reason, fault)
        self.retire(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds, whatever its state."""
        if sequence.status is Status.FINISHED:
            raise IntegrityError(f"sequence {sequence.seq_id} ended twice")
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.children = []
        self.fair.ended(sequence)
        if sequence.lease is not None:
            self._leases.release(sequence.lease)
        request = self._requests[sequence.request_id]
        request.remove(sequence)
        self._live -= 1
        if not request:
            del self._requests[sequence.request_id]

    def take_ended(self) -> list[Delta]:
        """Deltas of sequences that ended outside a step's results."""
        ended, self._ended = self._ended, []
        return ended

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The prompt is computed: let `child` run on the parent's pages, or wait for its own."""
        parent.children.remove(child)
        computed = parent.num_computed  # of the prompt: a parent does not go on before its children
        room = len(self._running) < self._limits.max_num_seqs and parent.status is Status.RUNNING
        if not room or not self._kv.fork(parent.seq_id, child.seq_id, computed):
            self._wait(child)
            return
        child.num_computed = computed
        child.keys = list(parent.keys)
        self._start(child)

    # ---- decisions

    def schedule(self) -> ScheduledBatch:
        """Decide the next step; a batch without rows means that nothing can run now."""
        rows: list[ScheduledRow] = []
        preempted = self.preemptions
        self.waits.begin(self._now())
        if self.fair.needs_settling():
            self._settle()
        prompts = self._decode(rows)
        num_decodes = len(rows)
        budget = self._limits.max_num_batched_tokens - num_decodes
        most_rows = self._limits.max_num_seqs
        if rows:
            budget = min(budget, self._chunk_beside_decode(prompts))
            if self._limits.captured_chunks:
                most_rows = num_decodes + self._limits.captured_prompts
        for sequence in prompts:
            if budget <= 0 or len(rows) >= most_rows:
                break
            if sequence.status is Status.RUNNING:  # not preempted just now
                rows.append(self._row(sequence, min(budget, sequence.remaining)))
                budget -= rows[-1].length
        if self.preemptions == preempted:
            self._admit(rows, budget, most_rows)
        else:
            self.waits.count("kv_pages", len(self._waiting))
        if len(rows) > num_decodes:
            rows.sort(key=lambda row: row.length > 1)
        return ScheduledBatch(tuple(rows), self._kv.pending_copies())

    def _decode(self, rows: list[ScheduledRow]) -> list[Sequence]:
        """A row for every running sequence that has one token to compute; gives those that have
        more. In one piece, as it is walked several hundred times a step."""
        prompts, table_for, running = [], self._kv.table_for, Status.RUNNING
        for sequence in list(self._running):
            pending = sequence.num_pending
            length = len(sequence.tokens) + pending
            start = sequence.num_computed
            if length - start > 1:
                prompts.append(sequence)
                continue
            goes_on = length < sequence.max_len
            children = sequence.children
            if length == start or (pending and (children or not goes_on)):  # may_go_on
                continue
            if sequence.status is not running:  # preempted just now
                continue
            pages = table_for(sequence.seq_id, length)
            if pages is None:
                if not self._has_room(sequence):
                    continue
                pages = self._kv.table(sequence.seq_id)
            samples = (sequence, *children) if goes_on else ()
            rows.append(ScheduledRow(sequence, start, 1, pages, samples))
        return prompts

    def launched(self, batch: ScheduledBatch) -> None:
        """The step was handed to the device: its tokens count, those it samples are pending."""
        at = 0
        for row in batch.rows:
            row.sequence.num_computed = row.start + row.length
            for sequence in row.samples:
                sequence.num_pending += 1
                sequence.pending_at = at
                at += 1

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no page, those whose prompt is being computed included."""
        return self._live - len(self._running)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._requests)

    def knows(self, request_id: int) -> bool:
        """Whether the request has sequences that have not ended."""
        return request_id in self._requests

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that has not ended."""
        for sequences in list(self._requests.values()):
            yield from list(sequences)

    def check_integrity(self) -> None:
        """Every live sequence is in exactly one place and holds what its state says."""
        running, waiting = set(self._running), set(self._waiting)
        for queue in (self._running, self._waiting):
            if any(after.order < before.order for before, after in pairwise(queue)):
                raise IntegrityError("a queue is out of order")
        for sequence in self.sequences():
            self._check(sequence, sequence in running, sequence in waiting)
        self.fair.check_integrity(self.sequences())
        if set(self._adapter_pages) != set(self._running_adapters):
            raise IntegrityError("the pages of running adapters are counted wrongly")
        if self._live != sum(map(len, self._requests.values())):
            raise IntegrityError(f"{self._live} sequences are counted that have not ended")
        if len(self._kv) != len(running):
            raise IntegrityError(f"{len(self._kv)} page tables, {len(running)} running")
        self._kv.check_integrity()

    def _check(self, sequence: Sequence, runs: bool, waits: bool) -> None:
        """It is where its state says, and holds what is held there."""
        status, holds = sequence.status, sequence.seq_id in self._kv
        if (status is Status.RUNNING) != runs or holds != runs:
            raise IntegrityError(f"sequence {sequence.seq_id}: {status}, pages {holds}")
        if (status is Status.WAITING) != waits:
            raise IntegrityError(f"sequence {sequence.seq_id} is {status} in no queue")
        if sequence.lease is not None and sequence.lease.running != runs:
            raise IntegrityError(f"sequence {sequence.seq_id}: its lease says otherwise")
        if waits:
            self._check_sleep(sequence)

    def _check_sleep(self, sequence: Sequence) -> None:
        """What a sleeping sequence waits for is what asking about it would say."""
        lease = sequence.lease
        if lease is None or lease.asleep is None:
            return
        leases, found = self._leases, self._leases.obstacle(lease)
        is_same = leases.is_loading(lease) if lease.asleep == "load" else found == leases.no_room
        if not is_same or leases.failure(lease) is not None or self._is_too_large(sequence):
            raise IntegrityError(f"sequence {sequence.seq_id} sleeps, and should be told: {found}")

    # ---- rules

    def _chunk_beside_decode(self, prompts: list[Sequence]) -> int:
        """How many prompt tokens go into a step in which others decode.

        A captured step is a single launch; any other takes the host 14 to 34 ms, as long as the
        device computes 1,000 tokens. Spare tokens of a captured step cost as much as others. So a
        step is one that the prompts at hand fill, or the smallest.
        """
        most = self._limits.max_chunk_beside_decode
        captured = [tokens for tokens in self._limits.captured_chunks if tokens < most]
        if not captured:
            return most
        places = max(self._limits.max_num_seqs - len(self._running), 0)
        backlog = sum(sequence.remaining for sequence in prompts)
        for sequence in self._waiting[:places]:
            if backlog >= most:
                return most
            backlog += sequence.length
        filled = [tokens for tokens in (*captured, most) if tokens <= backlog]
        return filled[-1] if filled else captured[0]

    def _has_room(self, sequence: Sequence) -> bool:
        """Pages for the token it computes next, preempting newer ones; False: not in this step."""
        while sequence.status is Status.RUNNING:
            if self._kv.reserve(sequence.seq_id, sequence.length, sequence.order):
                return True
            newer = [other for other in self._running if other.order > sequence.order]
            victims = [other for other in newer if other.may_be_preempted]
            if victims:
                self._preempt(victims[-1])
            elif newer:
                return False  # they have all the pages they need and will produce a token
            else:
                self._preempt(sequence)  # what holds the pages is kept for an older one
        return False

    def _admit(self, rows: list[ScheduledRow], budget: int, most_rows: int) -> None:
        """Take up waiting sequences in their order, as far as places and pages go."""
        now = self._now()
        spare = 0
        overdue = False
        waiting = list(self._waiting)
        is_closed = self._is_closed(rows, budget, most_rows)
        for index, sequence in enumerate(waiting):
            if is_closed:
                self.waits.count("place", len(waiting) - index)
                break
            reason = self._asleep(sequence, now)
            if reason is None:
                if sequence.num_pending:  # preempted while its token was on the way
                    self.waits.count("kv_pages")
                    continue
                if self._is_hopeless(sequence, now):
                    continue
                reason = self._obstacle(sequence, overdue)
            if reason is not None:
                self.waits.count("turn" if overdue else reason)
                if not overdue and self._is_overdue(sequence, now):
                    overdue = True
                    spare = self._needs(sequence)
                continue
            if not self._take_up(sequence, spare):
                self.waits.count("kv_pages", len(waiting) - index)
                break
            rows.append(self._row(sequence, min(budget, sequence.remaining)))
            budget -= rows[-1].length
            is_closed = self._is_closed(rows, budget, most_rows)

    def _is_closed(self, rows: list[ScheduledRow], budget: int, most_rows: int) -> bool:
        """Whether nobody else can be taken up in this step."""
        most = self._limits.max_num_seqs
        return budget <= 0 or len(rows) >= most_rows or len(self._running) >= most

    def _asleep(self, sequence: Sequence, now: float) -> Reason | None:
        """What it still waits for if nothing about that has changed. A thousand may wait for
        adapters that load two at a time: they are passed over without another question."""
        lease = sequence.lease
        if lease is None or lease.asleep is None:
            return None
        if lease.asleep == "room":
            return reason_of(self._leases.no_room)
        in_time = now - sequence.waiting_since <= self._limits.adapter_wait_limit_s
        return "adapter_load" if in_time else None

    def _obstacle(self, sequence: Sequence, overdue: bool) -> Reason | None:
        """What keeps a waiting sequence's adapter from running with it."""
        lease = sequence.lease
        if lease is None:
            return None
        self._leases.sleep(lease)
        if overdue:
            return "turn"
        found = self._leases.obstacle(lease)
        if found is not None:
            return reason_of(found)
        return None if self._fits_step(sequence.owner, lease) else "adapter_budget"

    def _fits_step(self, owner: str, lease: Lease) -> bool:
        """Whether a hot adapter may be among the running; one alone always may."""
        pages = self._adapter_pages
        if owner in pages or not pages:
            return True
        most = self._limits.max_adapter_pages
        if most is not None and sum(pages.values()) + self._leases.pages_held(lease) > most:
            return False
        return len(pages) < self._limits.max_adapters

    def _is_overdue(self, sequence: Sequence, now: float) -> bool:
        """Whether it waited too long for what those behind it would take. A load is no such wait:
        it comes to an end whoever runs meanwhile."""
        lease, waited = sequence.lease, now - sequence.waiting_since
        if lease is None or lease.asleep == "load" or waited <= self._limits.adapter_wait_s:
            return False
        return self._leases.waits_for_room(lease)

    def _is_hopeless(self, sequence: Sequence, now: float) -> bool:
        """End a waiting sequence that can never run, or whose adapter cannot be had."""
        lease = sequence.lease
        if self._is_too_large(sequence):
            self.end(sequence, "error", _too_long(sequence, self._limits.usable_pages))
            return True
        if lease is None:
            return False
        failure = self._leases.failure(lease)
        if failure is not None:
            retry_s = max(failure.retry_at - now, 0.0)
            self.end(sequence, "error", Fault("adapter_unavailable", failure.reason, retry_s))
            return True
        waited = now - sequence.waiting_since
        if waited > self._limits.adapter_wait_limit_s and self._leases.is_loading(lease):
            message = f"the adapter is still loading after {waited:.0f} s"
            self.end(sequence, "error", Fault("adapter_loading", message, 5.0))
            return True
        return False

    def _is_too_large(self, sequence: Sequence) -> bool:
        """Whether it can never have its pages beside those of its adapter and of pinned ones."""
        pages = pages_for_tokens(sequence.most_kv_tokens) + self._leases.footprint(sequence.lease)
        return pages > self._limits.usable_pages

    def _needs(self, sequence: Sequence) -> int:
        """Pages to keep free for an overdue sequence and its adapter."""
        adapter = self._leases.pages_needed(sequence.lease) if sequence.lease is not None else 0
        return adapter + pages_for_tokens(sequence.kv_tokens)

    def _take_up(self, sequence: Sequence, spare: int) -> bool:
        """Give a waiting sequence pages for all its known tokens and one more."""
        extend_keys(sequence.keys, sequence.root, sequence.tokens)
        # The last token is always computed: its logits are what is asked for.
        reusable = 0 if sequence.wants_prompt_logprobs else len(sequence.tokens) - 1
        seq_id = sequence.seq_id
        cached = self._kv.open(seq_id, sequence.owner, sequence.keys, reusable)
        if not self._kv.reserve(seq_id, sequence.kv_tokens, sequence.order, spare):
            self._kv.close(seq_id)
            return False
        self._waiting.remove(sequence)
        sequence.num_computed = cached
        sequence.prompt_logprobs = []
        if not sequence.has_answered:
            sequence.cached_tokens = min(cached, sequence.prompt_len)
            sequence.queued_s += self._now() - sequence.waiting_since
        self._start(sequence)
        return True

    def _row(self, sequence: Sequence, length: int) -> ScheduledRow:
        """The sequence and its children sample when no known token is left."""
        samples: tuple[Sequence, ...] = ()
        if length == sequence.remaining and sequence.length < sequence.max_len:
            samples = (sequence, *sequence.children)
        pages = self._kv.table(sequence.seq_id)
        return ScheduledRow(sequence, sequence.num_computed, length, pages, samples)

    def _start(self, sequence: Sequence) -> None:
        """It holds pages: take the adapter's slot and run."""
        if sequence.lease is not None:
            slot = self._leases.acquire(sequence.lease)
            if slot is None:
                raise IntegrityError(f"sequence {sequence.seq_id}: its adapter is not hot")
            sequence.slot = slot
            self._running_adapters[sequence.owner] += 1
            self._adapter_pages[sequence.owner] = self._leases.pages_held(sequence.lease)
        sequence.status = Status.RUNNING
        self.fair.taken_up(sequence)
        insort(self._running, sequence, key=lambda s: s.order)

    def _leave(self, sequence: Sequence) -> None:
        """It gives its pages back and stops using its slot."""
        self._running.remove(sequence)
        self._kv.close(sequence.seq_id)
        sequence.num_computed = 0
        sequence.slot = 0
        if sequence.lease is not None:
            self._running_adapters[sequence.owner] -= 1
            if not self._running_adapters[sequence.owner]:
                del self._running_adapters[sequence.owner]
                del self._adapter_pages[sequence.owner]

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        if sequence.lease is not None:
            self._leases.suspend(sequence.lease)
        sequence.resumed_len = sequence.length
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        sequence.waiting_since = self._now()
        insort(self._waiting, sequence, key=lambda s: s.order)

    def _settle(self) -> None:
        """Costs are known now that were guessed: waiting sequences get their places anew."""
        self.fair.settle(self._waiting, self._move)
        self._waiting.sort(key=lambda s: s.order)

    def _move(self, sequence: Sequence, order: int) -> None:
        sequence.order = order
        if sequence.lease is not None:
            self._leases.reorder(sequence.lease, order)


def _too_long(sequence: Sequence, pages: int) -> Fault:
    return Fault(
        "context_length_exceeded",
        f"{sequence.max_len} tokens of prompt and answer do not fit into memory: with its adapter"
        f" the request needs more than the {pages} pages of 16 tokens that there are",
    )
