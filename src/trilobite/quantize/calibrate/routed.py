"""The Hessians of routed experts: their tokens, taken from what entered the module that holds them all."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trilobite.models.wide_products import wide_products
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.stacked_experts import intermediate
from trilobite.quantize.methods.hessian import HessianSum, hessian_note, own_part, shrink
from trilobite.quantize.naming import naming
from trilobite.quantize.plan.plan import PlanLine

ROWS = 4096
"""Tokens of an expert that are multiplied at a time."""
AVERAGE = 8
"""The layer's average is taken over about this many tokens per column, evenly spread over all that were routed."""


class Routed:
    """What entered one module of stacked experts, and which expert every token went to."""

    def __init__(
        self,
        model: BlockModel,
        path: str,
        room: Callable[[int, torch.dtype], Tensor],
        kind: type[HessianSum] = HessianSum,
    ) -> None:
        """path: of the module    room: for [tokens, H], given H and a dtype    kind: what is summed up."""
        self.kind = kind
        self.model, self.path, self.room = model, path, room
        self.experts: Any = model.module(path)
        self.index: list[Tensor] = []
        self.tokens = 0
        self.states: Tensor | None = None
        self.average: dict[str, Tensor | None] = {"in": None, "mid": None}

    def put(self, states: Tensor, index: Tensor) -> None:
        """Keep a batch. states: [T, H]    index: [T, A]; batches come in order."""
        if self.states is None:
            self.states = self.room(states.shape[1], states.dtype)
        self.states[self.tokens : self.tokens + len(states)] = states.to(self.states.device)
        self.tokens += len(states)
        self.index.append(index.to("cpu", torch.int32))

    def finish(self, wanted: Mapping[int, Sequence[PlanLine]]) -> None:
        """All batches are there: sort tokens by expert; the layer's average, if any expert wanted saw too few."""
        index = torch.cat(self.index)
        tokens, slots = index.shape
        # Stable: the tokens of an expert stay in the order of the text, in which sums are taken.
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=self.count)[: self.count]
        ends = counts.cumsum(0).tolist()
        rows = torch.arange(tokens).repeat_interleave(slots)[order]
        self.rows = [rows[end - n : end] for end, n in zip(ends, counts.tolist(), strict=True)]
        lines = [(len(self.rows[e]), line) for e, of_e in wanted.items() for line in of_e]
        scarce = {_side(line) for n, line in lines if n < self.kind.needed(line.matrix.shape[1])}
        if scarce and ends[-1]:
            self._average(scarce, ends[-1])

    @property
    def count(self) -> int:
        """Experts of the layer. Higher indices mean none."""
        return len(self.experts.down_proj)

    def _average(self, sides: Collection[str], total: int) -> None:
        """E[x x^T] over evenly spread pairs of token and expert: every expert counts as much as it is used."""
        sums = {side: self.kind() for side in sides}
        # By the wider side, wanted or not: a resumed run wants less, and has to pick the same tokens.
        stride = max(1, total // (AVERAGE * self._widest))
        before = 0
        for expert, rows in enumerate(self.rows):
            picked = rows[-before % stride :: stride]
            before += len(rows)
            for part in torch.split(picked, ROWS) if len(picked) else ():
                self._add(sums, expert, part)
        with naming(self.path):
            self.average |= {side: s.mean() for side, s in sums.items() if s.tokens}

    @property
    def _widest(self) -> int:
        """The larger one of H and I."""
        return int(max(self.experts.down_proj.shape[1:]))

    @torch.no_grad()
    def _add(self, sums: Mapping[str, HessianSum], expert: int, rows: Tensor) -> None:
        assert self.states is not None
        x = self.states[rows].to(self.model.device)
        if "in" in sums:
            sums["in"].add(x)
        if "mid" in sums:
            with wide_products(self.model.dtype, self.model.device):
                mid = intermediate(self.experts, expert, x)
            sums["mid"].add(mid)

    def parallel(self, slots: int, copies: int, memory: int) -> int:
        """Experts in work at a time: so many copies of their Hessians fit half the bound."""
        return max(1, min(slots, memory // 2 // (copies * 4 * self._widest**2)))

    def hessians(
        self, expert: int, lines: Sequence[PlanLine]
    ) -> Iterator[tuple[Sequence[PlanLine], Tensor, dict[str, Any]]]:
        """Lines of one expert with the Hessian that they share and what to note of it, those of its inputs first."""
        rows = self.rows[expert]
        for side in ("in", "mid"):
            of_side = [line for line in lines if _side(line) == side]
            if not of_side:
                continue
            sums = {side: self.kind()}
            for part in torch.split(rows, ROWS) if len(rows) else ():
                self._add(sums, expert, part)
            k = of_side[0].matrix.shape[1]
            counts = own_part(len(rows), k, self.kind)
            with naming(of_side[0].matrix.name):
                own = sums[side].mean() if len(rows) else None
            h = shrink(own, self.average[side], counts, k, self.kind)
            del own, sums
            yield of_side, h, hessian_note(len(rows), counts)


def _side(line: PlanLine) -> str:
    """Whether an expert's matrix sees the layer's input or what its gate and up made of it."""
    return "mid" if line.matrix.projection == "down" else "in"
