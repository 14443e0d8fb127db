"""The GPU layout: made once from the stored tiles, bit for bit the same weights (docs/gpu.md draws it).

A *chunk* is one row x 128 columns. It is four *lanes* of `bits` 32-bit words; lane t holds the 32 columns that thread t
of a quad holds of the left operand of eight `mma.m16n8k16`, columns `16 i + 8 h + 2 t + p`. The 16 pairs f = 2 i + h
have their element p = 0 in the low and p = 1 in the high half of a word, so one shift and one mask give two codes:

    bits   pair f: word, bit of each half
    2      f // 8, 2 (f % 8)
    3      f // 5, 1 + 3 (f % 5) for f < 15; pair 15: bit b of its codes is bit 0 of each half of word b
    4      f // 4, 4 (f % 4)
    8      f // 2, 8 (f % 2)
    16     f (fp16 compensators)

    words  int32 [ceil(K/128), bits, N, 4]
    meta   int32 [K/G, N], scale and offset as two fp16; symmetric: [ceil(K/G / 2), N], scales of two groups

A compensator factor [R, L] is a symmetric matrix in groups of 64 in the same layout, with its columns along L. The
matrices of all experts of a layer lie in one slab of 32-bit words; a table of offsets says where.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from trilobite.errors import DeviceError, ShapeError
from trilobite.formats import affine
from trilobite.formats.bitpack import BLOCK, ROWS, block_bytes, unpack_blocks, unpack_stream
from trilobite.formats.weight import LR_GROUP, PackedWeight, compensator_of, encode_factor
from trilobite.recipe import COMPENSATORS, Format

CHUNK = 128
"""Columns of a chunk."""
LANES = 4
GROUPS = (32, 64)
"""Group sizes below a chunk that the kernels know; besides multiples of 128, and one group a row."""
ALIGN = 32
"""Words: every part of a slab begins at a multiple of 128 bytes."""
ROW_SLICE = 1024
"""Rows that are repacked at a time, which bounds the memory of intermediate results."""


class Place(IntEnum):
    """Columns of a table: offsets of the parts in 32-bit words, rank, and class (-1 = absent)."""

    WORDS = 0
    META = 1
    U_WORDS = 2
    U_META = 3
    V_WORDS = 4
    V_META = 5
    RANK = 6
    CLASS = 7


@dataclass(frozen=True, kw_only=True)
class Coding:
    """What a kernel has to be compiled for; bits = 0: no such matrix. rank: the largest of all that share this."""

    bits: int
    group: int
    symmetric: bool
    rank_bits: int
    rank: int


ABSENT = Coding(bits=0, group=0, symmetric=False, rank_bits=0, rank=0)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Packed matrices in the GPU layout.

    slab: [words] int32    table: [E, P, 8] int64 on the same device, columns as in `Place`
    codings: for every class of experts, P codings; experts of one class run in one launch
    """

    slab: Tensor
    table: Tensor
    codings: tuple[tuple[Coding, ...], ...]

    @property
    def spec(self) -> list[int]:
        """The codings as plain numbers, which is what an operator can take."""
        return [int(v) for row in self.codings for c in row for v in vars(c).values()]


def codings_of(spec: Sequence[int], projections: int) -> tuple[tuple[Coding, ...], ...]:
    """Inverse of `Pack.spec`."""
    codings = [
        Coding(bits=b, group=g, symmetric=bool(s), rank_bits=rb, rank=r)
        for b, g, s, rb, r in (spec[i : i + 5] for i in range(0, len(spec), 5))
    ]
    return tuple(tuple(codings[i : i + projections]) for i in range(0, len(codings), projections))


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes to words.

    codes: [N, K] uint8, or int16 for 16 bits    returns: [ceil(K/128), bits, N, 4] int32
    """
    n, k = codes.shape
    chunks = -(-k // CHUNK)
    out = torch.empty((chunks, bits, n, LANES), dtype=torch.int32, device=codes.device)
    for at in range(0, n, ROW_SLICE):
        rows = pad(codes[at : at + ROW_SLICE], (0, chunks * CHUNK - k)).int() & (2**bits - 1)
        pairs = rows.view(-1, chunks, 16, LANES, 2).permute(1, 2, 0, 3, 4)
        out[:, :, at : at + ROW_SLICE] = _join_pairs(pairs[..., 0] | (pairs[..., 1] << 16), bits)
    return out


def _join_pairs(pairs: Tensor, bits: int) -> Tensor:
    """[C, 16, N, 4] int32 with a code in each half -> words [C, bits, N, 4]."""
    each, low = (5, 1) if bits == 3 else (16 // bits, 0)
    words = torch.zeros_like(pairs[:, :bits])
    for w in range(bits):
        for j in range(each):
            words[:, w] |= pairs[:, each * w + j] << (bits * j + low)
        if bits == 3:
            words[:, w] |= (pairs[:, 15] >> w) & 0x00010001
    return words


def unpack_words(words: Tensor, k: int) -> Tensor:
    """Inverse of `pack_words`.

    words: [C, bits, N, 4] int32    returns: [N, k] uint8, int16 for 16 bits
    """
    chunks, bits, n, _ = words.shape
    mask, (each, low) = 2**bits - 1, (5, 1) if bits == 3 else (16 // bits, 0)
    pairs = torch.empty((chunks, 16, n, LANES, 2), dtype=torch.int32, device=words.device)
    for f in range(16):
        for p in (0, 1):
            if bits == 3 and f == 15:
                high = [((words[:, w] >> (16 * p)) & 1) << w for w in range(3)]
                pairs[:, f, :, :, p] = high[0] | high[1] | high[2]
            else:
                pairs[:, f, :, :, p] = (words[:, f // each] >> (16 * p + bits * (f % each) + low)) & mask
    codes = pairs.permute(2, 0, 1, 3, 4).reshape(n, chunks * CHUNK)[:, :k]
    return codes.to(torch.int16 if bits == 16 else torch.uint8)


def pack_meta(scale: Tensor, offset: Tensor | None) -> Tensor:
    """Scales and offsets to words: [N, K/G] fp16 each -> [K/G, N] int32, symmetric [ceil(K/G / 2), N]."""
    first = scale.T
    if offset is None:
        first = pad(first, (0, 0, 0, first.shape[0] % 2))
        first, second = first[0::2], first[1::2]
    else:
        second = offset.T
    pair = torch.stack((first, second), -1).contiguous()
    return pair.view(torch.int32).squeeze(-1)


def unpack_meta(meta: Tensor, groups: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Inverse of `pack_meta`: fp16 scales [N, groups] and offsets, or None."""
    pair = meta.unsqueeze(-1).view(torch.float16)  # [W, N, 2]
    if not symmetric:
        return pair[..., 0].T.contiguous(), pair[..., 1].T.contiguous()
    return pair.permute(1, 0, 2).reshape(meta.shape[1], -1)[:, :groups].contiguous(), None


def check_format(fmt: Format, k: int, name: str = "weight") -> None:
    """Raise ShapeError for a format that the kernels do not compute."""
    group = fmt.group_size(k)
    if group not in GROUPS and group % CHUNK and group != k:
        raise ShapeError(
            f"{name}: {fmt} has groups of {group} columns; the GPU kernels know groups of 32, 64, multiples of 128 and "
            "whole rows: compress with --group-size 64, or run on the CPU"
        )


def _shapes(w: PackedWeight) -> dict[Place, tuple[int, ...]]:
    """Shapes of the int32 parts of a matrix in the GPU layout."""
    (n, k), fmt = w.shape, _affine(w)
    groups = k // fmt.group_size(k)
    shapes: dict[Place, tuple[int, ...]] = {
        Place.WORDS: (-(-k // CHUNK), fmt.bits, n, LANES),
        Place.META: (-(-groups // 2) if fmt.symmetric else groups, n),
    }
    if w.lra is not None:
        bits = COMPENSATORS[compensator_of(w.lra)]
        for place, length in ((Place.U_WORDS, n), (Place.V_WORDS, k)):
            shapes[place] = (-(-length // CHUNK), bits, w.rank, LANES)
            if bits < 16:
                shapes[Place(place + 1)] = (-(-length // LR_GROUP // 2), w.rank)
    return shapes


def words_needed(w: PackedWeight) -> int:
    """32-bit words of a matrix in the GPU layout."""
    return sum(_aligned(torch.Size(s).numel()) for s in _shapes(w).values())


def _aligned(words: int) -> int:
    return -(-words // ALIGN) * ALIGN


def _affine(w: PackedWeight) -> Format:
    """The format of a matrix. Raises ShapeError for a lattice format."""
    fmt = w.format
    if not isinstance(fmt, Format):
        raise ShapeError(
            f"{fmt}: the GPU kernels compute affine formats; lattice formats run in the reference"
        )
    return fmt


def _parts(w: PackedWeight) -> dict[Place, Tensor]:
    """The int32 parts of a matrix."""
    (n, k), fmt = w.shape, _affine(w)
    cut = fmt.group_size(k) // BLOCK * block_bytes(fmt.bits)
    blocks, meta = w.packed[..., :cut], w.packed[..., cut:]
    bands = w.packed.shape[0]
    codes = unpack_blocks(blocks.reshape(bands, k // BLOCK, block_bytes(fmt.bits)), fmt.bits)[:n]
    scale, offset = affine.read_metadata(meta, w.scale, fmt)  # [bands, groups, 16]; exact in fp16 but for -dq
    rows = [v.permute(0, 2, 1).reshape(bands * ROWS, -1)[:n].half() for v in (scale, offset)]
    parts = {
        Place.WORDS: pack_words(codes, fmt.bits),
        Place.META: pack_meta(rows[0], None if fmt.symmetric else rows[1]),
    }
    for place, factor, length in ((Place.U_WORDS, w.lra, n), (Place.V_WORDS, w.lrb, k)):
        if factor is None:
            continue
        if factor.dtype == torch.float16:
            parts[place] = pack_words(factor.view(torch.int16), 16)
            continue
        bits = COMPENSATORS[compensator_of(factor)]
        stream = unpack_stream(factor[..., :-2].contiguous(), bits)
        parts[place] = pack_words(stream.flatten(1)[:, :length], bits)
        parts[Place(place + 1)] = pack_meta(factor[..., -2:].contiguous().view(torch.float16)[..., 0], None)
    return parts


def coding(w: PackedWeight | None) -> Coding:
    """The coding of one matrix. Raises ShapeError for a format that the kernels do not compute."""
    if w is None:
        return ABSENT
    fmt, k = _affine(w), w.shape[1]
    check_format(fmt, k)
    group = fmt.group_size(k)
    bits = COMPENSATORS[compensator_of(w.lra)] if w.lra is not None else 0
    return Coding(
        bits=fmt.bits,
        group=0 if group == k else group,
        symmetric=fmt.symmetric,
        rank_bits=bits,
        rank=w.rank,
    )


def repack(rows: Sequence[Sequence[PackedWeight | None]]) -> Pack:
    """All experts of a layer, or one linear layer, in the GPU layout.

    rows: for every expert, its matrices (None where one is absent); E rows of P
    Raises ShapeError for a format that the kernels do not compute, DeviceError when memory does not suffice.
    """
    codings = [tuple(coding(w) for w in row) for row in rows]
    classes = [tuple((c.bits, c.group, c.symmetric, c.rank_bits) for c in row) for row in codings]
    kinds = list(dict.fromkeys(classes))
    total = sum(words_needed(w) for row in rows for w in row if w is not None)
    device = next(w.packed.device for row in rows for w in row if w is not None)
    slab = _allocate(total, device)
    table = torch.full((len(rows), len(rows[0]), len(Place)), -1, dtype=torch.int64)
    at = 0
    for e, row in enumerate(rows):
        for p, w in enumerate(row):
            table[e, p, Place.CLASS] = kinds.index(classes[e])
            if w is None:
                continue
            table[e, p, Place.RANK] = w.rank
            for place, part in _parts(w).items():
                table[e, p, place] = at
                slab[at : at + part.numel()] = part.flatten()
                at += _aligned(part.numel())
    merged = tuple(
        tuple(_merge([codings[e][p] for e, c in enumerate(classes) if c == kind]) for p in range(len(kind)))
        for kind in kinds
    )
    return Pack(slab=slab, table=table.to(device), codings=merged)


def _allocate(words: int, device: torch.device) -> Tensor:
    try:
        return torch.zeros(words, dtype=torch.int32, device=device)
    except torch.OutOfMemoryError as e:
        free = torch.cuda.mem_get_info(device)[0] / 1e9
        raise DeviceError(
            f"{device}: the packed weights of one layer need {4 * words / 1e9:.2f} GB beside what is there, "
            f"{free:.2f} GB are free; compress to fewer bits, or load with device='cpu'"
        ) from e


def _merge(codings: Sequence[Coding]) -> Coding:
    values = vars(codings[0])
    return Coding(**{**values, "rank": max(c.rank for c in codings)})


def restore(pack: Pack, shapes: Sequence[tuple[int, int]]) -> list[list[PackedWeight | None]]:
    """The stored tiles again, bit for bit: inverse of `repack`.

    shapes: [N, K] of each of the P matrices    Formats with double quantization come back with plain fp16 scales.
    """
    table, slab = pack.table.cpu(), pack.slab
    rows: list[list[PackedWeight | None]] = []
    for e in range(table.shape[0]):
        codings = pack.codings[int(table[e, 0, Place.CLASS])]
        rows.append(
            [
                None if c.bits == 0 else _restore(slab, table[e, p].tolist(), c, shapes[p])
                for p, c in enumerate(codings)
            ]
        )
    return rows


def _restore(slab: Tensor, row: list[int], c: Coding, shape: tuple[int, int]) -> PackedWeight:
    n, k = shape
    fmt = Format(bits=c.bits, group=c.group or k, symmetric=c.symmetric)
    codes = unpack_words(_part(slab, row[Place.WORDS], (-(-k // CHUNK), c.bits, n, LANES)), k)
    groups = k // fmt.group
    meta = _part(slab, row[Place.META], (-(-groups // 2) if c.symmetric else groups, n))
    scale, offset = unpack_meta(meta, groups, c.symmetric)
    grid = affine.make_grid(scale.float(), None if offset is None else offset.float(), fmt)
    weight = {"packed": affine.encode(codes, grid, fmt)}
    if row[Place.RANK] > 0:
        for key, place, length in (("lra", Place.U_WORDS, n), ("lrb", Place.V_WORDS, k)):
            weight[key] = _restore_factor(slab, row, place, c.rank_bits, length)
    return PackedWeight(shape=shape, **weight)


def _restore_factor(slab: Tensor, row: list[int], place: Place, bits: int, length: int) -> Tensor:
    rank = row[Place.RANK]
    codes = unpack_words(_part(slab, row[place], (-(-length // CHUNK), bits, rank, LANES)), length)
    if bits == 16:
        return codes.view(torch.float16)
    groups = -(-length // LR_GROUP)
    meta = _part(slab, row[place + 1], (-(-groups // 2), rank))
    scale = unpack_meta(meta, groups, True)[0].float()
    step = scale.repeat_interleave(LR_GROUP, 1)[:, :length]
    # Codes beside a scale of zero do not survive `encode_factor`; they decode to zero whatever they are.
    values = (codes.float() - 2 ** (bits - 1)) * step
    return encode_factor(values, scale, {b: name for name, b in COMPENSATORS.items()}[bits])


def _part(slab: Tensor, at: int, shape: tuple[int, ...]) -> Tensor:
    return slab[at : at + torch.Size(shape).numel()].view(shape)
