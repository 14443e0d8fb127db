"""Threads that share the machine: one core for each, no waiting for the rest after a failure, bounded memory."""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from trilobite.pool import ThreadPool

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Piece(Generic[T]):
    """Something for one thread to do. cost: bytes that it holds meanwhile."""

    call: Callable[[], T]
    cost: int = 0


@contextmanager
def thread_pool(jobs: int, name: str) -> Iterator[ThreadPool]:
    """Threads that are not waited for when something fails: what they were making is made again by the next run."""
    pool = ThreadPool(jobs, thread_name_prefix=name)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def results(
    pool: ThreadPool, pieces: Iterable[Piece[T]], *, jobs: Callable[[], int], budget: float = math.inf
) -> Iterator[T]:
    """Results as they come, of pieces that begin in order, within a budget of bytes.

    jobs: how many at a time, asked again whenever one has ended
    A piece above the budget runs alone. Pieces are taken from the iterable no sooner than they can begin.
    """
    waiting = iter(pieces)
    held: Piece[T] | None = None
    running: dict[Future[T], int] = {}
    while True:
        while len(running) < jobs():
            held = held or next(waiting, None)
            if held is None or (running and sum(running.values()) + held.cost > budget):
                break
            running[pool.submit(held.call)] = held.cost
            held = None
        if not running:
            return
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            del running[future]
            yield future.result()


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """One thread for each matrix in work, so that results do not depend on how many cores share a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
