"""What errors in each unit cost the whole model: rounded alone, the divergence from the original's next tokens.

Block by block: a block is loaded once and run on what every variant of the model before it made; each of its own units
is rounded in turn and begins a variant. In memory at a time are one block and the hidden states of all variants.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trilobite.checkpoint.roles import read_matrix
from trilobite.quantize.budget.loss import Importance, of_columns
from trilobite.quantize.budget.measured import Sensitivity
from trilobite.quantize.budget.units import Unit
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.methods.hessian import relative_loss
from trilobite.quantize.plan.plan import Plan, PlanLine
from trilobite.quantize.watcher import SILENT, Watcher

Round = Callable[[PlanLine, Tensor], Tensor]
"""A matrix as it would be decoded: [N, K] fp32, given its plan line and itself."""


class Prober:
    """A model whose units are rounded one at a time.

    ids: [S, T] int64
    """

    def __init__(
        self, model: BlockModel, plan: Plan, importance: Importance | None, ids: Tensor, round_: Round
    ) -> None:
        """plan: that of the format to round to    importance: by which errors are weighed."""
        self.model, self.plan, self.importance, self.ids, self.round = model, plan, importance, ids, round_

    @torch.no_grad()
    def measure(self, units: Sequence[Unit], watcher: Watcher = SILENT) -> list[Sensitivity]:
        """The sensitivity of every unit that the model runs."""
        model = self.model
        by_block: dict[int, list[Unit]] = {}
        for unit in units:
            place = model.place(self.plan.lines[unit.matrices[0]].matrix)
            index = None if place is None else model.block_of(place)
            if index is not None:
                by_block.setdefault(index, []).append(unit)
        model.load("")
        model.load(model.blocks[0])
        model.check_arguments(self.ids)
        model.learn_arguments(self.ids)
        clean = model.embed(self.ids).float()
        model.drop("")
        started: list[tuple[Unit, float]] = []
        variants: list[Tensor] = []
        for i, block in enumerate(model.blocks):
            watcher.progress("sensitivity", i, len(model.blocks))
            model.load(block)
            parameters = {name: p.float() for name, p in model.parameters(block).items()}
            moved = [model.apply(block, states, parameters) for states in variants]
            for unit in by_block.get(i, []):
                error, changed = self._rounded(block, unit)
                moved.append(model.apply(block, clean, parameters | changed))
                started.append((unit, error))
            variants, clean = moved, model.apply(block, clean, parameters)
            model.drop(block)
        watcher.progress("sensitivity", len(model.blocks), len(model.blocks))
        divergences = self._divergences(clean, variants)
        return [
            Sensitivity(unit=unit, error=error, kl=kl)
            for (unit, error), kl in zip(started, divergences, strict=True)
        ]

    def _rounded(self, block: str, unit: Unit) -> tuple[float, dict[str, Tensor]]:
        """The error of a unit and, in fp32, the parameters of the block that rounding it changes."""
        model, errors = self.model, []
        before = {name: p.clone() for name, p in model.parameters(block).items()}
        for i in unit.matrices:
            line = self.plan.lines[i]
            w, h = (
                read_matrix(self.model.source, line.matrix).float(),
                of_columns(self.importance, line.matrix),
            )
            decoded = self.round(line, w)
            errors.append(relative_loss(w, decoded, torch.ones(w.shape[1]) if h is None else h))
            place = model.place(line.matrix)
            assert place is not None
            model.put(place, decoded)
        changed = {}
        for name, p in model.parameters(block).items():
            if not torch.equal(p, before[name]):
                changed[name] = p.to(torch.float32, copy=True)
                p.copy_(before[name])
        return sum(errors) / len(errors), changed

    def _divergences(self, clean: Tensor, variants: Sequence[Tensor]) -> list[float]:
        """Mean KL divergence of each variant's next tokens from those of the original."""
        model = self.model
        model.load("")
        parameters = {name: p.float() for name, p in model.parameters("").items()}
        totals = [0.0] * len(variants)
        for s in range(len(self.ids)):
            ids = self.ids[s : s + 1]
            wanted = model.logits(ids, clean[s : s + 1], parameters).log_softmax(-1)
            for v, states in enumerate(variants):
                found = model.logits(ids, states[s : s + 1], parameters).log_softmax(-1)
                totals[v] += float((wanted.exp() * (wanted - found)).sum(dtype=torch.float64))
        model.drop("")
        return [total / self.ids.numel() for total in totals]
