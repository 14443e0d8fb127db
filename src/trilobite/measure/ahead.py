"""Compile Triton kernels ahead of their launches, in parallel: note what launches would compile, then let workers do it.

Triton's own binder decides what a launch compiles, and its `preload` compiles just that in another process, without a
GPU, into the cache on disk where the launch will look (tests/benchmarks/test_gpu_benchmark.py holds both to it).
Triton's assembler runs in one thread, so a hundred variants take minutes one by one.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.driver import driver


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A variant of a kernel that some launch needs. data: as `preload` reads it."""

    module: str
    kernel: str
    data: str


@contextmanager
def noting() -> Iterator[dict[Wanted, None]]:
    """Note the variants that launches need, instead of compiling and launching; results are undefined."""
    found: dict[Wanted, None] = {}

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        wanted = Wanted(module=fn.module, kernel=fn.name, data=compile["specialization_data"])
        found.setdefault(wanted)
        return True  # nothing is left to do: Triton neither compiles nor launches

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = before


class Absent:
    """A driver of a GPU that this process does not touch: no context, no memory."""

    def __init__(self, capability: int) -> None:
        """capability: of the GPU, 90 for 9.0."""
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Of that capability."""
        return self.target

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


def pretend(capability: int) -> None:
    """Let this process compile for a GPU of this compute capability (90: 9.0), without one, for good."""
    driver.set_active(Absent(capability))


def pretended() -> int:
    """The compute capability that this process compiles for."""
    return int(driver.active.get_current_target().arch)


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _settle_keys(kernels: Iterable[tuple[str, str]]) -> None:
    """Hash the kernels in this order: in Triton 3.6 a kernel's key depends on which were hashed before it."""
    for module, name in kernels:
        _ = _kernel(module, name).cache_key


def _begin(capability: int, kernels: list[tuple[str, str]]) -> None:
    pretend(capability)
    _settle_keys(kernels)


def compile_one(wanted: Wanted) -> str:
    """Compile a variant into the cache. returns: what went wrong, or nothing."""
    try:
        _kernel(wanted.module, wanted.kernel).preload(wanted.data)
    except Exception as e:
        return f"{wanted.kernel}: {reason(e)}"
    return ""


def compile_all(wanted: list[Wanted], capability: int, processes: int, report: Callable[[str], None]) -> int:
    """Compile all of them. report: gets a line for each that fails. returns: how many are in the cache now."""
    kernels = list(dict.fromkeys((w.module, w.kernel) for w in wanted))
    _settle_keys(kernels)
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (capability, kernels)) as pool:
        failed = [message for message in pool.map(compile_one, wanted) if message]
    for message in failed:
        report(message)
    return len(wanted) - len(failed)


def cores() -> int:
    """Cores that this process may use, and has a use for."""
    return min(32, len(os.sched_getaffinity(0)))


def reason(e: BaseException) -> str:
    """An exception in one line: of the first cause of a compiler's, which says where before it says what."""
    while e.__cause__ is not None:
        e = e.__cause__
    lines = str(e).strip().splitlines() or [""]
    return f"{type(e).__name__}: {lines[-1] if isinstance(e, TritonError) else lines[0]}"
