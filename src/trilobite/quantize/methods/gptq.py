"""GPTQ (Frantar et al. 2023): round column by column, and let the columns to come make up for each error.

With H^-1 = U^T U the error e_j = (w_j - q_j) / U_jj of column j is fed back as w_k -= e_j U_jk to the columns k > j,
which is the step of least loss tr((W - W_q) H (W - W_q)^T) given what is rounded already. The loss comes to the sum of
all e_j^2: an error of column j costs 1 / U_jj^2. So each group's scale and offset are those of `search` with these
weights, on the group as it is, compensated, when its first column is reached; they are rounded to what the format
stores before anything is rounded to them.

Super-scales are found beforehand, on the weights as they came, and each group's line under them when the group is
reached; then `descent` finds all of it, and the codes, once more.

`gptq-order` visits the columns by decreasing H_jj. Groups stay neighbours of a row, so kernels see nothing of it; their
scales are found beforehand, on the weights as they came.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilobite.formats import affine, superscale
from trilobite.formats.weight import PackedWeight, decode_factor, dequantize
from trilobite.kernels.cpu import feedback
from trilobite.quantize.methods import search
from trilobite.quantize.methods.bands import Tiles, bands, check_finite, find_scales, quantize_bands
from trilobite.quantize.methods.compensator import fit_factor, quantize_factor
from trilobite.quantize.methods.descent import descend
from trilobite.quantize.methods.hessian import damped, given, inverse_factor, weighted_error
from trilobite.quantize.methods.lowrank import truncated_svd
from trilobite.quantize.methods.quantized import Compensation, Quantized
from trilobite.quantize.methods.refine import line_within
from trilobite.recipe import AnyFormat, Format

LAZY = 128
"""Columns whose errors are fed back at once to all columns behind them."""
BAND = 1 << 25
"""Weights that are rounded at a time: rows are independent of each other."""
STEPS = 1
"""Alternations of `search` for a line that is then moved to the grid of its super-scale, and found again by descent."""
ROUNDS = 4
"""Alternations of rounding and low rank; the best one is kept, and the first that does not improve ends them."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    """columns: [K] int64, in the order of visits    upper: [K, K] fp32, U of H^-1 in that order.

    cost: [K] fp32, 1 / U_jj^2 of each column, in the natural order    natural: whether visits are in that order
    """

    columns: Tensor
    upper: Tensor
    cost: Tensor
    natural: bool


def gptq(
    w: Tensor,
    fmt: AnyFormat,
    *,
    hessian: Tensor | None = None,
    compensation: Compensation | None = None,
    ordered: bool = False,
) -> Quantized:
    """Quantize one matrix against the Hessian of its inputs; see `quantized.Method`.

    With a compensator, rounding W - U V and the low rank of the H-weighted residual alternate: the best U V for
    tr((E - U V) H (E - U V)^T), E = W - W_q, is the truncated SVD of E L, H = L L^T, times L^-1.

    w: [N, K] any float dtype    hessian: [K, K] fp32    ordered: by decreasing H_jj (`gptq-order`)
    """
    assert isinstance(fmt, Format)
    h = given(hessian, "gptq-order" if ordered else "gptq")
    w = check_finite(w.float())
    order = _order(h, ordered=ordered)
    total, size = weighted_error(w, h), float(w.norm())

    def measured(weight: PackedWeight) -> Quantized:
        e = w - dequantize(weight)
        proxy = max(weighted_error(e, h), 0.0) / total if total > 0 else 0.0
        return Quantized(weight=weight, error=float(e.norm()) / size if size else 0.0, proxy=proxy)

    plain = measured(_rounded(w, fmt, order, h).weight())
    if compensation is None or not compensation.rank:
        return plain
    rounds: list[Quantized] = []
    proxies: list[float] = []
    for _ in range(min(ROUNDS, compensation.iterations)):
        lra, lrb = _low_rank(w - _codes_only((rounds or [plain])[-1].weight), h, order, compensation)
        n, k = w.shape
        target = torch.addmm(w, decode_factor(lra, n).T, decode_factor(lrb, k), alpha=-1)
        rounds.append(measured(_rounded(target, fmt, order, h).weight(lra, lrb)))
        proxies.append(rounds[-1].proxy or 0.0)
        if proxies[-1] >= min(proxies[:-1], default=math.inf):
            break
    return replace(rounds[proxies.index(min(proxies))], proxies=tuple(proxies))


def _order(hessian: Tensor, *, ordered: bool) -> _Order:
    k = len(hessian)
    if not ordered:
        columns, upper = torch.arange(k, device=hessian.device), inverse_factor(hessian).contiguous()
    else:
        columns = hessian.diagonal().argsort(descending=True, stable=True)
        upper = inverse_factor(hessian[columns][:, columns]).contiguous()
    cost = torch.empty(k, dtype=torch.float32, device=hessian.device)
    cost[columns] = upper.diagonal().square().reciprocal()
    return _Order(columns=columns, upper=upper, cost=cost / cost.mean(), natural=not ordered)


def _codes_only(weight: PackedWeight) -> Tensor:
    return dequantize(PackedWeight(shape=weight.shape, packed=weight.packed, scale=weight.scale))


def _rounded(w: Tensor, fmt: Format, order: _Order, hessian: Tensor) -> Tiles:
    """All rows, band by band. w: [N, K] fp32."""
    n, k = w.shape
    tiles = Tiles(fmt, (n, k), w.device)
    loss = damped(hessian) if fmt.super_scales else hessian
    for rows in bands(n, k, BAND):
        # Second-level scales join groups, and another order reaches all groups at once: their scales come first.
        joined = fmt.double_quant or fmt.super_scales
        known = None if order.natural and not joined else _grid(w[rows], fmt, order.cost)
        codes, grid = _round_columns(w[rows], fmt, order, known)
        if fmt.super_scales:
            codes, grid = descend(w[rows], codes, grid, fmt, loss)
        tiles.put(rows, affine.encode(codes, grid, fmt), grid.super)
    return tiles


def _grid(w: Tensor, fmt: Format, cost: Tensor) -> affine.Grid:
    """The grid of least cost for weights as they are, rounded to what is stored. w: [N, K] fp32    cost: [K] fp32."""
    plain = quantize_bands(w, fmt, "search", weight=cost).weight
    return affine.read_grid(plain.packed, plain.scale, fmt, plain.shape)


class _Lines:
    """Scales and offsets of groups [K/G, N] fp32 while columns are visited.

    found: those of each group when it is reached, in the order of columns; else they are known beforehand
    s, o, units: under super-scales, sub-scales and offset codes of groups [K/G, N] and units of spans [K/256, N]
    """

    def __init__(self, w: Tensor, fmt: Format, order: _Order, known: affine.Grid | None) -> None:
        n, k = w.shape
        self.fmt, self.group, self._order, self._known = fmt, fmt.group_size(k), order, known
        self.found = order.natural and (known is None or fmt.super_scales)
        shape = k // self.group, n
        self.scale, self.offset = w.new_empty(shape), w.new_empty(shape)
        if known is not None:
            self.scale.copy_(known.scale.T)
            self.offset.copy_(known.offset.T)
        if fmt.super_scales:
            assert known is not None
            assert known.super is not None
            parts = superscale.parts(known.stored, known.super, n)
            self.s, self.o, self.units = (part.T.contiguous() for part in parts)

    def find(self, g: int, columns: Tensor) -> None:
        """That of a group as it is now. columns: [G, N] fp32."""
        fmt, group = self.fmt, len(columns)
        cost = self._order.cost[g * group : (g + 1) * group]
        w = columns.T.contiguous()
        if not fmt.super_scales:
            grid = affine.make_grid(*find_scales(w, fmt, "search", weight=cost), fmt)
            self.scale[g], self.offset[g] = grid.scale[:, 0], grid.offset[:, 0]
            return
        units = self.units[g * group // superscale.SPAN]
        start = find_scales(w, fmt, "search", steps=STEPS, weight=cost)
        self.s[g], self.o[g] = line_within(w, start, units, fmt, cost)
        self.scale[g], self.offset[g] = superscale.line(self.s[g], self.o[g], units, fmt.bits)

    def grid(self) -> affine.Grid:
        """All of them as stored."""
        fmt = self.fmt
        if self._known is not None and not self.found:
            return self._known
        if fmt.super_scales:
            return affine.super_grid(
                self.s.T.contiguous(), self.o.T.contiguous(), self.units.T.contiguous(), fmt
            )
        offset = None if fmt.symmetric else self.offset.T.contiguous()
        return affine.make_grid(self.scale.T.contiguous(), offset, fmt)


def _round_columns(
    w: Tensor, fmt: Format, order: _Order, known: affine.Grid | None
) -> tuple[Tensor, affine.Grid]:
    """One band: its codes [N, K] uint8 and its grid. known: the grid, where it is found before the first column."""
    n, k = w.shape
    work = w.T[order.columns].contiguous()  # [K, N]: a column is a contiguous row
    codes = torch.empty((k, n), dtype=torch.uint8, device=w.device)
    lines = _Lines(w, fmt, order, known)
    round_block = _round_block_natively if feedback.supports(w) else _round_block
    for start, stop in _lazy_blocks(k, lines.group):
        errors = torch.empty_like(work[start:stop])
        codes[order.columns[start:stop]] = round_block(work, start, stop, order, lines, errors)
        work[stop:].addmm_(order.upper[start:stop, stop:].T, errors, alpha=-1)
    return codes.T.contiguous(), lines.grid()


def _round_block(work: Tensor, start: int, stop: int, order: _Order, lines: _Lines, errors: Tensor) -> Tensor:
    """Codes [C, N] uint8 of the columns start to stop in the order of visits, each error fed back to those behind it.

    work: [K, N] fp32, compensated for the errors of all columns before    errors: [C, N] fp32, receives this block's
    """
    block, top = work[start:stop], 2**lines.fmt.bits - 1
    codes = torch.empty(block.shape, dtype=torch.uint8, device=work.device)
    upper = order.upper[start:stop, start:stop]
    pivots = upper.diagonal().tolist()
    for i, column in enumerate(order.columns[start:stop].tolist()):
        g, first = divmod(column, lines.group)
        if lines.found and not first:
            lines.find(g, work[column : column + lines.group])
        scale, offset = lines.scale[g], lines.offset[g]
        inverse = torch.where(scale != 0, 1 / scale, 0.0)
        code = (block[i] - offset).mul_(inverse).round_().clamp_(0, top)
        codes[i] = code.to(torch.uint8)
        errors[i] = (block[i] - (code * scale).add_(offset)).div_(pivots[i])
        block[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
    return codes


def _round_block_natively(
    work: Tensor, start: int, stop: int, order: _Order, lines: _Lines, errors: Tensor
) -> Tensor:
    """The same by the native library; `work` keeps this block's columns as they were."""
    block, fmt, group = work[start:stop], lines.fmt, lines.group
    codes = torch.empty(block.shape, dtype=torch.uint8)
    upper = order.upper[start:stop, start:stop]
    if lines.found and group <= stop - start:
        groups = slice(start // group, stop // group)
        units = lines.units[start // superscale.SPAN] if fmt.super_scales else None
        parts = (lines.s, lines.o) if fmt.super_scales else (lines.scale, lines.offset)
        feedback.feed_back(
            block,
            upper,
            fmt,
            group,
            lines=(parts[0][groups], parts[1][groups]),
            codes=codes,
            errors=errors,
            cost=order.cost[start:stop],
            units=units,
            steps=STEPS if fmt.super_scales else search.STEPS,
        )
        return codes
    if lines.found and start % group == 0:
        lines.find(start // group, work[start : start + group])
    of_column = order.columns[start:stop] // group
    known = lines.scale[of_column], lines.offset[of_column]
    feedback.feed_back(block, upper, fmt, 1, lines=known, codes=codes, errors=errors)
    return codes


def _lazy_blocks(k: int, group: int) -> Iterator[tuple[int, int]]:
    """Ranges of about LAZY columns; a group begins at the beginning of one, or lies inside one."""
    start = 0
    while start < k:
        if group <= LAZY:
            stop = start + LAZY // group * group
        else:
            stop = min(start + LAZY, (start // group + 1) * group)
        yield start, min(stop, k)
        start = stop


def _low_rank(e: Tensor, hessian: Tensor, order: _Order, compensation: Compensation) -> tuple[Tensor, Tensor]:
    """The stored U and V of least tr((E - U V) H (E - U V)^T); U is fitted to V as stored."""
    inverse = torch.empty_like(order.columns)
    inverse[order.columns] = torch.arange(len(inverse), device=inverse.device)
    # H^-1 = U^T U, so H = (U^-1) (U^-1)^T, with the columns of U in the order of visits.
    root = torch.linalg.solve_triangular(order.upper, torch.eye(len(inverse), device=e.device), upper=True)[
        inverse
    ]
    u, v, _ = truncated_svd(e @ root, compensation.rank, seed=compensation.seed)
    lrb = quantize_factor(v @ order.upper[:, inverse], compensation.compensator)
    stored = decode_factor(lrb, e.shape[1])
    weighted = stored @ hessian
    u = fit_factor(weighted @ e.T, weighted @ stored.T).T
    return quantize_factor(u.T.contiguous(), compensation.compensator), lrb
