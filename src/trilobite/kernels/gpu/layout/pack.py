"""The GPU layout: made once from the stored tiles, bit for bit the same weights (docs/gpu.md draws it).

Codes and scales are words as `words.py` says. A compensator's factor V [R, K] is a symmetric matrix in groups of 64
in the same layout. U is kept as [N, R], the left operand of U z, in blocks of 32 ranks: its codes of 3 bits take 4, one
word for a lane of 32 ranks; its scales belong to a rank and 64 rows, `meta` [ceil(N/128), R], two groups of rows a word.
Of E8P formats the words hold codewords (`codewords.py`), `meta` the two fp32 scales, and the random vectors of both
transforms follow as they are stored, padded to whole words. The matrices of all experts of a layer lie in one slab of
32-bit words; a table of offsets says where.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trilobite.errors import DeviceError, ShapeError
from trilobite.formats import affine, lattice, superscale
from trilobite.formats.bitpack import BLOCK, ROWS, block_bytes, unpack_blocks, unpack_stream
from trilobite.formats.incoherence import signs_bytes
from trilobite.formats.superscale import SPAN
from trilobite.formats.weight import LR_GROUP, PackedWeight, compensator_of, encode_factor
from trilobite.kernels.gpu.layout.codewords import pack_codewords, unpack_codewords
from trilobite.kernels.gpu.layout.words import (
    CHUNK,
    LANES,
    pack_meta,
    pack_super,
    pack_words,
    unpack_meta,
    unpack_super,
    unpack_words,
)
from trilobite.kernels.layer import ABSENT, Coding, Codings, Pack, PackColumn
from trilobite.recipe import COMPENSATORS, AnyFormat, Format, LatticeFormat

GROUPS = (16, 32, 64)
"""Group sizes below a chunk that the kernels know; besides multiples of 128, and one group a row."""
RANKS = 32
"""Ranks of U in a block."""
ALIGN = 32
"""Words: every part of a slab begins at a multiple of 128 bytes."""


def computes(fmt: AnyFormat) -> bool:
    """Whether the kernels compute a lattice format: E8P with Hadamard transforms."""
    return isinstance(fmt, LatticeFormat) and fmt.codebook == "e8p" and fmt.transform == "hadamard"


def check_format(fmt: AnyFormat, shape: tuple[int, int], name: str = "weight") -> None:
    """Raise ShapeError for a format of a matrix [N, K] that the kernels do not compute."""
    if isinstance(fmt, LatticeFormat):
        if not computes(fmt):
            raise ShapeError(
                f"{name} is {fmt}; of lattice formats the GPU kernels know e8p with Hadamard transforms: compress with "
                "one of these, or run on the CPU"
            )
        return
    group = fmt.group_size(shape[1])
    if group not in GROUPS and group % CHUNK and group != shape[1]:
        raise ShapeError(
            f"{name}: {fmt} has groups of {group} columns; the GPU kernels know groups of 16, 32, 64, multiples of 128 "
            "and whole rows: compress with --group-size 64, or run on the CPU"
        )


def _shapes(w: PackedWeight) -> dict[PackColumn, tuple[int, ...]]:
    """Shapes of the int32 parts of a matrix in the GPU layout."""
    (n, k), fmt = w.shape, w.format
    shapes: dict[PackColumn, tuple[int, ...]] = {PackColumn.WORDS: (-(-k // CHUNK), fmt.bits, n, LANES)}
    if isinstance(fmt, LatticeFormat):
        assert w.signs_in is not None
        assert w.signs_out is not None
        shapes[PackColumn.META] = (2,)
        shapes[PackColumn.SIGNS_IN] = (-(-w.signs_in.numel() // 4),)
        shapes[PackColumn.SIGNS_OUT] = (-(-w.signs_out.numel() // 4),)
    else:
        shapes[PackColumn.META] = (_meta_words(fmt, k), n)
    if w.lra is not None:
        bits = COMPENSATORS[compensator_of(w.lra)]
        shapes[PackColumn.U_WORDS] = (_u_words(w.rank, bits), n, LANES)
        shapes[PackColumn.V_WORDS] = (-(-k // CHUNK), bits, w.rank, LANES)
        if bits < 16:
            shapes[PackColumn.U_META] = (-(-n // LR_GROUP // 2), w.rank)
            shapes[PackColumn.V_META] = (-(-k // LR_GROUP // 2), w.rank)
    return shapes


def _meta_words(fmt: Format, k: int) -> int:
    """Words of a row's scales and offsets."""
    groups = k // fmt.group_size(k)
    if fmt.super_scales:
        return -(-groups // 4) + -(-k // (2 * SPAN))
    return -(-groups // 2) if fmt.symmetric else groups


def _u_words(rank: int, bits: int) -> int:
    """Words of a lane of a row of U^T, in whole blocks of ranks."""
    return -(-rank // RANKS) * _u_bits(bits) // 4


def _u_bits(bits: int) -> int:
    """Bits in which codes of U are kept: those of 3 bits in 4, so that 32 of them are a word."""
    return 4 if bits == 3 else bits


def _aligned(words: int) -> int:
    return -(-words // ALIGN) * ALIGN


def _affine_parts(w: PackedWeight, fmt: Format) -> dict[PackColumn, Tensor]:
    """Codes and scales of a matrix."""
    n, k = w.shape
    cut = affine.code_bytes(fmt, k)
    blocks, meta = w.packed[..., :cut], w.packed[..., cut:]
    bands = w.packed.shape[0]
    codes = unpack_blocks(blocks.reshape(bands, k // BLOCK, block_bytes(fmt.bits)), fmt.bits)[:n]
    if fmt.super_scales:
        assert w.scale is not None
        parts = superscale.stored_parts(meta, w.scale)
    else:
        parts = affine.read_metadata(meta, w.scale, fmt)  # [bands, groups, 16]; exact in fp16 but for -dq
    first, second = (v.permute(0, 2, 1).reshape(bands * ROWS, -1)[:n] for v in parts)
    if fmt.super_scales:
        words = pack_super(first, second)
    else:
        words = pack_meta(first.half(), None if fmt.symmetric else second.half())
    return {PackColumn.WORDS: pack_words(codes, fmt.bits), PackColumn.META: words}


def _lattice_parts(w: PackedWeight, fmt: LatticeFormat) -> dict[PackColumn, Tensor]:
    """Codewords, scales and random vectors of a matrix."""
    assert w.lattice is not None
    assert w.signs_in is not None
    assert w.signs_out is not None
    record = lattice.read_record(w.lattice)
    scales = torch.tensor([record.scale, record.second], device=w.packed.device)
    codes = lattice.unpack(w.packed, fmt)[: w.shape[0]]
    return {
        PackColumn.WORDS: pack_codewords(codes, fmt.bits),
        PackColumn.META: scales.view(torch.int32),
        PackColumn.SIGNS_IN: pad(w.signs_in, (0, -w.signs_in.numel() % 4)).view(torch.int32),
        PackColumn.SIGNS_OUT: pad(w.signs_out, (0, -w.signs_out.numel() % 4)).view(torch.int32),
    }


def _parts(w: PackedWeight) -> dict[PackColumn, Tensor]:
    """The int32 parts of a matrix."""
    fmt = w.format
    parts = _lattice_parts(w, fmt) if isinstance(fmt, LatticeFormat) else _affine_parts(w, fmt)
    for place, factor, length in (
        (PackColumn.U_WORDS, w.lra, w.shape[0]),
        (PackColumn.V_WORDS, w.lrb, w.shape[1]),
    ):
        if factor is None:
            continue
        bits = COMPENSATORS[compensator_of(factor)]
        if bits == 16:
            codes = factor.view(torch.int16)
        else:
            codes = unpack_stream(factor[..., :-2].contiguous(), bits).flatten(1)[:, :length]
            scales = factor[..., -2:].contiguous().view(torch.float16)[..., 0]
            parts[PackColumn(place + 1)] = pack_meta(scales, None)
        if place == PackColumn.V_WORDS:
            parts[place] = pack_words(codes, bits)
        else:
            words = pack_words(codes.T.contiguous(), _u_bits(bits)).flatten(0, 1)
            parts[place] = words[: _u_words(w.rank, bits)]
    return parts


def coding(w: PackedWeight | None) -> Coding:
    """The coding of one matrix. Raises ShapeError for a format that the kernels do not compute."""
    if w is None:
        return ABSENT
    fmt, k = w.format, w.shape[1]
    check_format(fmt, w.shape)
    low = COMPENSATORS[compensator_of(w.lra)] if w.lra is not None else 0
    if isinstance(fmt, LatticeFormat):
        assert w.signs_in is not None
        return Coding(bits=fmt.bits, e8p=True, tuned=w.signs_in.numel() == 2 * k, rank_bits=low, rank=w.rank)
    group = fmt.group_size(k)
    group = 0 if group == k and not fmt.super_scales else group
    return Coding(
        bits=fmt.bits,
        group=group,
        symmetric=fmt.symmetric,
        super_scales=fmt.super_scales,
        rank_bits=low,
        rank=w.rank,
    )


def repack(rows: Sequence[Sequence[PackedWeight | None]]) -> Pack:
    """All experts of a layer, or one linear layer, in the GPU layout.

    rows: for every expert, its matrices (None where one is absent); E rows of P
    Raises ShapeError for a format that the kernels do not compute, DeviceError when memory does not suffice.
    """
    table, codings, words = arrange(rows)
    device = next(w.packed.device for row in rows for w in row if w is not None)
    slab = _allocate(words, device)
    for places, row in zip(table, rows, strict=True):
        fill(slab, places, row)
    shapes = [next((w.shape for w in column if w is not None), (0, 0)) for column in zip(*rows, strict=True)]
    return Pack(slab=slab, table=table.to(device), codings=codings, shapes=shapes)


def arrange(rows: Sequence[Sequence[PackedWeight | None]]) -> tuple[Tensor, Codings, int]:
    """Where `repack` puts what: the table [E, P, 10] int64, the codings, and the words of the slab.

    The parts of an expert lie next to each other, expert after expert.
    Raises ShapeError for a format that the kernels do not compute.
    """
    codings = [tuple(coding(w) for w in row) for row in rows]
    classes = [tuple(replace(c, rank=0) for c in row) for row in codings]
    kinds = list(dict.fromkeys(classes))
    table = torch.full((len(rows), len(rows[0]), len(PackColumn)), -1, dtype=torch.int64)
    end = 0
    for e, row in enumerate(rows):
        for p, w in enumerate(row):
            table[e, p, PackColumn.CLASS] = kinds.index(classes[e])
            if w is None:
                continue
            table[e, p, PackColumn.RANK] = w.rank
            for place, shape in _shapes(w).items():
                table[e, p, place] = end
                end += _aligned(torch.Size(shape).numel())
    merged = tuple(
        tuple(_merge([codings[e][p] for e, c in enumerate(classes) if c == kind]) for p in range(len(kind)))
        for kind in kinds
    )
    return table, merged, end


def fill(slab: Tensor, table: Tensor, row: Sequence[PackedWeight | None]) -> None:
    """Write the matrices of one expert, whose weights may lie in the very memory that is written to.

    slab: [words] int32    table: [P, 10] int64 on the CPU, this expert's row
    """
    parts = [None if w is None else _parts(w) for w in row]
    for places, made in zip(table.tolist(), parts, strict=True):
        for place, part in (made or {}).items():
            slab[places[place] : places[place] + part.numel()] = part.flatten()


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
    return replace(codings[0], rank=max(c.rank for c in codings))


def restore(pack: Pack) -> list[list[PackedWeight | None]]:
    """The stored tiles again, bit for bit: inverse of `repack`.

    Formats with double quantization come back with plain fp16 scales.
    """
    table, slab = pack.table.cpu(), pack.slab
    rows: list[list[PackedWeight | None]] = []
    for e in range(table.shape[0]):
        codings = pack.codings[int(table[e, 0, PackColumn.CLASS])]
        rows.append(
            [
                None if c.bits == 0 else _restore(slab, table[e, p].tolist(), c, pack.shapes[p])
                for p, c in enumerate(codings)
            ]
        )
    return rows


def _restore(slab: Tensor, row: list[int], c: Coding, shape: tuple[int, int]) -> PackedWeight:
    n, k = shape
    words = _part(slab, row[PackColumn.WORDS], (-(-k // CHUNK), c.bits, n, LANES))
    weight: dict[str, Any] = (
        _restore_lattice(slab, row, c, shape, words) if c.e8p else _restore_affine(slab, row, c, shape, words)
    )
    if row[PackColumn.RANK] > 0:
        for key, place, length in (("lra", PackColumn.U_WORDS, n), ("lrb", PackColumn.V_WORDS, k)):
            weight[key] = _restore_factor(slab, row, place, c.rank_bits, length)
    return PackedWeight(shape=shape, **weight)


def _restore_affine(
    slab: Tensor, row: list[int], c: Coding, shape: tuple[int, int], words: Tensor
) -> dict[str, Tensor]:
    n, k = shape
    fmt = Format(bits=c.bits, group=c.group or k, symmetric=c.symmetric, super_scales=c.super_scales)
    groups = k // fmt.group
    meta = _part(slab, row[PackColumn.META], (_meta_words(fmt, k), n))
    if fmt.super_scales:
        stored, supers = unpack_super(meta, groups, -(-k // SPAN))
        grid = affine.super_grid(*superscale.split(stored), supers.float() / superscale.PARTS, fmt)
        assert grid.super is not None
        return {"packed": affine.encode(unpack_words(words, k), grid, fmt), "scale": grid.super}
    scale, offset = unpack_meta(meta, groups, c.symmetric)
    grid = affine.make_grid(scale.float(), None if offset is None else offset.float(), fmt)
    return {"packed": affine.encode(unpack_words(words, k), grid, fmt)}


def _restore_lattice(
    slab: Tensor, row: list[int], c: Coding, shape: tuple[int, int], words: Tensor
) -> dict[str, Tensor]:
    n, k = shape
    fmt = LatticeFormat(codebook="e8p", bits=c.bits)
    scale, second = _part(slab, row[PackColumn.META], (2,)).view(torch.float32).tolist()
    parts = {
        "packed": lattice.pack(unpack_codewords(words, k), fmt),
        "lattice": lattice.LatticeRecord(format=fmt, scale=scale, second=second).to_tensor().to(slab.device),
    }
    for name, place, length in (("signs_in", PackColumn.SIGNS_IN, k), ("signs_out", PackColumn.SIGNS_OUT, n)):
        size = signs_bytes(fmt.transform, length, tuned=c.tuned)
        parts[name] = _part(slab, row[place], (-(-size // 4),)).view(torch.uint8)[:size].clone()
    return parts


def _restore_factor(slab: Tensor, row: list[int], place: PackColumn, bits: int, length: int) -> Tensor:
    rank = row[PackColumn.RANK]
    if place == PackColumn.V_WORDS:
        codes = unpack_words(_part(slab, row[place], (-(-length // CHUNK), bits, rank, LANES)), length)
    else:
        words = _part(slab, row[place], (_u_words(rank, bits), length, LANES))
        words = pad(words, (0, 0, 0, 0, 0, -len(words) % _u_bits(bits)))
        codes = unpack_words(words.view(-1, _u_bits(bits), length, LANES), rank).T.contiguous()
    if bits == 16:
        return codes.view(torch.float16)
    groups = -(-length // LR_GROUP)
    meta = _part(slab, row[place + 1], (-(-groups // 2), rank))
    scale = unpack_meta(meta, groups, True)[0].float()
    step = scale.repeat_interleave(LR_GROUP, 1)[:, :length]
    # Codes beside a scale of zero do not survive `encode_factor`; they decode to zero whatever they are.
    values = (codes.float() - 2 ** (bits - 1)) * step
    return encode_factor(values, scale, {b: name for name, b in COMPENSATORS.items()}[bits])


def _part(slab: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    return slab[offset : offset + torch.Size(shape).numel()].view(shape)
