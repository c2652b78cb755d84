"""The page pool against a model of it, by Hypothesis: a failure comes as its shortest story."""

from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from multilora_cli.memory.fences import StepClock
from multilora_cli.memory.page_pool import IntegrityError, OutOfPages, PagePool, PageUse

USES = st.sampled_from((PageUse.KV, PageUse.ADAPTER))


class PoolMachine(RuleBasedStateMachine):
    """`owned` is what the model holds; `fenced` what was given back, with the step behind it."""

    @initialize(num_pages=st.integers(2, 24))
    def start(self, num_pages: int) -> None:
        self.clock = StepClock()
        self.poisoned: list[int] = []
        self.pool = PagePool(num_pages, 64, clock=self.clock, poison=self.poisoned.extend)
        self.owned: dict[int, PageUse] = {}
        self.fenced: dict[int, int] = {}
        self.serial = count()

    def past(self) -> int:
        """Fenced pages that no step reads any more."""
        return sum(step <= self.clock.completed for step in self.fenced.values())

    @rule(wanted=st.integers(0, 10), use=USES)
    def allocate(self, wanted: int, use: PageUse) -> None:
        """All or nothing; an adapter never gets a page that a step may still read."""
        free = self.pool.usable - len(self.owned) - len(self.fenced)
        room = free + (len(self.fenced) if use is PageUse.KV else self.past())
        assert self.pool.available(use) == room
        if wanted > room:
            before = {page: self.pool.use(page) for page in range(self.pool.num_pages)}
            with pytest.raises(OutOfPages):
                self.pool.allocate(wanted, use)
            assert before == {page: self.pool.use(page) for page in before}
            return
        pages = self.pool.allocate(wanted, use)
        assert len(set(pages)) == wanted and not self.owned.keys() & set(pages) and 0 not in pages
        for page in pages:
            step = self.fenced.pop(page, 0)
            assert use is PageUse.KV or step <= self.clock.completed, "under a running step"
            self.owned[page] = use

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Some pages, in any order; each is overwritten at once."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.owned)), min_size=1, unique=True))
        self.poisoned.clear()
        self.pool.free(pages)
        assert self.poisoned == pages
        for page in pages:
            del self.owned[page]
            self.fenced[page] = self.clock.launched

    @rule(data=st.data())
    def free_what_is_not_owned(self, data: st.DataObject) -> None:
        """A second release is a bug that is told, not a page on the list twice."""
        strangers = sorted(set(range(self.pool.num_pages)) - self.owned.keys())
        with pytest.raises(IntegrityError):
            self.pool.free([data.draw(st.sampled_from(strangers))])

    @precondition(lambda self: any(use is not PageUse.ADAPTER for use in self.owned.values()))
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        """A cached prefix, and back."""
        pages = sorted(p for p, use in self.owned.items() if use is not PageUse.ADAPTER)
        page = data.draw(st.sampled_from(pages))
        use = PageUse.CACHED if self.owned[page] is PageUse.KV else PageUse.KV
        self.pool.mark(page, use)
        self.owned[page] = use

    @rule()
    def launch(self) -> None:
        """A step is handed to the device."""
        self.clock.launch()

    @rule(late=st.integers(0, 3))
    def complete(self, late: int) -> None:
        """All but the last few steps have ended."""
        self.clock.complete(max(self.clock.launched - late, 0))

    @invariant()
    def books(self) -> None:
        """Free, fenced, cached and owned are disjoint and all there is."""
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        for use in (PageUse.KV, PageUse.CACHED, PageUse.ADAPTER):
            owned = sum(found is use for found in self.owned.values())
            assert self.pool.count(use) == owned
        given_back = self.pool.count(PageUse.FREE) + self.pool.count(PageUse.FENCED)
        assert given_back == self.pool.usable - len(self.owned)

    def teardown(self) -> None:
        """When everybody has left and every step has ended, all of it is free."""
        if not hasattr(self, "pool"):
            return
        if self.owned:
            self.pool.free(list(self.owned))
        self.clock.complete(self.clock.launch())
        assert self.pool.available(PageUse.ADAPTER) == self.pool.usable
        self.pool.check_integrity()


@pytest.mark.parametrize(
    "stories", [200, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_pool_machine(stories: int) -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=stories,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
