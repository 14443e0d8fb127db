"""Lines that need no run of the model: quantized and written by several threads, within the memory bound."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trilobite.checkpoint.layout import Unit
from trilobite.checkpoint.packed import PackedWriter
from trilobite.checkpoint.source import DTYPES, Source
from trilobite.quantize.calibrate.store import HessianStore
from trilobite.quantize.plan.plan import Plan, PlanLine
from trilobite.quantize.run.one_line import KnownHessian, pack_line
from trilobite.quantize.run.options import Options
from trilobite.quantize.threads import Piece, results, single_threaded_torch, thread_pool
from trilobite.recipe import LatticeFormat

SLACK = 400 * 2**20
"""Memory for matrices in work beyond twice the largest one; the rest of the promised gigabyte is Python and torch."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One run: where weights come from, what becomes of them and where they go. units: by matrix, of all lines."""

    source: Source
    plan: Plan
    writer: PackedWriter
    units: Mapping[str, Unit]
    options: Options
    device: torch.device

    @property
    def jobs(self) -> int:
        """Matrices in work at a time."""
        return self.options.threads(self.device)

    def finish(self, line: PlanLine, known: KnownHessian | None = None) -> dict[str, Any]:
        """Quantize a line and write it; returns its record. Called by threads."""
        started = time.monotonic()
        tensors, record = pack_line(self.source, line, self.plan.recipe, self.device, known)
        record["seconds"] = round(time.monotonic() - started, 3)
        self.writer.write(self.units[line.matrix.name], tensors, record)
        return record

    def run(self, lines: Sequence[PlanLine], hessians: HessianStore | None = None) -> None:
        """Finish lines, as many at a time as the memory bound allows. hessians: of all of them, where they have any."""

        def finish(line: PlanLine) -> tuple[PlanLine, dict[str, Any]]:
            known = None if hessians is None else hessians.get(line.matrix.name, line.matrix.shape[1])
            return line, self.finish(line, known)

        pieces = (Piece(call=partial(finish, line), cost=_memory(line, self.source)) for line in lines)
        with single_threaded_torch(), thread_pool(self.jobs, "quantize") as pool:
            for line, record in results(pool, pieces, jobs=self.jobs, budget=_budget(self.plan)):
                self.tell(line, record, fresh=True)

    def tell(self, line: PlanLine, record: Mapping[str, Any], *, fresh: bool) -> None:
        """A line is done, by this run (fresh) or by an earlier one: tell who looks on. Called by the main thread."""
        if self.options.on_line:
            self.options.on_line(line, record, fresh)


def _memory(line: PlanLine, source: Source) -> int:
    """Bytes that a line in work holds: the mapped source, the working copy of MiLo, the result, the bands."""
    numel = torch.Size(line.matrix.shape).numel()
    mapped = numel * max(1, DTYPES[source.tensors[line.matrix.source].dtype].itemsize)
    n, k = line.matrix.shape if len(line.matrix.shape) == 2 else (numel, 1)
    low_rank = 4 * numel + 16 * (line.rank + 32) * (n + k) if line.rank else 0
    # The whole matrix is rotated; its codes are 64-bit while they are found.
    rotated = 12 * numel if isinstance(line.format, LatticeFormat) else 0
    converted = 4 * numel if line.matrix.view.scale or line.matrix.view.transposed else 0
    # H and four copies to factor it; weights, codes, errors.
    against = 20 * k * k + 12 * numel if line.calibrated else 0
    return mapped + low_rank + rotated + converted + against + line.nbytes + 32 * 2**20


def _budget(plan: Plan) -> int:
    largest = max(torch.Size(line.matrix.shape).numel() for line in plan.lines)
    return 2 * 4 * largest + SLACK
