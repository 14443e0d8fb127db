"""Measure the cases of benchmarks/gpu/measure.py unattended: within so many minutes, and whatever fails."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.rows import Row, cells
from trilobite.measure.ahead import Wanted, compile_all, cores, noting, reason
from trilobite.measure.gpu import seconds

Calls = Sequence[Callable[[], object]]


@dataclass(kw_only=True)
class Clock:
    """Measures calls. dry: makes the first of them only, so that somebody can note what it launches.

    first: seconds of all first calls: what was not compiled ahead, and loading what was
    """

    dry: bool = False
    first: float = 0.0

    def __call__(self, calls: Calls) -> float:
        """Seconds of one call; 1 if dry."""
        start = time.perf_counter()
        calls[0]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.first += time.perf_counter() - start
        return 1.0 if self.dry else seconds(calls)

    def baseline(self, name: str, make: Callable[[], Calls]) -> float:
        """Seconds of somebody else's kernels, whose calls are made unless dry; NaN where they do not run."""
        if self.dry:
            return math.nan
        calls = make()
        try:
            return self(calls)
        except Exception as e:
            print(f"{name}: {reason(e)}", flush=True)
            return math.nan


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table, not yet measured. least: seconds that it may take, else it does not begin."""

    name: str
    run: Callable[[Clock], Row]
    least: float = 0.0


class LeftOutError(Exception):
    """There is no time, or no room on this GPU, for a case."""


class Run:
    """Goes through the cases of all parts; no case begins after so many minutes, and a failure costs one case."""

    def __init__(self, minutes: float) -> None:
        self.deadline = time.perf_counter() + 60 * minutes
        self.lost = False
        self.clock = Clock()
        self.left_out: list[str] = []
        self.failed: list[str] = []

    def part(self, cases: Iterable[Case]) -> list[Row]:
        """Measure the cases, print a line for each. returns: the rows of those that were measured."""
        rows = []
        for case in cases:
            row = self._row(case)
            if row is not None:
                print("  ".join(cells(row)), flush=True)
                rows.append(row)
        return rows

    def _row(self, case: Case) -> Row | None:
        try:
            if time.perf_counter() + case.least > self.deadline:
                raise LeftOutError("no time is left")
            return case.run(self.clock)
        except LeftOutError as e:
            self.left_out.append(case.name)
            print(f"left out: {case.name}: {e}", flush=True)
        except Exception as e:
            self.failed.append(f"{case.name}: {reason(e)}")
            print(f"failed: {self.failed[-1]}", flush=True)
            self.free_memory()
        return None

    def free_memory(self) -> None:
        """Free memory. After a fault in a kernel no other runs in this process: then the part's rest is left out."""
        try:
            release()
        except RuntimeError as e:
            print(f"this process has lost the GPU, the rest of the part is left out: {reason(e)}", flush=True)
            self.deadline, self.lost = -math.inf, True

    def report(self) -> dict[str, Any]:
        """What to know beside the rows."""
        return {"first_calls_s": self.clock.first, "left_out": self.left_out, "failed": self.failed}


def release() -> None:
    """Give freed memory back. Raises RuntimeError where the GPU does not answer any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def compile_ahead(cases: Iterable[Case], capability: int) -> float:
    """Compile what the cases will launch, on all cores. returns: seconds. What fails here will fail again, by name."""
    start = time.perf_counter()
    try:
        wanted = _launched(cases)
        release()
        count = compile_all(wanted, capability, cores(), partial(print, flush=True))
        ahead = f"{count} of {len(wanted)} kernels compiled ahead by {cores()} processes"
        print(f"{ahead} in {time.perf_counter() - start:.0f} s", flush=True)
    except Exception as e:
        print(f"nothing compiled ahead: {reason(e)}", flush=True)
    return time.perf_counter() - start


def _launched(cases: Iterable[Case]) -> list[Wanted]:
    """The variants of kernels that the cases launch, found without launching them."""
    clock = Clock(dry=True)
    with noting() as wanted:
        for case in cases:
            try:
                case.run(clock)
            except Exception as e:
                print(f"not compiled ahead: {case.name}: {reason(e)}", flush=True)
    return list(wanted)
