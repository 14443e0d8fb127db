"""Parts of a packed matrix, byte for byte: rows or columns of it as a packed matrix of their own.

This is what tensor parallelism needs. Rows go by bands of 16, columns by tiles; a compensator's factors by their groups
of 64 values; columns that share second-level scales (double quantization, super-scales) stay together, unless all
columns of the part share them. What does not fit is covered by the smallest part that does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats import superscale
from trilobite.formats.affine import supergroup, tile_columns
from trilobite.formats.bitpack import BLOCK, ROWS
from trilobite.formats.weight import LR_GROUP, PackedWeight
from trilobite.recipe import Format

Range = tuple[int, int]
"""First, and one past the last."""


def rows(w: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Rows [start, stop) of a matrix in an affine format, as views.

    Raises ShapeError where `rows_fit` says no.
    """
    if not rows_fit(w, start, stop):
        raise ShapeError(f"rows {start} to {stop} of {w.shape[0]} cannot be cut out of a packed matrix")
    bands = slice(start // ROWS, -(-stop // ROWS))
    return replace(
        w,
        shape=(stop - start, w.shape[1]),
        packed=w.packed[bands],
        scale=None if w.scale is None else w.scale[bands],
        lra=_factor(w.lra, start, stop),
    )


def columns(w: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Columns [start, stop) of a matrix in an affine format, copied.

    Raises ShapeError where `columns_fit` says no.
    """
    if not columns_fit(w, start, stop):
        raise ShapeError(f"columns {start} to {stop} of {w.shape[1]} cannot be cut out of a packed matrix")
    tile, shared = _tile(w), _shared(w)
    scale = None if w.scale is None else w.scale[:, start // shared : -(-stop // shared)].contiguous()
    return replace(
        w,
        shape=(w.shape[0], stop - start),
        packed=w.packed[:, start // tile : stop // tile].contiguous(),
        scale=scale,
        lrb=_factor(w.lrb, start, stop),
    )


def rows_fit(w: PackedWeight, start: int, stop: int) -> bool:
    """Whether these rows can be cut out."""
    unit = LR_GROUP if _grouped(w.lra) else ROWS
    return 0 <= start < stop <= w.shape[0] and start % unit == 0 and (stop % unit == 0 or stop == w.shape[0])


def columns_fit(w: PackedWeight, start: int, stop: int) -> bool:
    """Whether these columns can be cut out."""
    k, tile, shared = w.shape[1], _tile(w), _shared(w)
    units = [tile, LR_GROUP] if _grouped(w.lrb) else [tile]
    return (
        0 <= start < stop <= k
        and all(edge % unit == 0 or edge == k for edge in (start, stop) for unit in units)
        and (stop - start) % BLOCK == 0
        and tile_columns(_format(w), stop - start) == tile
        and (start % shared == 0 or stop <= start - start % shared + shared)
    )


def covering_rows(w: PackedWeight, start: int, stop: int) -> Range:
    """The least rows around these that can be cut out."""
    unit = LR_GROUP if _grouped(w.lra) else ROWS
    return start - start % unit, min(-(-stop // unit) * unit, w.shape[0])


def covering_columns(w: PackedWeight, start: int, stop: int) -> Range:
    """Few columns around these that can be cut out; all of them where there are no fewer."""
    k = w.shape[1]
    for unit in _units([w]):
        outer = start - start % unit, min(-(-stop // unit) * unit, k)
        if columns_fit(w, *outer):
            return outer
    return 0, k


def even_split(
    into: Sequence[PackedWeight], out_of: Sequence[PackedWeight], parts: int
) -> list[Range] | None:
    """Cut what lies between matrices, rows of the first ones and columns of the others, as evenly as they allow.

    None where there is no way to give each part something.
    """
    length = out_of[0].shape[1]
    for unit in _units(out_of):
        count = -(-length // unit)
        edges = [min(count * i // parts * unit, length) for i in range(parts + 1)]
        ranges = list(pairwise(edges))
        if all(rows_fit(w, *r) for r in ranges for w in into) and all(
            columns_fit(w, *r) for r in ranges for w in out_of
        ):
            return ranges
    return None


def _units(weights: Sequence[PackedWeight]) -> Iterator[int]:
    """Lengths to try, in ascending order: pieces of a block, of a factor's groups, of what shares scales."""
    widest = max(max(_tile(w), _shared(w)) for w in weights)
    unit = BLOCK
    while unit < max(widest, LR_GROUP):
        yield unit
        unit *= 2
    yield from sorted({max(_tile(w), _shared(w)) for w in weights})


def _format(w: PackedWeight) -> Format:
    fmt = w.format
    if not isinstance(fmt, Format):
        raise ShapeError(f"{fmt}: matrices in lattice formats are rotated and cannot be cut")
    return fmt


def _tile(w: PackedWeight) -> int:
    return tile_columns(_format(w), w.shape[1])


def _shared(w: PackedWeight) -> int:
    """Columns under one second-level scale; those of a tile where there is none."""
    fmt = _format(w)
    if fmt.super_scales:
        return superscale.SPAN
    return _tile(w) * supergroup(fmt) if fmt.double_quant else _tile(w)


def _grouped(factor: Tensor | None) -> bool:
    """Whether a factor's values share scales."""
    return factor is not None and factor.dim() == 3


def _factor(factor: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Values [start, stop) of each of a factor's vectors."""
    if factor is None:
        return None
    if not _grouped(factor):
        return factor[:, start:stop].contiguous()
    return factor[:, start // LR_GROUP : -(-stop // LR_GROUP)].contiguous()
