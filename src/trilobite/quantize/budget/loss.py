"""What a format loses of a matrix: the normalized error of some of its rows, quantized as they would be."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trilobite.checkpoint.roles import Matrix, read_matrix
from trilobite.checkpoint.source import Source
from trilobite.formats.padding import fill_up
from trilobite.formats.weight import dequantize
from trilobite.quantize.methods.hessian import relative_loss
from trilobite.quantize.methods.registry import METHODS
from trilobite.quantize.naming import naming
from trilobite.quantize.plan.plan import PlanLine

ROWS = 64
"""Rows of a matrix that stand for all, evenly spread."""
EXPERTS = 4
"""Experts of a layer that stand for all, evenly spread."""


class Importance(Protocol):
    """Where the importance of a matrix's columns is found."""

    def get(self, name: str, k: int) -> tuple[Tensor, Mapping[str, Any]]:
        """Of a matrix of k columns: a Hessian [k, k] or its diagonal [k], fp32, and what is noted of it."""


def of_columns(importance: Importance | None, m: Matrix) -> Tensor | None:
    """That of a matrix's columns, [K] fp32; None = all alike."""
    if importance is None:
        return None
    h = importance.get(m.name, m.shape[1])[0]
    return h.diagonal() if h.dim() == 2 else h


def normalized_errors(source: Source, lines: Sequence[PlanLine], importance: Tensor | None) -> list[float]:
    """Σ_ij h_j (w_ij - ŵ_ij)² over Σ_ij h_j w_ij² of some rows of one matrix, as each of several plans has it.

    lines: that of the matrix in each plan    importance: h [K] fp32, None = all columns alike
    Raises WeightError that names the matrix.
    """
    w = read_matrix(source, lines[0].matrix)
    step = max(1, w.shape[0] // ROWS)
    rows = w[step // 2 :: step][:ROWS].float()
    with naming(lines[0].matrix.name):
        return [_error(rows, line, importance) for line in lines]


def _error(rows: Tensor, line: PlanLine, importance: Tensor | None) -> float:
    if line.format is None:
        return 0.0
    k = line.packed_shape[1]
    h = torch.ones(k) if importance is None else fill_up(importance, k)
    filled = fill_up(rows, k)
    packed = METHODS[line.method](filled, line.format, hessian=h if line.importance else None).weight
    return relative_loss(filled, dequantize(packed), h)
