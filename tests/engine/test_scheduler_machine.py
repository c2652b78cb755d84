"""The scheduler under operations chosen by Hypothesis, so that a failure is short. No torch."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from multilora_cli.engine.messages import Abort, EvictAdapter
from tests.engine.bookkeeping_kit import Books
from tests.engine.scheduler_rig import VERSIONS, Rig

_PROMPTS = [[2 + i % 7 for i in range(120)], [3] * 120]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, aborts, evictions, loads, copies and steps; the rig's model of every page, its
    count of live sequences and the engine's audits are checked in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            0, Books(num_pages=30, num_slots=6, prefetch_bytes_per_s=500), max_adapter_pages=10
        )
        self.rig.books.copier.instant = False
        self.rig.random = random.Random(0)

    @rule(
        length=st.integers(1, 100),
        version=st.sampled_from([None, *VERSIONS]),
        answers=st.sampled_from((1, 1, 1, 2, 5)),
        output=st.sampled_from((0, 1, 4, 40, 150)),
        tenant=st.sampled_from(("a", "b", "c")),
        weight=st.sampled_from((0.5, 1.0, 8.0)),
        which=st.integers(0, 1),
    )
    def submit(self, length, version, answers, output, tenant, weight, which) -> None:
        """A request arrives."""
        if len(self.rig.open) < 30:
            self.rig.submit(
                _PROMPTS[which][:length], version, n=answers, max_tokens=output, tenant=tenant,
                weight=weight, stop_token_ids=(1,),
            )  # fmt: skip

    @rule(back=st.integers(0, 12))
    def abort(self, back: int) -> None:
        """A client leaves; it may have been answered."""
        self.rig.engine.handle(Abort(max(self.rig.next_id - back, 1)))

    @rule(version=st.sampled_from(VERSIONS), cold=st.booleans())
    def evict(self, version, cold: bool) -> None:
        """An operator sends an adapter away."""
        to = "cold" if cold else "warm"
        self.rig.engine.handle(EvictAdapter(0, version.digest, to, purge_cache=cold))

    @rule(choices=st.randoms(use_true_random=False))
    def load_ends(self, choices: random.Random) -> None:
        """A loader thread is done."""
        self.rig.books.loaders.run_one(choices)

    @rule()
    def copies_end(self) -> None:
        """The copy stream has caught up."""
        for copy in self.rig.books.copier.copies:
            copy.finished = True

    @rule(steps=st.integers(1, 6), seconds=st.sampled_from((0.0, 0.0, 0.5, 3.0)))
    def step(self, steps: int, seconds: float) -> None:
        """Time passes."""
        self.rig.books.now += seconds
        for _ in range(steps):
            self.rig.step()

    def teardown(self) -> None:
        """Every request ends, and nothing stays owned."""
        self.rig.finish()
        self.rig.engine.check_integrity()


@pytest.mark.parametrize(
    "stories", [60, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_scheduler_machine(stories: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=stories, stateful_step_count=50, deadline=None, derandomize=True,
            database=None, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
