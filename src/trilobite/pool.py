"""Threads for pieces of work, started only where there is memory for them."""

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

ROOM = 64 * 2**20
"""Bytes of addresses that must be free: stacks of 8 MiB are usual, and a thread needs little else to begin."""


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor that raises where Python would hang.

    A thread that finds no memory when it begins dies without a word, and who started it waits for its sign of life for
    ever. Raises OSError when work is handed in and less than `ROOM` is to be had (errors.py: exhausted).
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hand in one piece; maybe a thread is started for it."""
        mmap.mmap(-1, ROOM).close()
        return super().submit(fn, *args, **kwargs)
