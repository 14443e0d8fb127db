"""The importance of columns, measured before it is known what becomes of the matrices."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilobite.quantize.calibrate.protocols import Records
from trilobite.quantize.plan.plan import PlanLine

if TYPE_CHECKING:  # brings transformers along
    from trilobite.quantize.calibrate.model import BlockModel


class Diagonals:
    """Receives the diagonals of Hessians, [K] fp32 each, and gives them back by matrix."""

    copies = 5

    def __init__(self) -> None:
        """Nothing yet."""
        self._found: dict[str, tuple[Tensor, dict[str, Any]]] = {}

    def get(self, name: str, k: int) -> tuple[Tensor, dict[str, Any]]:
        """The diagonal of a matrix of k columns, [k] fp32, and what the report says of it."""
        diagonal, note = self._found[name]
        assert diagonal.shape == (k,)
        return diagonal, note

    def block(self, index: int | None, lines: Sequence[PlanLine]) -> AbstractContextManager[None]:
        """They are small: all stay in memory."""
        return nullcontext()

    def slots(self, jobs: int) -> int:
        """One a thread."""
        return jobs

    def take(self, lines: Sequence[PlanLine], hessian: Tensor, note: Mapping[str, Any]) -> Records:
        """Keep what some lines share. hessian: [K] fp32."""
        for line in lines:
            self._found[line.matrix.name] = hessian.cpu(), dict(note)
        return [(line, {}) for line in lines]

    def done(self, line: PlanLine, record: Mapping[str, Any]) -> None:
        """It is kept already."""

    def unseen(self, lines: Sequence[PlanLine]) -> None:
        """What the model never runs: all columns count alike."""
        for line in lines:
            self._found[line.matrix.name] = torch.ones(line.matrix.shape[1]), {"tokens": 0}

    def put(self, model: "BlockModel", index: int) -> None:
        """The original model is what is measured."""
