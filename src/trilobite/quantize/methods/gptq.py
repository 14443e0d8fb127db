"""GPTQ (Frantar et al. 2023): round column by column, and let the columns to come make up for each error.

With H^-1 = U^T U the error e_j = (w_j - q_j) / U_jj of column j is fed back as w_k -= e_j U_jk to the columns k > j,
which is the step of least loss tr((W - W_q) H (W - W_q)^T) given what is rounded already. The loss comes to the sum of
all e_j^2: an error of column j costs 1 / U_jj^2. So each group's scale and offset are those of `search` with these
weights, on the group as it is, compensated, when its first column is reached; they are rounded to what the format
stores before anything is rounded to them.

`gptq-order` visits the columns by decreasing H_jj. Groups stay neighbours of a row, so kernels see nothing of it; their
scales are found beforehand, on the weights as they came.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trilobite.formats import affine
from trilobite.formats.bitpack import ROWS
from trilobite.formats.weight import PackedWeight, decode_factor, dequantize
from trilobite.quantize.methods.bands import check_finite
from trilobite.quantize.methods.compensator import fit_factor, quantize_factor
from trilobite.quantize.methods.hessian import inverse_factor, weighted_error
from trilobite.quantize.methods.lowrank import truncated_svd
from trilobite.quantize.methods.milo import Compensation
from trilobite.quantize.methods.search import search
from trilobite.recipe import Format

ORDERED = "gptq-order"
METHODS = ("gptq", ORDERED)
LAZY = 128
"""Columns whose errors are fed back at once to all columns behind them."""
BAND = 1 << 25
"""Weights that are rounded at a time: rows are independent of each other."""
ROUNDS = 4
"""Alternations of rounding and low rank; the best one is kept, and the first that does not improve ends them."""


@dataclass(frozen=True, kw_only=True)
class GptqResult:
    """A matrix quantized against a Hessian.

    error: |W - W_q|_F / |W|_F    proxy: tr((W - W_q) H (W - W_q)^T) / tr(W H W^T)
    proxies: the same after each round of alternation, of what would be stored
    """

    weight: PackedWeight
    error: float
    proxy: float
    proxies: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class _Order:
    """columns: [K] int64, in the order of visits    upper: [K, K] fp32, U of H^-1 in that order.

    cost: [K] fp32, 1 / U_jj^2 of each column, in the natural order
    """

    columns: Tensor
    upper: Tensor
    cost: Tensor


def gptq(
    w: Tensor, fmt: Format, method: str, hessian: Tensor, compensation: Compensation | None = None
) -> GptqResult:
    """Quantize one matrix against the Hessian of its inputs.

    With a compensator, rounding W - U V and the low rank of the H-weighted residual alternate: the best U V for
    tr((E - U V) H (E - U V)^T), E = W - W_q, is the truncated SVD of E L, H = L L^T, times L^-1.

    w: [N, K] any float dtype    hessian: [K, K] fp32    method: gptq or gptq-order
    Raises WeightError for bad weights, CalibrationError for a bad H, ShapeError when K does not divide into groups.
    """
    w = check_finite(w.float())
    order = _order(hessian, method)
    total, size = weighted_error(w, hessian), float(w.norm())

    def measured(weight: PackedWeight) -> tuple[PackedWeight, float, float]:
        e = w - dequantize(weight)
        proxy = max(weighted_error(e, hessian), 0.0) / total if total > 0 else 0.0
        return weight, float(e.norm()) / size if size else 0.0, proxy

    best = measured(_rounded(w, fmt, method, order))
    proxies = [best[2]]
    if compensation is None:
        return GptqResult(weight=best[0], error=best[1], proxy=best[2], proxies=tuple(proxies))
    last: PackedWeight = best[0]
    found: tuple[PackedWeight, float, float] | None = None
    for _ in range(min(ROUNDS, compensation.iterations)):
        lra, lrb = _low_rank(w - _codes_only(last), hessian, order, compensation)
        n, k = w.shape
        target = torch.addmm(w, decode_factor(lra, n).T, decode_factor(lrb, k), alpha=-1)
        codes = _rounded(target, fmt, method, order)
        last = PackedWeight(shape=(n, k), packed=codes.packed, scale=codes.scale, lra=lra, lrb=lrb)
        now = measured(last)
        proxies.append(now[2])
        if found is not None and now[2] >= found[2]:
            break
        found = now
    assert found is not None
    return GptqResult(weight=found[0], error=found[1], proxy=found[2], proxies=tuple(proxies[1:]))


def _order(hessian: Tensor, method: str) -> _Order:
    k = len(hessian)
    if method != ORDERED:
        columns, upper = torch.arange(k, device=hessian.device), inverse_factor(hessian)
    else:
        columns = hessian.diagonal().argsort(descending=True, stable=True)
        upper = inverse_factor(hessian[columns][:, columns])
    cost = torch.empty(k, dtype=torch.float32, device=hessian.device)
    cost[columns] = upper.diagonal().square().reciprocal()
    return _Order(columns=columns, upper=upper, cost=cost / cost.mean())


def _codes_only(weight: PackedWeight) -> Tensor:
    return dequantize(PackedWeight(shape=weight.shape, packed=weight.packed, scale=weight.scale))


def _rounded(w: Tensor, fmt: Format, method: str, order: _Order) -> PackedWeight:
    """All rows, band by band. w: [N, K] fp32."""
    n, k = w.shape
    packed = torch.empty(affine.packed_shape(fmt, n, k), dtype=torch.uint8, device=w.device)
    shape = affine.scale_shape(fmt, n, k)
    scale = None if shape is None else torch.empty(shape, dtype=torch.uint8, device=w.device)
    step = max(ROWS, BAND // k // ROWS * ROWS)
    for first in range(0, n, step):
        rows = w[first : first + step]
        # Double quantization joins groups, and another order reaches all groups at once: their lines come first.
        known = _grid(rows, fmt, order.cost) if method == ORDERED or fmt.double_quant else None
        codes, grid = _round_columns(rows, fmt, order, known)
        tiles = slice(first // ROWS, -(-(first + len(rows)) // ROWS))
        packed[tiles] = affine.encode(codes, grid, fmt)
        if scale is not None:
            assert grid.super is not None
            scale[tiles] = grid.super
    return PackedWeight(shape=(n, k), packed=packed, scale=scale)


def _grid(w: Tensor, fmt: Format, cost: Tensor) -> affine.Grid:
    """The grid of least cost for weights as they are, rounded to what is stored. w: [N, K] fp32    cost: [K] fp32."""
    group = fmt.group_size(w.shape[1])
    lines = [
        search(part.contiguous(), fmt, weight=of_part)
        for part, of_part in zip(torch.split(w, group, 1), torch.split(cost, group), strict=True)
    ]
    scale = torch.stack([scale for scale, _ in lines], 1)
    offsets = [offset for _, offset in lines if offset is not None]
    return affine.make_grid(scale, torch.stack(offsets, 1) if offsets else None, fmt)


def _round_columns(
    w: Tensor, fmt: Format, order: _Order, known: affine.Grid | None
) -> tuple[Tensor, affine.Grid]:
    """One band: its codes [N, K] uint8 and its grid. known: the grid, where it is found before the first column."""
    n, k = w.shape
    group, top = fmt.group_size(k), 2**fmt.bits - 1
    work = w.T[order.columns].contiguous()  # [K, N]: a column is a contiguous row
    codes = torch.empty((k, n), dtype=torch.uint8, device=w.device)
    scales = (
        torch.empty((k // group, n), dtype=torch.float32, device=w.device)
        if known is None
        else known.scale.T.contiguous()
    )
    offsets = torch.empty_like(scales) if known is None else known.offset.T.contiguous()
    columns = order.columns.tolist()
    for start, stop in _lazy_blocks(k, group):
        block = work[start:stop]
        errors = torch.empty_like(block)
        upper = order.upper[start:stop, start:stop]
        pivots = upper.diagonal().tolist()
        for i in range(stop - start):
            column = columns[start + i]
            g = column // group
            if known is None and column % group == 0:
                here = slice(column, column + group)
                grid = _grid(work[here].T, fmt, order.cost[here])
                scales[g], offsets[g] = grid.scale[:, 0], grid.offset[:, 0]
            scale, offset = scales[g], offsets[g]
            inverse = torch.where(scale != 0, 1 / scale, 0.0)
            code = (block[i] - offset).mul_(inverse).round_().clamp_(0, top)
            codes[column] = code.to(torch.uint8)
            errors[i] = (block[i] - (code * scale).add_(offset)).div_(pivots[i])
            block[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
        work[stop:].addmm_(order.upper[start:stop, stop:].T, errors, alpha=-1)
    if known is None:
        known = affine.make_grid(
            scales.T.contiguous(), None if fmt.symmetric else offsets.T.contiguous(), fmt
        )
    return codes.T.contiguous(), known


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
