"""Quantize one matrix with one method: the loop over bands of rows that every method shares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trilobite.errors import WeightError
from trilobite.formats import affine
from trilobite.formats.bitpack import ROWS
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.kernels.cpu import quantize as cpu_quantize
from trilobite.quantize.methods.hqq import hqq
from trilobite.quantize.methods.ldlq import quantize_lattice
from trilobite.quantize.methods.rtn import rtn
from trilobite.quantize.methods.search import STEPS, Line, search
from trilobite.recipe import AnyFormat, Format, LatticeFormat

METHODS: dict[str, Callable[[Tensor, Format], Line]] = {"rtn": rtn, "search": search, "hqq": hqq}
BAND = 1 << 18
"""Weights that are quantized at a time: the working set stays in the cache and out of the memory bound."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A quantized band of rows.

    line: scale and offset as found, [N, K/G] fp32    residual: [N, K] fp32, the original minus what is stored
    tiles, super: as stored (formats/affine.py), or None when they were not asked for
    """

    line: Line
    residual: Tensor
    tiles: Tensor | None
    super: Tensor | None


def bands(n: int, k: int) -> Iterator[slice]:
    """Row slices of about BAND weights, multiples of 16 rows."""
    step = max(ROWS, BAND // k // ROWS * ROWS)
    for first in range(0, n, step):
        yield slice(first, min(n, first + step))


def find_line(w: Tensor, fmt: Format, method: str, steps: int = STEPS) -> Line:
    """Scale and offset per group of a band of rows, in PyTorch.

    w: [N, K] fp32    steps: alternations of `search` from each start
    returns: scale, offset [N, K/G] fp32 (offset None for a symmetric format)
    """
    n, k = w.shape
    groups = w.reshape(-1, fmt.group_size(k))
    scale, offset = search(groups, fmt, steps) if method == "search" else METHODS[method](groups, fmt)
    return scale.view(n, -1), None if offset is None else offset.view(n, -1)


def quantize_band(
    w: Tensor,
    fmt: Format,
    method: str,
    *,
    steps: int = STEPS,
    original: Tensor | None = None,
    residual: Tensor | None = None,
    packed: bool = True,
) -> Band:
    """Find the lines of a band, round it to the grid that they become in storage, and lay it out in tiles.

    w: [N, K] fp32    steps: see `find_line`    original: [N, K] fp32, what the residual is taken from (default w)
    residual: [N, K] fp32, contiguous, where the residual is written (default: new)    packed: whether to make tiles
    Runs natively where the library supports it.
    """
    original = w if original is None else original
    residual = torch.empty_like(w) if residual is None else residual
    if cpu_quantize.supports(w, fmt, method):
        line, tiles = cpu_quantize.quantize_band(
            w, fmt, method, steps=steps, original=original, residual=residual, packed=packed
        )
        affine.check_range(*line)
        return Band(line=line, residual=residual, tiles=tiles, super=None)
    n, k = w.shape
    line = find_line(w, fmt, method, steps)
    grid = affine.make_grid(*line, fmt)
    codes = affine.round_to_grid(w, grid, fmt)
    values = (
        codes.view(n, -1, fmt.group_size(k)).float().mul_(grid.scale[..., None]).add_(grid.offset[..., None])
    )
    tiles = affine.encode(codes, grid, fmt) if packed else None
    torch.sub(original, values.view(n, k), out=residual)
    return Band(line=line, residual=residual, tiles=tiles, super=grid.super)


class Tiles:
    """The packed tensors of a matrix, filled band by band, and the squared error of what was filled in."""

    def __init__(self, fmt: Format, shape: tuple[int, int], device: torch.device) -> None:
        """Raises ShapeError when K does not divide into groups."""
        self.shape = shape
        self.packed = torch.empty(affine.packed_shape(fmt, *shape), dtype=torch.uint8, device=device)
        scale = affine.scale_shape(fmt, *shape)
        self.scale = None if scale is None else torch.empty(scale, dtype=torch.uint8, device=device)
        self._error = self._total = 0.0

    def put(self, rows: slice, band: Band, original: Tensor) -> None:
        """Store a band. original: [N, K] fp32, the weights that errors are measured by."""
        tiles = slice(rows.start // ROWS, -(-rows.stop // ROWS))
        assert band.tiles is not None
        self.packed[tiles] = band.tiles
        if self.scale is not None:
            assert band.super is not None
            self.scale[tiles] = band.super
        self._error += sum_of_squares(band.residual)
        self._total += sum_of_squares(original)

    @property
    def relative_error(self) -> float:
        """|W - what is stored|_F / |W|_F."""
        return float((self._error / self._total) ** 0.5) if self._total else 0.0


def quantize(w: Tensor, fmt: AnyFormat, method: str) -> PackedWeight:
    """Quantize a matrix without a compensator.

    w: [N, K] any float dtype    returns: packed weight of the same shape
    Raises WeightError for NaN, infinite or out-of-range weights, ShapeError when K does not divide into groups.
    """
    return quantize_measured(w, fmt, method)[0]


def quantize_measured(w: Tensor, fmt: AnyFormat, method: str) -> tuple[PackedWeight, float]:
    """As `quantize`; also returns the relative error |W - W_dq|_F / |W|_F."""
    if isinstance(fmt, LatticeFormat):
        return quantize_lattice(w, fmt, method=method)
    n, k = w.shape
    tiles = Tiles(fmt, (n, k), w.device)
    for rows in bands(n, k):
        original = check_finite(w[rows].float())
        band = quantize_band(original, fmt, method)
        tiles.put(rows, band, original)
    return PackedWeight(shape=(n, k), packed=tiles.packed, scale=tiles.scale), tiles.relative_error


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
