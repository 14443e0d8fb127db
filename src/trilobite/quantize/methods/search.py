"""Scale and offset of least squared error per group: multi-start alternation of rounding and regression.

For fixed codes the best scale and offset are a line fit of the weights on the codes; for fixed scales the best codes
are the nearest ones. Alternating the two never increases the error but finds a local minimum, so it starts from the
min-max range shrunk by several factors, and every group keeps the best scale and offset that it has seen. Weights that
have changed a little may begin with the lines found before.
"""

import torch
from torch import Tensor

from trilobite.quantize.methods.rtn import rtn
from trilobite.recipe import Format

SHRINKS = {2: (1.0, 0.85, 0.7, 0.55), 3: (1.0, 0.85, 0.7), 4: (1.0, 0.85), 8: (1.0,)}
"""Factors on the min-max range to start from, by bits: the fewer codes, the more clipping pays."""
STEPS = 8
"""Alternations from each start."""

Scales = tuple[Tensor, Tensor | None]
"""Scale and offset of some groups, what a code stands for; a symmetric format has no offset."""


def search(
    groups: Tensor,
    fmt: Format,
    steps: int = STEPS,
    weight: Tensor | None = None,
    start: Scales | None = None,
) -> Scales:
    """Scale and offset of (locally) least squared error per group.

    groups: [M, G] fp32    steps: alternations from each start    weight: [G] fp32 > 0, of the columns' errors
    start: scale and offset [M], to start from in place of ranges
    returns: scale [M], offset [M] or None for a symmetric format
    """
    best_error = torch.full_like(groups[:, 0], torch.inf)
    starts = _shrunk_ranges(groups, fmt) if start is None else [start]
    best_scale, best_offset = starts[0]
    for scales in starts:
        for step in range(steps + 1):
            codes = _round(groups, *scales, fmt)
            error = _error(groups, codes, *scales, weight)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale = torch.where(better, scales[0], best_scale)
            if scales[1] is not None and best_offset is not None:
                best_offset = torch.where(better, scales[1], best_offset)
            if step < steps:
                scales = _fit(groups, codes, *scales, weight)
    return best_scale, best_offset


def _shrunk_ranges(groups: Tensor, fmt: Format) -> list[Scales]:
    scale, offset = rtn(groups, fmt)
    return [_shrunk(scale, offset, factor, fmt) for factor in SHRINKS[fmt.bits]]


def _shrunk(scale: Tensor, offset: Tensor | None, factor: float, fmt: Format) -> Scales:
    if offset is None:
        return scale * factor, None
    middle = offset + scale * ((2**fmt.bits - 1) / 2)
    return scale * factor, middle - (middle - offset) * factor


def _round(groups: Tensor, scale: Tensor, offset: Tensor | None, fmt: Format) -> Tensor:
    """Nearest codes as fp32; symmetric codes are centred on zero."""
    inverse = torch.where(scale != 0, 1 / scale, torch.zeros_like(scale))[:, None]
    if offset is None:
        centre = 2 ** (fmt.bits - 1)
        return (groups * inverse).round_().clamp_(-centre, centre - 1)
    return (groups - offset[:, None]).mul_(inverse).round_().clamp_(0, 2**fmt.bits - 1)


def _sum(values: Tensor, weight: Tensor | None) -> Tensor:
    return values.sum(-1) if weight is None else values @ weight


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    return values.mean(-1) if weight is None else values @ (weight / weight.sum())


def _error(
    groups: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, weight: Tensor | None
) -> Tensor:
    residual = groups - codes * scale[:, None]
    if offset is not None:
        residual -= offset[:, None]
    return _sum(residual.square_(), weight)


def _fit(
    groups: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, weight: Tensor | None
) -> Scales:
    """Least squares line of the weights on the codes; a group with a single code keeps its scale."""
    if offset is None:
        square = _sum(codes.square(), weight)
        fitted = _sum(codes * groups, weight) / square.clamp_min(1e-30)
        return torch.where(square > 0, fitted, scale), None
    mean_q, mean_w = _mean(codes, weight), _mean(groups, weight)
    centred = codes - mean_q[:, None]
    square = _sum(centred.square(), weight)
    # Of codes that are not all the same the spread is almost 1 or more, or as much as the least weight.
    least = 0.5 if weight is None else 0.5 * float(weight.min())
    fitted = torch.where(square > least, _sum(centred * groups, weight) / square.clamp_min(least), scale)
    return fitted, mean_w - fitted * mean_q
