"""Scales and offsets of 4 bits in groups of 16 or 32 columns, under one fp16 scale for each row and span of 256 columns.

    w = d / 128 * (s * q + u * (o - 15))        s = 1 .. 16, o = 0 .. 15, u a constant of the bits

The bracket plus 15 u is at most 254 wherever an encoder made it, so that kernels make bytes of codes, multiply them in
integers, and by `d` once. It is about as large as the largest weight, and so far from what fp16 cannot hold. A group's
byte is s - 1 | o << 4. The last span of a row may be shorter.
"""

import torch
from torch import Tensor

from trilobite.formats.bitpack import BLOCK, ROWS
from trilobite.recipe import Format

SPAN = 256
"""Columns of a row under one super-scale."""
TILE = 64
"""Columns of a tile; 32 where K is no multiple of 64."""
UNITS = {2: 3, 3: 6, 4: 8}
"""What one step of an offset counts, by bits: about half a code of a large group."""
MOST = 15
"""The largest offset code, which stands for zero."""
SCALES = 16
"""The largest sub-scale."""
TOP = 254
"""The most that a code may count: 127 to either side of the middle, which kernels with signed bytes need."""
PARTS = 128
"""Parts of a stored super-scale that make its unit: so it is as large as the weights."""
SUPER_BYTES = 2 * ROWS


def tile_columns(k: int) -> int:
    """Columns of a tile in a matrix of K = k columns."""
    return TILE if k % TILE == 0 else BLOCK


def most_offset(scale: Tensor, bits: int) -> Tensor:
    """The largest offset code with which all codes of a group stay below 256. scale: sub-scales, any shape."""
    most: Tensor = (TOP - scale * (2**bits - 1)) / UNITS[bits]
    return most.floor_().clamp_(0, MOST)


def spans(values: Tensor, fmt: Format) -> Tensor:
    """Groups by span, the last one padded with zeros: [N, groups] -> [N, D, 256 / G]."""
    per = SPAN // fmt.group
    return torch.nn.functional.pad(values, (0, -values.shape[1] % per)).view(len(values), -1, per)


def by_group(supers: Tensor, groups: int, fmt: Format) -> Tensor:
    """A value of a span at each of its groups: [N, D] -> [N, groups]."""
    return supers.repeat_interleave(SPAN // fmt.group, 1)[:, :groups]


def nearest(scale: Tensor, offset: Tensor, supers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Sub-scale and offset code closest to a line.

    scale, offset, supers: the line and the unit of each group, any shape    returns: s, o of that shape, fp32
    """
    first, middle = in_units(scale, offset, supers, bits)
    s = first.clamp_(1, SCALES)
    return s, offset_at(s, middle, bits)


def in_units(scale: Tensor, offset: Tensor, supers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The sub-scale next to a line, before it is clamped, and the middle of the line, in units.

    A line above zero begins at zero, and is as steep as it must be to reach its end.
    """
    inverse, top = torch.where(supers != 0, 1 / supers, 0.0), 2**bits - 1
    reaching = ((offset + scale * top) * inverse / top).ceil_()
    first = torch.maximum((scale * inverse).round_(), torch.where(offset > 0, reaching, 0.0))
    return first, (offset + scale * (top / 2)) * inverse


def rounded(supers: Tensor) -> Tensor:
    """Units as they are stored, in fp32."""
    return (supers * PARTS).half().float() / PARTS


def offset_at(s: Tensor, middle: Tensor, bits: int) -> Tensor:
    """The offset code that puts the middle of the codes closest to `middle`, in units."""
    o = ((middle - s * ((2**bits - 1) / 2)) / UNITS[bits] + MOST).round_()
    return torch.minimum(o.clamp_(min=0), most_offset(s, bits))


def widest(scale: Tensor, offset: Tensor, fmt: Format) -> Tensor:
    """The least unit of each span that reaches the scales and the ends of all its groups' lines.

    scale, offset: [N, groups] fp32    returns: [N, D] fp32, as stored
    """
    unit, top = UNITS[fmt.bits], 2**fmt.bits - 1
    ends = torch.maximum(-offset / (MOST * unit), (offset + scale * top) / min(TOP // 2, SCALES * top))
    return rounded(spans(torch.maximum(scale / SCALES, ends), fmt).amax(-1))


def line(s: Tensor, o: Tensor, supers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What sub-scales and offset codes stand for in units `supers`: scale and offset, fp32, exact."""
    return supers * s, supers * (UNITS[bits] * (o - MOST))


def store(s: Tensor, o: Tensor, supers: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of the groups [ceil(N/16), groups, 16] and of the super-scales [ceil(N/16), D, 32], both uint8.

    s, o: [N, groups] fp32    supers: units [N, D] fp32, as `rounded`    Rows past N are zero.
    """
    rows = -len(s) % ROWS
    codes = ((s - 1) + 16 * o).to(torch.uint8)
    by_row = torch.nn.functional.pad(codes, (0, 0, 0, rows)).view(-1, ROWS, s.shape[1])
    second = torch.nn.functional.pad(supers * PARTS, (0, 0, 0, rows)).view(-1, ROWS, supers.shape[1]).half()
    return by_row.transpose(1, 2).contiguous(), second.transpose(1, 2).contiguous().view(torch.uint8)


def parts(stored: Tensor, second: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `store`: sub-scales, offset codes [n, groups] and units [n, D], all fp32."""
    s, o = split(stored)
    units = second.view(torch.float16).float() / PARTS
    by_row = [part.transpose(1, 2).reshape(-1, part.shape[1])[:n] for part in (s, o, units)]
    return by_row[0], by_row[1], by_row[2]


def interleave(stored: Tensor, tiles: int) -> Tensor:
    """Bytes of groups as they lie in tiles, row by row: [B, groups, 16] -> [B, tiles, 16 * groups of a tile]."""
    b, groups, _ = stored.shape
    return stored.view(b, tiles, groups // tiles, ROWS).transpose(2, 3).flatten(2)


def stored_parts(meta: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Stored bytes -> bytes of the groups [ceil(N/16), groups, 16] uint8, super-scales [ceil(N/16), D, 16] fp16.

    meta: [ceil(N/16), tiles, 16 * groups of a tile] uint8    scale: [ceil(N/16), D, 32] uint8
    """
    b, tiles, size = meta.shape
    codes = meta.reshape(b, tiles, ROWS, size // ROWS).transpose(2, 3).reshape(b, -1, ROWS)
    aligned = scale if scale.data_ptr() % 2 == 0 else scale.clone()
    return codes, aligned.contiguous().view(torch.float16)


def split(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of groups, any shape -> sub-scales and offset codes of that shape, fp32."""
    return (codes & 15).float() + 1, (codes >> 4).float()


def read(meta: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Stored bytes, as in `stored_parts` -> scale and offset, both [ceil(N/16), groups, 16] fp32."""
    codes, supers = stored_parts(meta, scale)
    per_group = (supers.float() / PARTS).repeat_interleave(SPAN // fmt.group, 1)[:, : codes.shape[1]]
    return line(*split(codes), per_group, fmt.bits)
