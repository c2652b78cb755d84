"""The residency ladder's operations chosen by Hypothesis, so that a failure is short."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.adapters.residency_kit import Walk

CHOICES = st.randoms(use_true_random=False)


class ResidencyMachine(RuleBasedStateMachine):
    """Operations of the walk; after each, every audit and the pages of every running lease."""

    def __init__(self) -> None:
        super().__init__()
        self.walk = Walk(0)
        self.walk.random = random.Random(0)

    @rule(
        choices=CHOICES,
        operation=st.sampled_from(
            ("lease", "acquire", "suspend", "release", "load", "evict", "kv", "breakage")
        ),
    )
    def ask(self, choices: random.Random, operation: str) -> None:
        """Somebody wants something."""
        self.walk.do(operation, choices)

    @rule(choices=CHOICES, operation=st.sampled_from(("job", "copy", "launch", "poll", "poll")))
    def move(self, choices: random.Random, operation: str) -> None:
        """A thread, the device or the loop gets on."""
        self.walk.do(operation, choices)

    @rule(choices=CHOICES)
    def lull(self, choices: random.Random) -> None:
        """Everybody leaves for a while."""
        self.walk.do("lull", choices)

    @invariant()
    def books(self) -> None:
        """Everything that is always true."""
        self.walk.check()

    def teardown(self) -> None:
        """At rest nothing is owned."""
        self.walk.random = random.Random(0)
        self.walk.finish()


@pytest.mark.parametrize(
    "stories", [200, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_residency_machine(stories: int) -> None:
    run_state_machine_as_test(
        ResidencyMachine,
        settings=settings(
            max_examples=stories,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
