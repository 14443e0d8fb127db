"""Where lines of a plan are packed: in threads of this process, or by workers, processes that see the same files.

Every byte has its place before the first line is packed, so a worker reads weights and writes tensors by itself, and
what comes back is a record. This process keeps the journal. A thread waits for each task that workers do, so what
decides on order, memory and failures (quantize/threads.py) is the same for both.

Where the destination is a URL, workers need not see any file of this machine: tensors come back with their records, and
this process writes and sends them.
"""

import math
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from trilobite.checkpoint.checksums import CHECKSUMS
from trilobite.checkpoint.packed import PackedWriter
from trilobite.checkpoint.places import Mark, Place
from trilobite.checkpoint.source import Source
from trilobite.errors import DeviceError
from trilobite.pool import ThreadPool
from trilobite.quantize.calibrate.protocols import Record, Records
from trilobite.quantize.plan.plan import Plan, PlanLine
from trilobite.quantize.run.identity import code_version
from trilobite.quantize.run.lines import KnownHessian, memory_budget, memory_of, pack_line
from trilobite.quantize.threads import single_threaded_torch
from trilobite.recipe import LatticeFormat, Recipe

MOST_TASKS = 1024
"""Threads that wait for tasks at most; there are no more than tasks in work."""
PORTION = 512 * 2**20
"""Bytes of weights that a worker is asked for at a time, unless one matrix has more: seconds of its time."""
SLOW = 8
"""Times as long as other weights take those with a low rank or in a lattice format; and those that are sent back count
as much, for they wait in memory."""
TENSORS = "tensors"
"""Key of a record that has come with its tensors."""
SHARES = 2
"""Of what is left, no worker is asked for more than one part in so many times the workers: they end together."""


class Executor(Protocol):
    """Packs lines. copies: of a Hessian that this machine holds for each task in work, factors included."""

    budget: float
    copies: int

    def slots(self) -> int:
        """Tasks in work at a time, as things stand."""

    def portions(self, lines: Sequence[PlanLine]) -> Iterator[Sequence[PlanLine]]:
        """Lines in their order, cut into what one task does."""

    def pack(self, lines: Sequence[PlanLine], known: KnownHessian | None = None) -> Records:
        """Quantize lines, which share a Hessian if they need one, and write them. Called by threads."""


class Threads:
    """Packs in the thread that asks, one line at a time."""

    copies = 5

    def __init__(
        self, source: Source, plan: Plan, writer: PackedWriter, device: torch.device, jobs: int
    ) -> None:
        """jobs: lines at a time."""
        self._source, self._plan, self._writer, self._device = source, plan, writer, device
        self._jobs = jobs
        self.budget: float = memory_budget(plan)

    def slots(self) -> int:
        """One a thread."""
        return self._jobs

    def portions(self, lines: Sequence[PlanLine]) -> Iterator[Sequence[PlanLine]]:
        """One line each."""
        return ([line] for line in lines)

    def pack(self, lines: Sequence[PlanLine], known: KnownHessian | None = None) -> Records:
        """Quantize and write here and now."""
        records = []
        for line in lines:
            started = time.monotonic()
            tensors, record = pack_line(self._source, line, self._plan.recipe, self._device, known)
            record["seconds"] = round(time.monotonic() - started, 3)
            self._writer.write(self._writer.places[line.matrix.name].unit, tensors, record)
            records.append((line, record))
        return records


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all tasks of a run have in common. code: that rounds    mark: of the folder that is written

    Without a mark there is no such folder for workers: they give the tensors back.
    """

    source: Source
    recipe: Recipe
    mark: Mark | None
    code: str

    def check(self) -> None:
        """Whether this process can do tasks of the job. Raises DestinationError, DeviceError."""
        if self.mark:
            self.mark.check()
        if (here := rounding_code()) != self.code:
            raise DeviceError(
                f"{socket.gethostname()}: would round with {here}, and the run began with {self.code}: its bytes could "
                "differ; give the run nodes of one kind, with the same packages"
            )


@dataclass(frozen=True, kw_only=True)
class Task:
    """Lines for one worker, and where their tensors go. memory: bytes that it holds at most."""

    lines: Sequence[PlanLine]
    places: Sequence[Place]
    known: KnownHessian | None
    memory: int


class Workers(Protocol):
    """Processes that do tasks, a context manager around their use."""

    def __enter__(self) -> "Workers":
        """Find them."""

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave them."""

    def slots(self) -> int:
        """Tasks that they can do at a time, as things stand."""

    def do(self, job: Job, task: Task) -> list[Record]:
        """Let one of them do a task, another one if it dies, and wait: records with checksums or tensors, line by line.

        Called by threads. Raises what `do_task` raises, and ResourceError where one worker after the other dies.
        """


class Spread:
    """Packs with workers."""

    budget = math.inf  # the workers' memory, not ours
    copies = 2

    def __init__(self, workers: Workers, source: Source, plan: Plan, writer: PackedWriter) -> None:
        """writer: takes records of what workers wrote."""
        self._workers, self._writer, self._source = workers, writer, source
        self._job = Job(source=source, recipe=plan.recipe, mark=writer.mark, code=rounding_code())

    def slots(self) -> int:
        """One a worker."""
        return self._workers.slots()

    def portions(self, lines: Sequence[PlanLine]) -> Iterator[Sequence[PlanLine]]:
        """By bytes, the largest first; the last ones are small, so that nobody waits for one worker long.

        In their own order where finished shards are sent: unfinished ones have to fit on this machine.
        """
        if self._job.mark:
            lines = sorted(lines, key=self._cost, reverse=True)
        costs = [self._cost(line) for line in lines]
        left, first = sum(costs), 0
        while first < len(lines):
            most = min(PORTION, left / (SHARES * self.slots()))
            end, taken = first + 1, costs[first]
            while end < len(lines) and taken + costs[end] <= most:
                taken += costs[end]
                end += 1
            yield lines[first:end]
            left, first = left - taken, end

    def _cost(self, line: PlanLine) -> int:
        """Bytes of a line's weights, as many more as they take longer."""
        info = self._source.info(line.matrix.source)
        nbytes = torch.Size(line.matrix.shape).numel() * info.nbytes // max(1, torch.Size(info.shape).numel())
        slow = line.rank or isinstance(line.format, LatticeFormat) or not self._job.mark
        return nbytes * (SLOW if slow else 1)

    def pack(self, lines: Sequence[PlanLine], known: KnownHessian | None = None) -> Records:
        """Have it done, and note what is done."""
        task = Task(
            lines=lines,
            places=[self._writer.places[line.matrix.name] for line in lines],
            known=known,
            memory=max(memory_of(line, self._source) for line in lines)
            + max(line.nbytes for line in lines),  # one is stored meanwhile
        )
        records = self._workers.do(self._job, task)
        for line, record in zip(lines, records, strict=True):
            if (tensors := record.pop(TENSORS, None)) is None:
                self._writer.remember(line.matrix.name, record)
            else:
                self._writer.write(self._writer.places[line.matrix.name].unit, tensors, record)
        return list(zip(lines, records, strict=True))


def do_task(job: Job, task: Task) -> list[Record]:
    """What a worker does: quantize, write to the places, tell. The bytes are on disk once this returns.

    A line's tensors are stored while the next line is quantized; nothing is being stored any more once this raises.
    Without places that it sees: they are in the records.
    """
    records: list[Record] = []
    storing: Future[dict[str, str]] | None = None
    with single_threaded_torch(), ThreadPool(1, "store") as disk:
        for line, place in zip(task.lines, task.places, strict=True):
            started = time.monotonic()
            tensors, record = pack_line(job.source, line, job.recipe, torch.device("cpu"), task.known)
            record["seconds"] = round(time.monotonic() - started, 3)
            if storing:
                records[-1][CHECKSUMS] = storing.result()
            if job.mark:
                storing = disk.submit(place.store, tensors)
            else:
                record[TENSORS] = tensors
            records.append(record)
        if storing:
            records[-1][CHECKSUMS] = storing.result()
    return records


def rounding_code() -> str:
    """All that decides how this process rounds: our code, and the instructions that torch picks."""
    return f"{code_version(torch.device('cpu'))}, torch for {torch.backends.cpu.get_cpu_capability()}"
