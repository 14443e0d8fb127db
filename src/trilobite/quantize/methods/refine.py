"""Sub-scales and super-scales of least squared error, from lines that know no grid.

A line rounded to the grid of its super-scale is off by up to half a step of scale and offset, in groups of 16 more than
a fresh start loses. So for every group all pairs of a few sub-scales and offset codes around the line are tried, each
with its best codes; then the super-scale of a span is fitted to what its groups count, and the search begins again.
"""

import torch
from torch import Tensor

from trilobite.formats import affine, superscale
from trilobite.formats.affine import Grid
from trilobite.recipe import Format

ROUNDS = 3
"""Searches, each with a super-scale fitted to what the last one found."""
SCALE_STEPS = (-2, -1, 0, 1, 2)
OFFSET_STEPS = (-1, 0, 1)


def refined(
    w: Tensor,
    scale: Tensor,
    offset: Tensor,
    fmt: Format,
    *,
    rounds: int = ROUNDS,
    weight: Tensor | None = None,
) -> Grid:
    """The grid as stored on which rounding costs (locally) least.

    w: [N, K] fp32    scale, offset: [N, K/G] fp32, lines to begin with    weight: [K] fp32 > 0, of the columns' errors
    Raises WeightError when a value exceeds fp16.
    """
    affine.check_scales(scale, offset, fmt)
    groups = w.reshape(len(w), -1, fmt.group)
    by_column = None if weight is None else weight.view(-1, fmt.group)
    supers = superscale.widest(scale, offset, fmt)
    for _ in range(rounds):
        s, o = _nearby(
            groups, scale, offset, superscale.by_group(supers, groups.shape[1], fmt), fmt, by_column
        )
        supers = _fitted(groups, s, o, supers, fmt, by_column)
        scale, offset = superscale.line(s, o, superscale.by_group(supers, groups.shape[1], fmt), fmt.bits)
    return affine.super_grid(s, o, supers, fmt)


def line_within(
    group: Tensor, line: tuple[Tensor, Tensor | None], units: Tensor, fmt: Format, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Sub-scale and offset code [N] on which one group costs (locally) least in given units.

    group: [N, G] fp32    line: scale and offset [N] or [N, 1], to begin with    units: [N]    weight: [G] fp32 > 0
    """
    scale, offset = line
    assert offset is not None
    start = scale.view(-1, 1), offset.view(-1, 1)
    s, o = _nearby(group[:, None], *start, units[:, None], fmt, weight[None])
    return s[:, 0], o[:, 0]


def _counts(groups: Tensor, s: Tensor, o: Tensor, fmt: Format) -> Tensor:
    """What the best codes of groups [N, groups, G], in units, count: integers of that shape."""
    s, base = s[..., None], (superscale.UNITS[fmt.bits] * (o - superscale.MOST))[..., None]
    return ((groups - base) / s).round_().clamp_(0, 2**fmt.bits - 1).mul_(s).add_(base)


def _sum(squares: Tensor, weight: Tensor | None) -> Tensor:
    return squares.sum(-1) if weight is None else (squares * weight).sum(-1)


def _nearby(
    groups: Tensor, scale: Tensor, offset: Tensor, supers: Tensor, fmt: Format, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The best pair of sub-scale and offset code around each line. All but `groups` and `weight`: [N, groups]."""
    units = groups * torch.where(supers != 0, 1 / supers, 0.0)[..., None]
    first, middle = superscale.in_units(scale, offset, supers, fmt.bits)
    best_s, best_o = torch.ones_like(first), torch.full_like(first, superscale.MOST)
    least = torch.full_like(first, torch.inf)
    for more in SCALE_STEPS:
        s = (first + more).clamp_(1, superscale.SCALES)
        nearest = superscale.offset_at(s, middle, fmt.bits)
        most = superscale.most_offset(s, fmt.bits)
        for step in OFFSET_STEPS:
            o = torch.minimum((nearest + step).clamp_(min=0), most)
            error = _sum((units - _counts(units, s, o, fmt)).square_(), weight)
            better = error < least
            least = torch.where(better, error, least)
            best_s, best_o = torch.where(better, s, best_s), torch.where(better, o, best_o)
    return best_s, best_o


def _fitted(
    groups: Tensor, s: Tensor, o: Tensor, supers: Tensor, fmt: Format, weight: Tensor | None
) -> Tensor:
    """The units [N, D], as stored, of least error for the codes that they gave; zero spans keep theirs."""
    by_group = superscale.by_group(supers, groups.shape[1], fmt)
    inverse = torch.where(by_group != 0, 1 / by_group, 0.0)
    counts = _counts(groups * inverse[..., None], s, o, fmt)
    along = superscale.spans(_sum(counts * groups, weight), fmt).sum(-1)
    square = superscale.spans(_sum(counts.square(), weight), fmt).sum(-1)
    return superscale.rounded(torch.where(square > 0, along / square.clamp_min(1e-30), supers))
