"""Lines of a plan, many side by side: what is packed when, and what is told of it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilobite.checkpoint.packed import PackedWriter
from trilobite.checkpoint.source import Source
from trilobite.quantize.budget.loss import Importance
from trilobite.quantize.calibrate.protocols import Records
from trilobite.quantize.finetune.store import TunedStore
from trilobite.quantize.plan.plan import Plan, PlanLine, decoded
from trilobite.quantize.run.executor import MOST_TASKS, Executor
from trilobite.quantize.run.lines import memory_of, pack_matrix
from trilobite.quantize.run.options import Options
from trilobite.quantize.threads import Piece, results, single_threaded_torch, thread_pool

if TYPE_CHECKING:  # brings transformers along
    from trilobite.quantize.calibrate.model import BlockModel


@dataclass(frozen=True, kw_only=True)
class Work:
    """One run: where weights come from, what becomes of them and where they go; takes Hessians (calibrate/protocols).

    executor: packs lines    tuned: what fine-tuning found
    """

    source: Source
    plan: Plan
    writer: PackedWriter
    executor: Executor
    options: Options
    device: torch.device
    tuned: TunedStore

    @property
    def jobs(self) -> int:
        """Threads of this process that compute."""
        return self.options.threads(self.device)

    def run(self, lines: Sequence[PlanLine], hessians: Importance | None = None) -> None:
        """Finish lines, as many at a time as the memory bound allows. hessians: of all of them, where they have any."""

        def finish(part: Sequence[PlanLine]) -> Records:
            m = part[0].matrix
            return self.executor.pack(part, None if hessians is None else hessians.get(m.name, m.shape[1]))

        parts = self.executor.portions(lines) if hessians is None else ([line] for line in lines)
        pieces = (
            Piece(call=partial(finish, part), cost=max(memory_of(line, self.source) for line in part))
            for part in parts
        )
        with single_threaded_torch(), thread_pool(MOST_TASKS, "quantize") as pool:
            found = results(pool, pieces, jobs=self.executor.slots, budget=self.executor.budget)
            for line, record in chain.from_iterable(found):
                self.done(line, record)

    def done(self, line: PlanLine, record: Mapping[str, Any], *, fresh: bool = True) -> None:
        """A line is done, by this run (fresh) or by an earlier one: tell who looks on. Called by the main thread."""
        if self.options.on_line:
            self.options.on_line(line, record, fresh)

    @property
    def copies(self) -> int:
        """Of a Hessian in work, on this machine."""
        return self.executor.copies

    def slots(self, jobs: int) -> int:
        """Hessians in work at a time, wherever that is."""
        return self.executor.slots()

    def block(self, index: int | None, lines: Sequence[PlanLine]) -> AbstractContextManager[None]:
        """Lines are written one by one."""
        return nullcontext()

    def take(self, lines: Sequence[PlanLine], hessian: Tensor, note: Mapping[str, Any]) -> Records:
        """Quantize and write the lines that share a Hessian."""
        return self.executor.pack(lines, (hessian, note))

    def unseen(self, lines: Sequence[PlanLine]) -> None:
        """Quantize what the model never runs: no input is as good as any other."""
        for line in lines:
            k = line.matrix.shape[1]
            hessian = torch.ones(k) if line.importance else torch.eye(k)
            for done in self.executor.pack([line], (hessian, {"tokens": 0})):
                self.done(*done)

    @torch.no_grad()
    def put(self, model: "BlockModel", index: int) -> None:
        """Give a loaded block the values that it has when packed: quantized matrices decoded, and what is tuned."""
        own = model.parameters(model.blocks[index])
        for line in self.plan.lines:
            name = line.matrix.name
            if line.format and name in self.writer.done:
                place = model.place(line.matrix)
                if place is not None and model.block_of(place) == index:
                    model.put(place, decoded(line, self.stored(line), self.device, self.exponent(line)))
            elif line.format is None and name in self.tuned and (kept := model.parameter(line.matrix)) in own:
                own[kept].copy_(self.tuned[name])

    def again(self, line: PlanLine, w: Tensor, hessians: Importance | None) -> list[Tensor]:
        """The tensors of a line for other weights than the source's. w: [N, K] fp32    hessians: where it needs one."""
        m = line.matrix
        known = hessians.get(m.name, m.shape[1]) if hessians is not None and line.calibrated else None
        return pack_matrix(w, line, self.plan.recipe, self.device, known)[0]

    def exponent(self, line: PlanLine) -> int:
        """Of the power of two that a finished line is multiplied with."""
        return int(self.writer.done[line.matrix.name].get("exponent", 0))

    def stored(self, line: PlanLine) -> list[Tensor]:
        """The tensors of a finished line, tuned where they are."""
        written = self.writer.read(self.writer.places[line.matrix.name].unit)
        return [self.tuned.get(t.name, data) for t, data in zip(line.stored, written, strict=True)]
