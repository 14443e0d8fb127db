"""Our threads where vLLM wants them.

vLLM binds each thread of OpenMP to a core of its own, the main thread, which runs the model, among them, to the first.
Threads that this one starts inherit its one core, and the engine would count one core. So before it counts, all cores
of the process are looked up; and each of its threads gets one of them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

TASKS = Path("/proc/self/task")


@cache
def share_cores() -> None:
    """Start the engine's threads, one on each core that OpenMP's threads are bound to; once in a process."""
    torch.ones(1 << 20).add_(1)  # OpenMP starts its threads, and binds them, when they are first needed
    cores = bound_cores()
    with _allowed(cores):
        from trilobite.kernels import ops  # the engine counts the cores when it is imported

        before = _tasks()
        ops.start_threads()
    ours = sorted(_tasks() - before)
    own = os.sched_getaffinity(0)
    if len(own) == 1:  # OpenMP's threads are bound
        for task, core in zip(ours, sorted(cores - own), strict=False):
            os.sched_setaffinity(task, {core})


def bound_cores() -> set[int]:
    """The cores on which any thread of this process may run."""
    return set().union(*(_cores(task) for task in _tasks()))


def _cores(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:  # it has ended
        return set()


def _tasks() -> set[int]:
    return {int(task.name) for task in TASKS.iterdir()}


@contextmanager
def _allowed(cores: set[int]) -> Iterator[None]:
    """Let this thread, and so those that it starts, run on these cores meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
