"""The start panel: every part planned beside allocated, and a word where they differ."""

from multilora_cli.cli.serve import _memory_lines
from multilora_cli.engine.messages import Ready


def test_planned_beside_allocated_by_part() -> None:
    """A-PERF-04: a part that is more than 2 % off is said to be; one nobody measured is not."""
    mib = 2**20
    ready = Ready(
        device="cuda:0", dtype="bfloat16", max_model_len=8192, num_pages=100, page_bytes=2 * mib,
        planned={"weights": 100 * mib, "pool": 200 * mib, "workspace": 50 * mib, "lists": 10 * mib},
        allocated={"weights": 101 * mib, "pool": 200 * mib, "lists": 12 * mib, "context": mib},
    )  # fmt: skip
    assert _memory_lines(ready) == [
        "weights 100 MiB planned, 101 MiB allocated",
        "pool 200 MiB planned, 200 MiB allocated",
        "workspace 50 MiB planned",
        "lists 10 MiB planned, 12 MiB allocated (+20.0%, more than 2 % off)",
        "context 1 MiB allocated, not planned",
    ]
