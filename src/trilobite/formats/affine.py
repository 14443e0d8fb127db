"""Grouped affine integers: `w = scale * q + offset`, codes and metadata side by side in tiles.

A weight [N, K] is cut into tiles of 16 rows x one group of G columns. A tile is its codes (G/32 blocks, see
`bitpack`; with G = 16 one half of a block's planes) followed by its metadata, little endian:

    asymmetric                16 x scale fp16, 16 x offset fp16     w = scale * q + offset
    symmetric                 16 x scale fp16                       w = scale * (q - 2**(bits-1))
    asymmetric, double quant  16 x scale uint8, 16 x offset uint8   decoded by the supergroup's fp32 pairs
    symmetric, double quant   16 x scale uint8

Formats under super-scales (`superscale.py`) have tiles of 64 columns whatever their groups, and a byte for each row and
group behind the codes.

Rows past N are zero codes with zero metadata. With double quantization the scales (and offsets) of a supergroup, that
is of the 16 rows x 8 consecutive groups of one row of tiles (16 groups for 4-bit codes and above), are themselves 8-bit
affine: 128 or 256 values share one fp32 (step, base) pair, as in the offloading paper (MoE offloading, section 3.3).
These pairs are the tensor `weight_scale` [ceil(N/16), D, 8 or 16] uint8: bytes, because parts of a packed weight
follow each other in the file without padding and only bytes need no alignment.

The offset is the paper's zero point in weight units: offset = -scale * z (MiLo eq. 3).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trilobite.errors import ShapeError, WeightError
from trilobite.formats import superscale
from trilobite.formats.bitpack import BITS, BLOCK, ROWS, block_bytes, pack_blocks, unpack_blocks
from trilobite.recipe import Format, is_group

FP16_MAX = 65504.0


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The quantization grid of a matrix as it will be stored: what rounding has to use.

    scale: [N, K/G] fp32, the stored (rounded) scales    offset: [N, K/G] fp32, `scale * 0 + offset` decodes code 0
    stored: metadata bytes [ceil(N/16), K/G, M] uint8     super: [ceil(N/16), D, 8 or 16] uint8, or None
    """

    scale: Tensor
    offset: Tensor
    stored: Tensor
    super: Tensor | None


def tile_bytes(fmt: Format, k: int) -> int:
    """Bytes of one tile: codes and metadata of 16 rows x one group, or of as many as it has."""
    return code_bytes(fmt, k) + _meta_bytes(fmt, k)


def tile_columns(fmt: Format, k: int) -> int:
    """Columns of a tile."""
    return superscale.tile_columns(k) if fmt.super_scales else fmt.group_size(k)


def code_bytes(fmt: Format, k: int) -> int:
    """Bytes of the codes of one tile, which come first."""
    return tile_columns(fmt, k) * ROWS * fmt.bits // 8


def _meta_bytes(fmt: Format, k: int) -> int:
    if fmt.super_scales:
        return ROWS * (tile_columns(fmt, k) // fmt.group)
    return ROWS * (1 if fmt.symmetric else 2) * (1 if fmt.double_quant else 2)


def supergroup(fmt: Format) -> int:
    """Groups along K that share one second-level pair (double quantization only)."""
    return 16 if fmt.bits >= 4 else 8


def packed_shape(fmt: Format, n: int, k: int) -> tuple[int, int, int]:
    """Shape of the `weight_packed` tensor, uint8, of an [n, k] matrix.

    Raises ShapeError when the group does not divide K, or neither of them is what `is_group` wants.
    """
    g = tile_columns(fmt, k)
    if k % g or k % BLOCK or not is_group(g, fmt.bits):
        raise ShapeError(
            f"K={k} does not divide into groups of {g} columns of {fmt.bits} bits; K is a multiple of {BLOCK}, a group "
            f"divides it and is a multiple of {BLOCK}, or 16 unless codes have 3 bits"
        )
    return -(-n // ROWS), k // g, tile_bytes(fmt, k)


def scale_shape(fmt: Format, n: int, k: int) -> tuple[int, int, int] | None:
    """Shape of the second-level `weight_scale` tensor, uint8, or None where scales stand in the tiles alone."""
    if fmt.super_scales:
        return packed_shape(fmt, n, k)[0], -(-k // superscale.SPAN), superscale.SUPER_BYTES
    if not fmt.double_quant:
        return None
    tile_rows, groups, _ = packed_shape(fmt, n, k)
    return tile_rows, -(-groups // supergroup(fmt)), 8 if fmt.symmetric else 16


@lru_cache(maxsize=1024)
def format_of(packed: tuple[int, ...], scale: tuple[int, ...] | None, k: int) -> Format:
    """Read the format off the shapes of the stored tensors: they determine it.

    packed: [ceil(N/16), tiles, bytes of a tile]    scale: of the second-level tensor, or None
    Raises ShapeError when no format has such a tile.
    """
    if len(packed) != 3 or packed[1] == 0 or k % packed[1]:
        raise ShapeError(f"packed tensor of shape {list(packed)} does not belong to a matrix with K={k}")
    columns = k // packed[1]
    if scale is not None and scale[-1] == superscale.SUPER_BYTES:
        known = [Format(bits=b, group=g, super_scales=True) for b in superscale.UNITS for g in (16, 32)]
    else:
        double = scale is not None
        known = [
            Format(bits=b, group=columns, symmetric=s, double_quant=double)
            for b in BITS
            for s in (False, True)
            if is_group(columns, b)
        ]
    for fmt in known:
        if k % BLOCK == 0 and tile_columns(fmt, k) == columns and tile_bytes(fmt, k) == packed[2]:
            return fmt
    raise ShapeError(f"tiles of {packed[2]} bytes for {columns} columns belong to no known format")


def make_grid(scale: Tensor, offset: Tensor | None, fmt: Format) -> Grid:
    """Round scales and offsets to what the format stores.

    scale: [N, K/G] fp32    offset: [N, K/G] fp32, or None for a symmetric format
    Raises WeightError when a value exceeds fp16.
    """
    if fmt.super_scales:
        assert offset is not None
        check_scales(scale, offset, fmt)
        widest = superscale.widest(scale, offset, fmt)
        per_group = superscale.by_group(widest, scale.shape[1], fmt)
        return super_grid(*superscale.nearest(scale, offset, per_group, fmt.bits), widest, fmt)
    n = scale.shape[0]
    tile_rows = -(-n // ROWS)
    parts = [scale] if offset is None else [scale, offset]
    check_range(scale, offset)
    if fmt.double_quant:
        stored, supers, values = [], [], []
        for part in parts:
            code, pair, value = _double_quantize(_by_tile_row(part, tile_rows), supergroup(fmt))
            stored.append(code)
            supers.append(pair)
            values.append(_rows(value, n))
        meta, second = torch.cat(stored, -1), torch.cat(supers, -1).view(torch.uint8)
    else:
        halves = [_by_tile_row(part, tile_rows).half() for part in parts]  # [tile_rows, groups, 16] each
        meta = torch.cat(halves, -1).view(torch.uint8)
        second = None
        values = [_rows(h.float(), n) for h in halves]
    zero = values[1] if offset is not None else values[0] * -(2.0 ** (fmt.bits - 1))
    return Grid(scale=values[0], offset=zero, stored=meta.contiguous(), super=second)


def super_grid(s: Tensor, o: Tensor, supers: Tensor, fmt: Format) -> Grid:
    """The grid of given sub-scales, offset codes [N, K/G] and units [N, D], all fp32, the last as stored."""
    scale, offset = superscale.line(s, o, superscale.by_group(supers, s.shape[1], fmt), fmt.bits)
    stored, second = superscale.store(s, o, supers)
    return Grid(scale=scale, offset=offset, stored=stored, super=second)


def read_grid(packed: Tensor, scale: Tensor | None, fmt: Format, shape: tuple[int, int]) -> Grid:
    """The grid of a packed matrix. packed, scale: as for `decode`    shape: N, K."""
    n, k = shape
    meta = packed[..., code_bytes(fmt, k) :].contiguous()
    step, base = read_metadata(meta, scale, fmt)
    if fmt.super_scales:
        assert scale is not None
        meta = superscale.stored_parts(meta, scale)[0]
    return Grid(scale=_rows(step, n), offset=_rows(base, n), stored=meta, super=scale)


def check_scales(scale: Tensor, offset: Tensor | None, fmt: Format) -> None:
    """Raise WeightError when lines of a format, or the super-scales that reach them, do not fit fp16."""
    check_range(scale, offset)
    if fmt.super_scales:
        assert offset is not None
        check_range(superscale.widest(scale, offset, fmt) * superscale.PARTS, None)


def check_range(scale: Tensor, offset: Tensor | None) -> None:
    """Raise WeightError when a scale or an offset does not fit fp16."""
    for part in (scale, offset):
        # One by one: max(0.0, nan) is 0.0.
        if part is not None and not (top := _absmax(part)) <= FP16_MAX:
            raise WeightError(
                f"scales reach {top:.3g}, fp16 ends at {FP16_MAX:.0f}: the weights are out of range"
            )


def _absmax(t: Tensor) -> float:
    if not t.numel():
        return 0.0
    low, high = t.aminmax()  # a tenth of the time of torch.linalg.vector_norm; a NaN anywhere becomes both
    return max(-float(low), float(high))


def _by_tile_row(values: Tensor, tile_rows: int) -> Tensor:
    """[N, groups] -> [tile_rows, groups, 16], rows past N zero."""
    n, groups = values.shape
    padded = (
        torch.nn.functional.pad(values, (0, 0, 0, tile_rows * ROWS - n)) if tile_rows * ROWS != n else values
    )
    return padded.reshape(tile_rows, ROWS, groups).permute(0, 2, 1)


def _rows(values: Tensor, n: int) -> Tensor:
    """[tile_rows, groups, 16] -> [n, groups]: inverse of `_by_tile_row`."""
    return values.permute(0, 2, 1).reshape(-1, values.shape[1])[:n].contiguous()


def _double_quantize(values: Tensor, per: int) -> tuple[Tensor, Tensor, Tensor]:
    """[tile_rows, groups, 16] -> uint8 codes of the same shape, fp32 (step, base) [tile_rows, D, 2], decoded values."""
    tile_rows, groups, rows = values.shape
    pad = -groups % per
    v = torch.cat((values, values[:, -1:].expand(tile_rows, pad, rows)), 1) if pad else values
    v = v.reshape(tile_rows, -1, per * rows)
    low, high = v.amin(-1, keepdim=True), v.amax(-1, keepdim=True)
    step = (high - low) / 255
    code = (
        torch.where(step > 0, (v - low) / step.clamp_min(1e-38), torch.zeros_like(v)).round_().clamp_(0, 255)
    )
    value = (code * step + low).reshape(tile_rows, groups + pad, rows)[:, :groups]
    pair = torch.cat((step, low), -1)
    return code.to(torch.uint8).reshape(tile_rows, groups + pad, rows)[:, :groups], pair, value


def round_to_grid(w: Tensor, grid: Grid, fmt: Format) -> Tensor:
    """Nearest codes on a stored grid (MiLo eq. 2).

    w: [N, K] fp32    returns: [N, K] uint8
    """
    n, k = w.shape
    groups = w.view(n, -1, fmt.group_size(k))
    inverse = torch.where(grid.scale != 0, 1 / grid.scale, torch.zeros_like(grid.scale))
    codes = (groups - grid.offset[..., None]).mul_(inverse[..., None])
    return codes.round_().clamp_(0, 2**fmt.bits - 1).to(torch.uint8).view(n, k)


def encode(codes: Tensor, grid: Grid, fmt: Format) -> Tensor:
    """Lay codes and metadata out in tiles.

    codes: [N, K] uint8    returns: [ceil(N/16), K/G, tile_bytes] uint8
    """
    n, k = codes.shape
    tile_rows, tiles, _ = packed_shape(fmt, n, k)
    if tile_rows * ROWS != n:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, tile_rows * ROWS - n))
    blocks = pack_blocks(codes, fmt.bits).reshape(tile_rows, tiles, -1)
    meta = superscale.interleave(grid.stored, tiles) if fmt.super_scales else grid.stored
    return torch.cat((blocks, meta), -1)


def decode(packed: Tensor, scale: Tensor | None, fmt: Format, shape: tuple[int, int]) -> Tensor:
    """Tiles back to weights (MiLo eq. 3).

    packed: [ceil(N/16), K/G, tile_bytes] uint8    scale: second-level uint8 tensor or None    returns: [N, K] fp32
    """
    n, k = shape
    tile_rows = packed.shape[0]
    split = code_bytes(fmt, k)
    blocks = packed[..., :split].reshape(tile_rows, k // BLOCK, block_bytes(fmt.bits))
    step, base = read_metadata(packed[..., split:], scale, fmt)
    codes = unpack_blocks(blocks, fmt.bits).view(tile_rows, ROWS, step.shape[1], -1).float()
    w = codes.mul_(step.permute(0, 2, 1)[..., None]).add_(base.permute(0, 2, 1)[..., None])
    return w.view(tile_rows * ROWS, k)[:n]


def read_metadata(meta: Tensor, scale: Tensor | None, fmt: Format) -> tuple[Tensor, Tensor]:
    """Metadata bytes [tile_rows, tiles, M] -> scale and offset, both [tile_rows, groups, 16] fp32."""
    if fmt.super_scales:
        assert scale is not None
        return superscale.read(meta, scale, fmt)
    if not fmt.double_quant:
        half = meta.contiguous().view(torch.float16).float()
        step = half[..., :ROWS]
        return step, step * -(2.0 ** (fmt.bits - 1)) if fmt.symmetric else half[..., ROWS:]
    assert scale is not None
    values = (scale if scale.data_ptr() % 4 == 0 else scale.clone()).contiguous().view(torch.float32)
    pairs = values.repeat_interleave(supergroup(fmt), 1)[:, : meta.shape[1]]
    step = meta[..., :ROWS].float() * pairs[..., 0:1] + pairs[..., 1:2]
    if fmt.symmetric:
        return step, step * -(2.0 ** (fmt.bits - 1))
    return step, meta[..., ROWS:].float() * pairs[..., 2:3] + pairs[..., 3:4]
