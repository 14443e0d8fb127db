"""Pieces of work in threads: at most so many, within the budget, taken late, and what a failure leaves behind."""

import threading
import time
from collections.abc import Iterator

import pytest

from trilobite.quantize.threads import Piece, results, thread_pool


class Crowd:
    """How many bytes and how many pieces were in work at once."""

    def __init__(self, meeting: int = 0) -> None:
        """meeting: so many first pieces wait for each other, however busy the machine is."""
        self.lock, self.meeting = threading.Lock(), meeting
        self.barrier = threading.Barrier(max(1, meeting))
        self.count = self.cost = self.most = self.dearest = 0

    def piece(self, number: int, cost: int) -> Piece[int]:
        def work() -> int:
            with self.lock:
                self.count += 1
                self.cost += cost
                self.most, self.dearest = max(self.most, self.count), max(self.dearest, self.cost)
            if number < self.meeting:
                self.barrier.wait(timeout=60)
            time.sleep(0.002)
            with self.lock:
                self.count -= 1
                self.cost -= cost
            return number

        return Piece(call=work, cost=cost)


@pytest.mark.parametrize(("jobs", "budget"), [(1, 100), (4, 100), (4, 12), (4, 3)])
def test_results_within_the_bounds(jobs: int, budget: int) -> None:
    crowd, costs = Crowd(jobs if budget == 100 else 0), [5, 3, 9, 1, 1, 1, 1, 40, 2, 6]
    with thread_pool(jobs, "test") as pool:
        pieces = (crowd.piece(i, cost) for i, cost in enumerate(costs))
        found = list(results(pool, pieces, jobs=lambda: jobs, budget=budget))
    assert sorted(found) == list(range(len(costs)))
    assert crowd.most <= jobs
    assert crowd.dearest <= max(budget, 40)  # what is above the budget runs alone
    if jobs == 1:
        assert found == sorted(found)
    if budget == 100:
        assert crowd.most == jobs


def test_pieces_are_taken_when_they_can_begin() -> None:
    taken = 0

    def pieces() -> Iterator[Piece[int]]:
        nonlocal taken
        for i in range(9):
            taken += 1
            yield Piece(call=lambda i=i: i)  # type: ignore[misc]

    with thread_pool(2, "test") as pool:
        for done, _ in enumerate(results(pool, pieces(), jobs=lambda: 2), 1):
            assert taken <= done + 2
    assert taken == 9


def test_nothing_to_do() -> None:
    with thread_pool(2, "test") as pool:
        assert list(results(pool, iter([]), jobs=lambda: 2)) == []


def test_a_failure_waits_for_nobody() -> None:
    """The error arrives while another piece is still in work, and no other piece begins."""
    release, began = threading.Event(), []

    def slow() -> None:
        release.wait(20)

    def fail() -> None:
        raise ZeroDivisionError

    calls = [slow, fail, lambda: began.append(1)]
    started = time.monotonic()
    try:
        with pytest.raises(ZeroDivisionError), thread_pool(2, "test") as pool:
            list(results(pool, (Piece(call=call) for call in calls), jobs=lambda: 2))
        assert time.monotonic() - started < 10
    finally:
        release.set()
    assert began == []
