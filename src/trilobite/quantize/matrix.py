"""Quantize one matrix with one method: the bands loop that every method shares, and the methods by name."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trilobite.errors import WeightError
from trilobite.formats import affine
from trilobite.formats.bitpack import ROWS
from trilobite.formats.weight import PackedWeight, decode_factor
from trilobite.quantize.hqq import hqq
from trilobite.quantize.rtn import rtn
from trilobite.quantize.search import search
from trilobite.recipe import Format

Line = tuple[Tensor, Tensor | None]
METHODS: dict[str, Callable[[Tensor, Format], Line]] = {"rtn": rtn, "search": search, "hqq": hqq}
BAND = 1 << 18
"""Weights that are quantized at a time: the working set stays in the cache and out of the memory bound."""


def bands(n: int, k: int) -> Iterator[slice]:
    """Row slices of about BAND weights, multiples of 16 rows."""
    step = max(ROWS, BAND // k // ROWS * ROWS)
    for first in range(0, n, step):
        yield slice(first, min(n, first + step))


def find_line(w: Tensor, fmt: Format, method: str, start: Line | None = None) -> Line:
    """Scale and offset per group of a band of rows.

    w: [N, K] fp32    start: [N, K/G] scale and offset to improve on (method `search` only; others begin afresh)
    returns: scale, offset [N, K/G] fp32 (offset None for a symmetric format)
    """
    n, k = w.shape
    groups = w.reshape(-1, fmt.group_size(k))
    if start is not None and method == "search":
        scale, offset = search(groups, fmt, (start[0].flatten(), None if start[1] is None else start[1].flatten()))
    else:
        scale, offset = METHODS[method](groups, fmt)
    return scale.view(n, -1), None if offset is None else offset.view(n, -1)


def quantize(w: Tensor, fmt: Format, method: str) -> PackedWeight:
    """Quantize a matrix without a compensator.

    w: [N, K] any float dtype    returns: packed weight of the same shape
    Raises WeightError for NaN, infinite or out-of-range weights, ShapeError when K does not divide into groups.
    """
    n, k = w.shape
    packed = torch.empty(affine.packed_shape(fmt, n, k), dtype=torch.uint8, device=w.device)
    scale_shape = affine.scale_shape(fmt, n, k)
    scale = None if scale_shape is None else torch.empty(scale_shape, dtype=torch.uint8, device=w.device)
    for rows in bands(n, k):
        band = w[rows].float()
        line = find_line(check_finite(band), fmt, method)
        store(band, line, fmt, rows, packed, scale)
    return PackedWeight(shape=(n, k), packed=packed, scale=scale)


def store(w: Tensor, line: Line, fmt: Format, rows: slice, packed: Tensor, scale: Tensor | None) -> None:
    """Round a band of rows to the grid that `line` becomes in storage, and write its tiles."""
    grid = affine.make_grid(*line, fmt)
    tiles = slice(rows.start // ROWS, -(-rows.stop // ROWS))
    packed[tiles] = affine.encode(affine.round_to_grid(w, grid, fmt), grid, fmt)
    if scale is not None:
        assert grid.super is not None
        scale[tiles] = grid.super


def check_finite(w: Tensor) -> Tensor:
    """Return `w`; raise WeightError when it holds NaN or infinity."""
    if not bool(torch.isfinite(w.sum())) and not bool(torch.isfinite(w).all()):
        bad = int((~torch.isfinite(w)).sum())
        raise WeightError(f"{bad} of {w.numel()} weights are NaN or infinite; the source checkpoint is damaged")
    return w


def relative_error(w: Tensor, packed: PackedWeight) -> float:
    """|W - dequantize(packed)|_F / |W|_F of what was stored, in bands.

    w: [N, K] any float dtype
    """
    n, k = packed.shape
    low_rank = None
    if packed.lra is not None and packed.lrb is not None:
        low_rank = decode_factor(packed.lra, n).T, decode_factor(packed.lrb, k)
    total = error = 0.0
    for rows in bands(n, k):
        tiles = slice(rows.start // ROWS, -(-rows.stop // ROWS))
        scale = None if packed.scale is None else packed.scale[tiles]
        decoded = affine.decode(packed.packed[tiles], scale, packed.format, (rows.stop - rows.start, k))
        if low_rank is not None:
            decoded.addmm_(low_rank[0][rows], low_rank[1])
        original = w[rows].float()
        error += float((original - decoded).double().square().sum())
        total += float(original.double().square().sum())
    return (error / total) ** 0.5 if total else 0.0
