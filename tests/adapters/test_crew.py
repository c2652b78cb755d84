"""Threads that share the work of a load: every job once, nobody waits for a thread to come free."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from multilora_cli.adapters.crew import Crew


def test_every_job_once_on_several_threads() -> None:
    done: list[int] = []
    threads: set[int] = set()
    together = threading.Barrier(3)

    def job(number: int) -> None:
        if number < 3:
            together.wait(10)  # only passed where three threads work
        threads.add(threading.get_ident())
        done.append(number)

    with ThreadPoolExecutor(4) as executor:
        Crew(executor, 2).each([lambda n=n: job(n) for n in range(100)])  # type: ignore[misc]
    assert sorted(done) == list(range(100)) and len(threads) == 3
    assert threading.get_ident() in threads


def test_a_busy_executor_is_not_waited_for() -> None:
    """A load that asks from the only thread there is does everything itself."""
    with ThreadPoolExecutor(1) as executor:
        crew, done = Crew(executor, 3), []

        def load() -> None:
            digest = crew.begin(lambda: done.append("digest"))
            crew.each([lambda: done.append("piece")] * 3)
            digest()

        executor.submit(load).result(10)
        assert done == ["piece"] * 3 + ["digest"]


def test_without_threads() -> None:
    done: list[str] = []
    crew = Crew()
    finish = crew.begin(lambda: done.append("digest"))
    crew.each([])
    crew.each([lambda: done.append("piece")])
    finish()
    assert done == ["piece", "digest"]


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_failure_is_raised_and_no_job_begun_after_it(helpers: int) -> None:
    """Those under way end first: what they write to is given back afterwards."""
    failed, seen, ended = threading.Event(), [], []

    def fail() -> None:
        failed.set()
        raise IndexError("broken")

    def slow() -> None:
        seen.append(1)
        failed.wait(10)
        ended.append(1)

    with ThreadPoolExecutor(2) as executor:
        crew = Crew(executor if helpers else None, helpers)
        with pytest.raises(IndexError, match="broken"):
            crew.each([*[slow] * helpers, fail, *[slow] * 50])
        assert len(seen) == len(ended) <= helpers + 2
        with pytest.raises(IndexError, match="broken"):
            crew.begin(fail)()
