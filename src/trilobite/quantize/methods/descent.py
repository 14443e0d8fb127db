"""After GPTQ: every group's line and every code once more, given all others.

Feedback lets only columns to come make up for an error, and under super-scales lines are chosen before codes are. With
E = W - W_q, moving W_q by D in the columns J changes the loss tr(E H E^T) by tr(D H_JJ D^T) - 2 tr(D (E H)_J^T). So the
best code of a column is the one nearest to w_q + (E H)_j / H_jj; the best unit of a span is a quotient; and what a pair
of sub-scale and offset code costs, the codes of its group as they are, five sums say. Only the rounding of units can
raise the loss.
"""

import torch
from torch import Tensor

from trilobite.formats import affine, superscale
from trilobite.formats.affine import Grid
from trilobite.kernels.cpu import feedback
from trilobite.recipe import Format

PASSES = 2
BLOCK = superscale.SPAN
"""Columns for which E H is computed at a time."""
LAZY = 32
"""Columns whose new codes change the slopes behind them at once."""
NEARBY = (-2, -1, 0, 1, 2)
"""Steps from a sub-scale that are tried."""


def descend(w: Tensor, codes: Tensor, grid: Grid, fmt: Format, hessian: Tensor) -> tuple[Tensor, Grid]:
    """Codes and a grid of less loss than the given ones, which GPTQ found for a format with super-scales.

    w: [N, K] fp32    codes: [N, K] uint8    hessian: [K, K] fp32 with a diagonal above zero    returns: as given
    """
    n, k = w.shape
    assert grid.super is not None
    s, o, units = (part.T.contiguous() for part in superscale.parts(grid.stored, grid.super, n))
    q = codes.T.float().contiguous()
    blocks = []
    for i, start in enumerate(range(0, k, BLOCK)):
        here, groups = slice(start, start + BLOCK), slice(start // fmt.group, (start + BLOCK) // fmt.group)
        blocks.append(_Block(q[here], s[groups], o[groups], units[i], fmt))
    error = w.T.contiguous() - torch.cat([block.decoded() for block in blocks])  # [K, N]
    natively = feedback.supports(w)
    for _ in range(PASSES):
        for i, block in enumerate(blocks):
            here = slice(i * BLOCK, (i + 1) * BLOCK)
            run = block.descend_natively if natively else block.descend
            run(error[here], hessian[here] @ error, hessian[here, here])
    found = affine.super_grid(s.T.contiguous(), o.T.contiguous(), units.T.contiguous(), fmt)
    return q.T.to(torch.uint8).contiguous(), found


class _Block:
    """The columns of a span, transposed, so that a column is a contiguous row; all fp32, in place.

    codes: [C, N]    s, o: sub-scales and offset codes [C/G, N]    unit: [N], as stored
    """

    def __init__(self, codes: Tensor, s: Tensor, o: Tensor, unit: Tensor, fmt: Format) -> None:
        self.codes, self.s, self.o, self.unit, self.fmt = codes, s, o, unit, fmt
        self._nearby = torch.tensor(NEARBY, dtype=s.dtype, device=s.device)[:, None]

    def decoded(self) -> Tensor:
        """W_q^T [C, N]."""
        return self._counts() * self.unit

    def _counts(self) -> Tensor:
        """What the codes count, in units: [C, N]."""
        by_group = self.codes.view(len(self.s), -1, self.codes.shape[1])
        base = superscale.UNITS[self.fmt.bits] * (self.o - superscale.MOST)
        return (by_group * self.s[:, None] + base[:, None]).view_as(self.codes)

    def descend_natively(self, error: Tensor, slope: Tensor, hessian: Tensor) -> None:
        """As `descend`, by the native library."""
        feedback.descend(
            self.fmt,
            codes=self.codes,
            lines=(self.s, self.o),
            units=self.unit,
            error=error,
            slope=slope,
            hessian=hessian,
        )

    def descend(self, error: Tensor, slope: Tensor, hessian: Tensor) -> None:
        """One pass. error: E^T [C, N], kept up to date, as slope, (E H)^T [C, N]    hessian: [C, C]."""
        before = self.decoded()
        self._fit_unit(slope, hessian)
        for g in range(len(self.s)):
            here = slice(g * self.fmt.group, (g + 1) * self.fmt.group)
            by = self._fit_line(g, self.codes[here], slope[here], hessian[here, here])
            slope.addmm_(hessian[:, here], by, alpha=-1)
        self._fit_codes(slope, hessian)
        error += before - self.decoded()

    def _fit_unit(self, slope: Tensor, hessian: Tensor) -> None:
        """The unit of least loss, codes and lines as they are; spans of zeros keep theirs."""
        counts = self._counts()
        square = ((hessian @ counts) * counts).sum(0)
        best = superscale.rounded(self.unit + (counts * slope).sum(0) / square.clamp_min(1e-30))
        best = torch.where((square > 0) & (self.unit > 0) & (best > 0) & (best < torch.inf), best, self.unit)
        slope.addmm_(hessian, counts * (best - self.unit), alpha=-1)
        self.unit.copy_(best)

    def _fit_line(self, g: int, codes: Tensor, slope: Tensor, hessian: Tensor) -> Tensor:
        """The best pair of a sub-scale near a group's own and any offset code, its codes as they are.

        What an offset code adds to the loss is a parabola: the best one is the nearest to its vertex that is allowed.

        codes, slope: [G, N]    hessian: [G, G]    returns: what that adds to W_q^T, [G, N]
        """
        along = hessian @ codes
        codes_codes, codes_ones, ones_ones = (along * codes).sum(0), along.sum(0), hessian.sum()
        by_codes, by_ones = (codes * slope).sum(0), slope.sum(0)
        old_s, old_o, step = self.s[g], self.o[g], self.unit * superscale.UNITS[self.fmt.bits]
        inverse = torch.where(step != 0, 1 / step, 0.0)
        s = (old_s + self._nearby).clamp_(1, superscale.SCALES)  # [5, N], as all below
        a = self.unit * (s - old_s)
        against = by_ones - a * codes_ones
        o = (old_o + against * (inverse / ones_ones)).round_().clamp_(min=0)
        o = torch.minimum(o, superscale.most_offset(s, self.fmt.bits))
        b = step * (o - old_o)
        loss = a * (a * codes_codes - 2 * by_codes) + b * (b * ones_ones - 2 * against)
        least, which = loss.min(0, keepdim=True)
        better = least[0] < 0
        new_s = torch.where(better, s.gather(0, which)[0], old_s)
        new_o = torch.where(better, o.gather(0, which)[0], old_o)
        by = torch.addcmul(step * (new_o - old_o), codes, self.unit * (new_s - old_s))
        self.s[g], self.o[g] = new_s, new_o
        return by

    def _fit_codes(self, slope: Tensor, hessian: Tensor) -> None:
        """The code of each column in turn; slopes of columns that were are not kept up to date."""
        scale = self.unit * self.s
        inverse = torch.where(scale != 0, 1 / scale, 0.0)
        top, pivots = 2**self.fmt.bits - 1, hessian.diagonal().tolist()
        for start in range(0, len(pivots), LAZY):
            stop = min(start + LAZY, len(pivots))
            moved = torch.empty_like(slope[start:stop])
            for j in range(start, stop):
                g, code = j // self.fmt.group, self.codes[j]
                best = torch.addcmul(code, slope[j], inverse[g], value=1 / pivots[j]).round_().clamp_(0, top)
                torch.mul(best - code, scale[g], out=moved[j - start])
                self.codes[j] = best
                slope[j + 1 : stop].addr_(hessian[j + 1 : stop, j], moved[j - start], alpha=-1)
            slope[stop:].addmm_(hessian[stop:, start:stop], moved, alpha=-1)
