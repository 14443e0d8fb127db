"""Threads without memory for them."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from trilobite.errors import exhausted
from trilobite.pool import ROOM, ThreadPool


def in_a_child(call: Callable[[], object]) -> str:
    """What the call raises in a process of its own with little more memory than it has."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        os.waitpid(child, 0)
        with open(read) as told:
            return told.read()
    try:
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM // 2
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        call()
    except Exception as e:
        os.write(write, f"{exhausted(e)} {type(e).__name__}".encode())
    finally:
        os._exit(0)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_work_is_refused_where_a_thread_would_find_no_memory() -> None:
    assert in_a_child(lambda: ThreadPool(1).submit(int).result()) == "True OSError"


def test_it_works() -> None:
    with ThreadPool(2, "test") as pool:
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
