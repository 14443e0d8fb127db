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
SAMPLE = 16
"""Rows for each rank, where compensators are tried: with few of them noise would look as if it had a low rank."""
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

    What compensators leave of it is what as low a rank leaves of the residual of rounding alone.

    lines: that of the matrix in each plan    importance: h [K] fp32, None = all columns alike
    Raises WeightError that names the matrix.
    """
    w = read_matrix(source, lines[0].matrix)
    with naming(lines[0].matrix.name):
        by_format = {line.format: line for line in lines}
        errors = {fmt: _error(_rows(w, ROWS), line, importance)[0] for fmt, line in by_format.items()}
        left = _left(w, lines, importance)
    return [errors[line.format] * left[line.rank] for line in lines]


def _rows(w: Tensor, count: int) -> Tensor:
    """So many rows, evenly spread, or all where there are fewer: [S, K] fp32."""
    step = max(1, w.shape[0] // count)
    return w[step // 2 :: step][:count].float()


def _left(w: Tensor, lines: Sequence[PlanLine], importance: Tensor | None) -> dict[int, float]:
    """What a compensator of each rank leaves of the error: hardly anything else decides than the rank."""
    ranks = {line.rank: line for line in lines}
    left = {0: 1.0}
    for rank, line in ranks.items():
        if rank:
            _, residual = _error(_rows(w, max(ROWS, SAMPLE * rank)), line, importance)
            energy = torch.linalg.svdvals(residual).square_()
            left[rank] = float(energy[rank:].sum() / energy.sum().clamp_min(1e-30))
    return left


def _error(rows: Tensor, line: PlanLine, importance: Tensor | None) -> tuple[float, Tensor]:
    """The error of rounding alone, and the residual with its columns times √h, [S, K] fp32."""
    if line.format is None:
        return 0.0, torch.zeros_like(rows)
    k = line.packed_shape[1]
    h = torch.ones(k) if importance is None else fill_up(importance, k)
    filled = fill_up(rows, k)
    decoded = dequantize(
        METHODS[line.method](filled, line.format, hessian=h if line.importance else None).weight
    )
    return relative_loss(filled, decoded, h), (filled - decoded) * h.sqrt()
