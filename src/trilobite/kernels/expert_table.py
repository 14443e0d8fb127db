"""Where the parts of every expert lie: one slab of bytes and one table, the arguments of the `experts` operator.

The slab is a 1-D uint8 tensor that holds all experts of a layer, usually a view of the mapped checkpoint file; the
table [E, 3, 16] int64 (projections gate, up, down; columns as in `Column`) says where each part starts and how it is
encoded. So experts of one layer may differ in format and rank, one operator call needs two tensors instead of
thousands, and native kernels get plain pointers. Gate rows of experts without a gate have `packed` = -1; rows of
affine formats have -1 in the columns from `lattice` on.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from trilobite import huge_pages
from trilobite.errors import ShapeError
from trilobite.formats.lattice import DIM
from trilobite.formats.weight import PackedWeight, check_unscaled, compensator_of, factor_shape, stored_shapes
from trilobite.recipe import CODEBOOKS, COMPENSATORS, TRANSFORMS, AnyFormat, Format, LatticeFormat


class Column(IntEnum):
    """Columns of the table: byte offsets into the slab (-1 = absent), then the encoding."""

    PACKED = 0
    SCALE = 1
    LRA = 2
    LRB = 3
    RANK = 4
    RANK_BITS = 5
    BITS = 6
    GROUP = 7
    SYMMETRIC = 8
    METADATA = 9
    LATTICE = 10
    SIGNS_IN = 11
    SIGNS_OUT = 12
    TUNED = 13
    CODEBOOK = 14
    TRANSFORM = 15


GATE, UP, DOWN = 0, 1, 2


def check_routing(x: Tensor, index: Tensor, weights: Tensor) -> None:
    """Raise ShapeError when the tokens and their routing do not fit together.

    x: [T, H]    index: [T, A] int64 | int32    weights: [T, A]
    """
    if x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
        raise ShapeError(
            f"experts: x is {list(x.shape)}, top_k_index {list(index.shape)}, top_k_weights "
            f"{list(weights.shape)}; expected [T, H], [T, A], [T, A]"
        )
    if index.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"experts: top_k_index is {index.dtype}, expected int64 or int32")


def build(experts: Sequence[tuple[PackedWeight | None, PackedWeight, PackedWeight]]) -> tuple[Tensor, Tensor]:
    """One slab and table for the (gate, up, down) matrices of all experts of a layer.

    When the parts already lie in one storage (a mapped file, or an earlier slab) the slab is a view of it and nothing
    is copied; otherwise they are copied, expert by expert, each part at a multiple of 64 bytes.
    returns: slab [bytes] uint8, table [E, 3, 16] int64 on the CPU
    """
    parts = [t for e in experts for w in e if w is not None for t in w.tensors().values()]
    storages = {t.untyped_storage().data_ptr() for t in parts}
    if len(storages) == 1:
        slab, offset_of = _view(parts)
    else:
        slab, offset_of = _copy(parts)
    absent = [-1] * len(Column)
    rows = [[absent if w is None else _row(w, offset_of) for w in matrices] for matrices in experts]
    return slab, torch.tensor(rows, dtype=torch.int64)


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether both are views of the same memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _view(parts: list[Tensor]) -> tuple[Tensor, dict[int, int]]:
    storage = parts[0].untyped_storage()
    base = storage.data_ptr()
    first = min(t.data_ptr() for t in parts)
    last = max(t.data_ptr() + t.nbytes for t in parts)
    whole = torch.empty(0, dtype=torch.uint8, device=parts[0].device).set_(storage)  # type: ignore[call-overload]
    return whole[first - base : last - base], {id(t): t.data_ptr() - first for t in parts}


def _copy(parts: list[Tensor]) -> tuple[Tensor, dict[int, int]]:
    offset_of, end = {}, 0
    for t in parts:
        offset_of[id(t)] = end
        end += -(-t.nbytes // 64) * 64
    device = parts[0].device
    slab = (
        huge_pages.empty(end) if device.type == "cpu" else torch.empty(end, dtype=torch.uint8, device=device)
    )
    for t in parts:
        offset = offset_of[id(t)]
        slab[offset : offset + t.nbytes] = t.contiguous().view(torch.uint8).flatten()
    return slab, offset_of


def _row(w: PackedWeight, offset_of: dict[int, int]) -> list[int]:
    fmt = check_unscaled(w).format
    offsets = [-1 if t is None else offset_of[id(t)] for t in (w.packed, w.scale, w.lra, w.lrb)]
    rank_bits = 0 if w.lra is None else COMPENSATORS[compensator_of(w.lra)]
    if isinstance(fmt, LatticeFormat):
        assert w.lattice is not None
        assert w.signs_in is not None
        assert w.signs_out is not None
        tuned = int(w.signs_in.numel() == 2 * w.shape[1])
        places = [offset_of[id(t)] for t in (w.lattice, w.signs_in, w.signs_out)]
        kind = [CODEBOOKS.index(fmt.codebook), TRANSFORMS.index(fmt.transform)]
        return [*offsets, w.rank, rank_bits, fmt.bits, DIM, 0, 0, *places, tuned, *kind]
    return [
        *offsets,
        w.rank,
        rank_bits,
        fmt.bits,
        fmt.group,
        int(fmt.symmetric),
        metadata_kind(fmt),
        *6 * [-1],
    ]


def metadata_kind(fmt: Format) -> int:
    """How a format stores its scales, as kernels are told: 0 fp16, 1 double quantization, 2 under super-scales."""
    return 2 if fmt.super_scales else int(fmt.double_quant)


def has_lattice(table: Tensor) -> bool:
    """Whether any matrix of a table is in a lattice format. table: [E, 3, 16] int64."""
    return table.shape[-1] > Column.LATTICE and bool((table[..., Column.LATTICE] >= 0).any())


def has_gates(table: Tensor) -> bool:
    """Whether the experts of a table have gates. table: [E, 3, 16] int64    Raises ShapeError where only some do."""
    gated = int((table[:, GATE, Column.PACKED] >= 0).sum())  # one pass: the operator asks at every call
    if gated not in (0, table.shape[0]):
        raise ShapeError("experts: some have a gate and some have none; expected all or none")
    return gated > 0


def expert_weight(slab: Tensor, row: Tensor, shape: tuple[int, int]) -> PackedWeight | None:
    """The packed weight [N, K] that a table row describes, as views of the slab; None where packed = -1.

    slab: [bytes] uint8    row: [16] int64
    Raises ShapeError when a part reaches past the end of the slab.
    """
    r = [int(v) for v in row]
    if r[Column.PACKED] < 0:
        return None
    n, k = shape
    shapes = stored_shapes(_format(r), n, k, tuned=r[Column.TUNED] > 0)
    weight: dict[str, Any] = {
        suffix: _part(slab, r[Column[suffix.upper()]], part, torch.uint8) for suffix, part in shapes.items()
    }
    if r[Column.RANK] > 0:
        kind = {bits: name for name, bits in COMPENSATORS.items()}[r[Column.RANK_BITS]]
        dtype = torch.float16 if kind == "fp16" else torch.uint8
        for key, length in (("lra", n), ("lrb", k)):
            offset = r[Column.LRA if key == "lra" else Column.LRB]
            weight[key] = _part(slab, offset, factor_shape(kind, r[Column.RANK], length), dtype)
    return PackedWeight(shape=shape, **weight)


def _format(r: list[int]) -> AnyFormat:
    if r[Column.LATTICE] >= 0:
        return LatticeFormat(
            codebook=CODEBOOKS[r[Column.CODEBOOK]],
            bits=r[Column.BITS],
            transform=TRANSFORMS[r[Column.TRANSFORM]],
        )
    return Format(
        bits=r[Column.BITS],
        group=r[Column.GROUP],
        symmetric=bool(r[Column.SYMMETRIC]),
        double_quant=r[Column.METADATA] == 1,
        super_scales=r[Column.METADATA] == 2,
    )


def _part(slab: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if offset < 0 or offset + nbytes > slab.numel():
        raise ShapeError(
            f"experts: a part of {nbytes} bytes at {offset} does not fit a slab of {slab.numel()} bytes"
        )
    part = slab[offset : offset + nbytes]
    if (part.data_ptr() if part.device.type == "cpu" else offset) % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(shape)
