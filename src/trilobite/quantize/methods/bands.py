"""The loop over bands of rows: find the scales of each, round it, fill its tiles."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trilobite.errors import WeightError
from trilobite.formats import affine
from trilobite.formats.bitpack import ROWS
from trilobite.formats.weight import PackedWeight, decode_factor, dequantize
from trilobite.kernels.cpu import quantize as cpu_quantize
from trilobite.quantize.methods.hessian import weighted_error
from trilobite.quantize.methods.hqq import hqq
from trilobite.quantize.methods.quantized import Quantized
from trilobite.quantize.methods.refine import ROUNDS, refined
from trilobite.quantize.methods.rtn import rtn
from trilobite.quantize.methods.search import STEPS, Scales, search
from trilobite.recipe import Format

SCALES: dict[str, Callable[[Tensor, Format], Scales]] = {
    "rtn": rtn,
    "search": search,
    "hqq": hqq,
    "hqq-paper": partial(hqq, published=True),
}
"""How scale and offset of groups are found, by method."""
BAND = 1 << 18
"""Weights that are quantized at a time: the working set stays in the cache and out of the memory bound."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A quantized band of rows.

    scales: scale and offset as found, [N, K/G] fp32    residual: [N, K] fp32, the original minus what is stored
    tiles, super: as stored (formats/affine.py), or None when they were not asked for
    """

    scales: Scales
    residual: Tensor
    tiles: Tensor | None
    super: Tensor | None


def bands(n: int, k: int, weights: int | None = None) -> Iterator[slice]:
    """Row slices of about so many weights (default BAND), multiples of 16 rows."""
    step = max(ROWS, (weights or BAND) // k // ROWS * ROWS)
    for first in range(0, n, step):
        yield slice(first, min(n, first + step))


def find_scales(
    w: Tensor,
    fmt: Format,
    method: str,
    steps: int = STEPS,
    weight: Tensor | None = None,
    start: Scales | None = None,
) -> Scales:
    """Scale and offset per group of a band of rows, in PyTorch.

    w: [N, K] fp32    steps: alternations of `search` from each start
    weight: [K] fp32 > 0, of the columns' errors, which `search` takes into account
    start: scale and offset [N, K/G] fp32 that `search` starts from, in place of the ranges of groups
    returns: scale, offset [N, K/G] fp32 (offset None for a symmetric format)
    """
    n, k = w.shape
    if weight is not None and method == "search":
        parts = zip(torch.split(w, fmt.group_size(k), 1), torch.split(weight, fmt.group_size(k)), strict=True)
        found = [
            search(part.contiguous(), fmt, steps, of_part, _column(start, g))
            for g, (part, of_part) in enumerate(parts)
        ]
        offsets = [offset for _, offset in found if offset is not None]
        return torch.stack([scale for scale, _ in found], 1), torch.stack(offsets, 1) if offsets else None
    groups = w.reshape(-1, fmt.group_size(k))
    if method == "search":
        scale, offset = search(groups, fmt, steps, start=_column(start, None))
    else:
        scale, offset = SCALES[method](groups, fmt)
    return scale.view(n, -1), None if offset is None else offset.view(n, -1)


def _column(lines: Scales | None, g: int | None) -> Scales | None:
    """Scales [M] of one group of each row; or of all groups, row by row."""
    if lines is None:
        return None
    scale, offset = (None if t is None else t.flatten() if g is None else t[:, g] for t in lines)
    assert scale is not None
    return scale, offset


def quantize_band(
    w: Tensor,
    fmt: Format,
    method: str,
    *,
    steps: int = STEPS,
    start: Scales | None = None,
    original: Tensor | None = None,
    residual: Tensor | None = None,
    packed: bool = True,
    weight: Tensor | None = None,
) -> Band:
    """Find the scales of a band, round it to the grid that they become in storage, and lay it out in tiles.

    w: [N, K] fp32    steps, start: see `find_scales`    original: [N, K] fp32, what the residual is taken from (or w)
    residual: [N, K] fp32, contiguous, where the residual is written (default: new)    packed: whether to make tiles
    weight: see `find_scales`
    Runs natively where the library supports it.
    """
    original = w if original is None else original
    residual = torch.empty_like(w) if residual is None else residual
    if cpu_quantize.supports(w, fmt, method):
        scales, tiles, supers = cpu_quantize.quantize_band(
            w,
            fmt,
            method,
            steps=steps,
            start=start,
            original=original,
            residual=residual,
            packed=packed,
            weight=weight,
        )
        affine.check_scales(*scales, fmt)
        return Band(scales=scales, residual=residual, tiles=tiles, super=supers)
    n, k = w.shape
    scales = find_scales(w, fmt, method, steps, weight, start)
    grid = stored_grid(w, scales, fmt, method, steps, weight)
    codes = affine.round_to_grid(w, grid, fmt)
    values = (
        codes.view(n, -1, fmt.group_size(k)).float().mul_(grid.scale[..., None]).add_(grid.offset[..., None])
    )
    tiles = affine.encode(codes, grid, fmt) if packed else None
    torch.sub(original, values.view(n, k), out=residual)
    return Band(scales=scales, residual=residual, tiles=tiles, super=grid.super)


def stored_grid(
    w: Tensor, scales: Scales, fmt: Format, method: str, steps: int = STEPS, weight: Tensor | None = None
) -> affine.Grid:
    """Scales as stored: nearest to what was found or, by a search under super-scales, refined for what they cost.

    w: [N, K] fp32    scales: [N, K/G] fp32    steps: see `find_scales`    weight: [K] fp32 > 0, of the columns' errors
    """
    scale, offset = scales
    if not fmt.super_scales or method != "search":
        return affine.make_grid(scale, offset, fmt)
    assert offset is not None
    return refined(w, scale, offset, fmt, rounds=min(steps, ROUNDS), weight=weight)


class Tiles:
    """The packed tensors of a matrix, filled band by band."""

    def __init__(self, fmt: Format, shape: tuple[int, int], device: torch.device) -> None:
        """Raises ShapeError when K does not divide into groups."""
        self.shape = shape
        self.packed = torch.empty(affine.packed_shape(fmt, *shape), dtype=torch.uint8, device=device)
        scale = affine.scale_shape(fmt, *shape)
        self.scale = None if scale is None else torch.empty(scale, dtype=torch.uint8, device=device)

    def put(self, rows: slice, tiles: Tensor | None, super: Tensor | None) -> None:
        """Store a band, as `Band` holds it."""
        where = slice(rows.start // ROWS, -(-rows.stop // ROWS))
        assert tiles is not None
        self.packed[where] = tiles
        if self.scale is not None:
            assert super is not None
            self.scale[where] = super

    def weight(self, lra: Tensor | None = None, lrb: Tensor | None = None) -> PackedWeight:
        """All of it as a packed weight, with the stored factors of a compensator."""
        return PackedWeight(shape=self.shape, packed=self.packed, scale=self.scale, lra=lra, lrb=lrb)


def quantize_bands(
    w: Tensor,
    fmt: Format,
    method: str,
    lra: Tensor | None = None,
    lrb: Tensor | None = None,
    weight: Tensor | None = None,
) -> Quantized:
    """Quantize a matrix, or what the stored factors U and V of a compensator leave of it.

    w: [N, K] any float dtype    lra, lrb: as in formats/weight.py, both or none
    weight: see `find_scales`; with it the loss is told, too
    Raises WeightError for NaN, infinite or out-of-range weights, ShapeError when K does not divide into groups.
    """
    n, k = w.shape
    u = None if lra is None else decode_factor(lra, n).T
    v = None if lrb is None else decode_factor(lrb, k)
    tiles = Tiles(fmt, (n, k), w.device)
    error = total = loss = whole = 0.0
    for rows in bands(n, k):
        original = check_finite(w[rows].float())
        target = original if u is None or v is None else torch.addmm(original, u[rows], v, alpha=-1)
        band = quantize_band(target, fmt, method, weight=weight)
        tiles.put(rows, band.tiles, band.super)
        error += sum_of_squares(band.residual)
        total += sum_of_squares(original)
        if weight is not None:
            loss += weighted_error(band.residual, weight)
            whole += weighted_error(original, weight)
    return Quantized(
        weight=tiles.weight(lra, lrb),
        error=float((error / total) ** 0.5) if total else 0.0,
        proxy=None if weight is None else loss / whole if whole else 0.0,
    )


def sum_of_squares(w: Tensor) -> float:
    """Sum of squares of a band, in fp32."""
    flat = w.flatten()
    return float(torch.dot(flat, flat))


def check_finite(w: Tensor) -> Tensor:
    """Return `w`; raise WeightError when it holds NaN or infinity."""
    if not bool(torch.isfinite(w.sum())) and not bool(torch.isfinite(w).all()):
        bad = int((~torch.isfinite(w)).sum())
        raise WeightError(
            f"{bad} of {w.numel()} weights are NaN or infinite; the source checkpoint is damaged"
        )
    return w


def relative_error(w: Tensor, packed: PackedWeight) -> float:
    """|W - dequantize(packed)|_F / |W|_F, decoded from the stored bytes; 0 for a matrix of zeros.

    w: [N, K] any float dtype
    """
    original = w.float()
    norm = original.norm()
    return float((original - dequantize(packed)).norm() / norm) if norm else 0.0
