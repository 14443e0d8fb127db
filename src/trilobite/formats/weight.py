"""PackedWeight and Compensator: all that is needed to decode one matrix, and THE one `dequantize`.

On disk a packed weight `model.layers.0.self_attn.q_proj.weight` is up to six tensors, the original name plus a suffix:

    weight_packed      tiles (formats/affine.py, formats/lattice.py)        always
    weight_scale       second-level scales                                  double quantization, super-scales
    weight_lattice     codebook, transform and scales (formats/lattice.py)  lattice formats only
    weight_signs_in    random vector of the transform of the K inputs       lattice formats only
    weight_signs_out   random vector of the transform of the N outputs      lattice formats only
    weight_lra         compensator factor U, transposed                     rank > 0
    weight_lrb         compensator factor V                                 rank > 0

With a lattice format the codes stand for a matrix C in rotated coordinates, W = T_out^T C T_in + U V, where T_in and
T_out are the transforms of formats/incoherence.py (QuIP#, Algorithms 2 and 3).

A compensator factor of R vectors of length L is stored vector by vector in groups of 64 values, the last one padded
with zero codes. For 3 and 8 bits a group is a bit stream of 64 codes followed by its fp16 scale: 26 or 66 bytes; so a
factor is [R, ceil(L/64), 26 or 66] uint8. In 16 bit it is [R, L] fp16. Grouping runs along the long dimension, so
every rank-one term has scales of its own and no rank wastes a bit. U is stored as its transpose [R, N].
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats import affine, lattice
from trilobite.formats.bitpack import pack_stream, unpack_stream
from trilobite.formats.incoherence import Spin, read_signs, signs_bytes, store_signs
from trilobite.recipe import COMPENSATORS, AnyFormat, Format, LatticeFormat

LR_GROUP = 64
"""Values of a compensator factor that share one scale."""
SUFFIXES = ("packed", "scale", "lattice", "signs_in", "signs_out", "lra", "lrb")


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A quantized matrix [N, K] as stored: codes, scales and an optional low-rank compensator.

    packed: [ceil(N/16), tiles, tile_bytes] uint8      scale: [ceil(N/16), D, 8, 16 or 32] uint8, or None
    lattice: [12] uint8, signs_in, signs_out: uint8, of a lattice format (its G is 8); all or none
    lra: U^T, a factor of R vectors of length N        lrb: V, a factor of R vectors of length K; both or none
    exponent: of the power of two that all of it is multiplied with; no tensor holds it. Kernels run weights without one
    """

    shape: tuple[int, int]
    packed: Tensor
    scale: Tensor | None = None
    lattice: Tensor | None = None
    signs_in: Tensor | None = None
    signs_out: Tensor | None = None
    lra: Tensor | None = None
    lrb: Tensor | None = None
    exponent: int = 0

    @property
    def format(self) -> AnyFormat:
        """The format of the codes: what the lattice record says, or else what the shapes determine."""
        if self.lattice is not None:
            return lattice.read_record(self.lattice).format
        scale = None if self.scale is None else tuple(self.scale.shape)
        return affine.format_of(tuple(self.packed.shape), scale, self.shape[1])

    @property
    def double_quant(self) -> bool:
        """Whether scales are themselves codes under fp32 pairs, which the GPU layout does not keep."""
        fmt = self.format
        return isinstance(fmt, Format) and fmt.double_quant

    @property
    def rank(self) -> int:
        """Rank of the compensator; 0 without one."""
        return 0 if self.lra is None else self.lra.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by suffix, in file order."""
        parts = {s: getattr(self, s) for s in SUFFIXES}
        return {s: t for s, t in parts.items() if t is not None}

    def to(self, device: torch.device) -> "PackedWeight":
        """The same on a device."""
        parts: dict[str, Any] = {s: t.to(device) for s, t in self.tensors().items()}
        return replace(self, **parts)

    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(t.nbytes for t in self.tensors().values())


def stored_shapes(fmt: AnyFormat, n: int, k: int, *, tuned: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of an [n, k] matrix by suffix, in file order, all uint8, without a compensator.

    tuned: the vectors of a lattice format's transforms are fp16 instead of bits
    Raises ShapeError when K does not divide into groups.
    """
    if isinstance(fmt, LatticeFormat):
        return {
            "packed": lattice.packed_shape(fmt, n, k),
            "lattice": (lattice.RECORD_BYTES,),
            "signs_in": (signs_bytes(fmt.transform, k, tuned=tuned),),
            "signs_out": (signs_bytes(fmt.transform, n, tuned=tuned),),
        }
    shapes: dict[str, tuple[int, ...]] = {"packed": affine.packed_shape(fmt, n, k)}
    second = affine.scale_shape(fmt, n, k)
    return shapes if second is None else shapes | {"scale": second}


def check(w: PackedWeight, name: str = "weight") -> None:
    """Raise ShapeError that begins with the name unless the tensors of `w` fit each other and its shape."""
    try:
        _check(w)
    except ShapeError as e:
        raise ShapeError(f"{name}: {e}") from None


def _check(w: PackedWeight) -> None:
    n, k = w.shape
    if w.packed.dtype != torch.uint8:
        raise ShapeError(f"packed codes are {w.packed.dtype}, the format stores uint8")
    if len({part is None for part in (w.lattice, w.signs_in, w.signs_out)}) > 1:
        raise ShapeError(
            "a part of its lattice format is missing; lattice, signs_in, signs_out come together"
        )
    tuned = w.signs_in is not None and w.signs_in.numel() == 2 * k
    expected = stored_shapes(w.format, n, k, tuned=tuned)
    for suffix in ("packed", "scale", "lattice", "signs_in", "signs_out"):
        part, shape = getattr(w, suffix), expected.get(suffix)
        stored = None if part is None else (part.dtype, tuple(part.shape))
        if stored != (None if shape is None else (torch.uint8, shape)):
            has = "absent" if part is None else f"{part.dtype} {list(part.shape)}"
            needs = "none" if shape is None else f"torch.uint8 {list(shape)}"
            raise ShapeError(f"{suffix} is {has}, a [{n}, {k}] matrix in {w.format} needs {needs}")
    if (w.lra is None) != (w.lrb is None):
        raise ShapeError("one compensator factor is missing; both or none belong to a matrix")
    if w.lra is None or w.lrb is None:
        return
    kind = compensator_of(w.lra)
    for part, factor, length in (("lra", w.lra, n), ("lrb", w.lrb, k)):
        if factor.dtype != w.lra.dtype or tuple(factor.shape) != factor_shape(kind, w.rank, length):
            raise ShapeError(
                f"compensator factor {part} is {factor.dtype} {list(factor.shape)}, rank {w.rank} of length "
                f"{length} needs {w.lra.dtype} {list(factor_shape(kind, w.rank, length))}"
            )


def factor_shape(compensator: str, rank: int, length: int) -> tuple[int, ...]:
    """Stored shape of a compensator factor of `rank` vectors of `length` values."""
    if compensator == "fp16":
        return rank, length
    return rank, -(-length // LR_GROUP), LR_GROUP // 8 * COMPENSATORS[compensator] + 2


def compensator_of(factor: Tensor) -> str:
    """Name of the compensator format of a stored factor: int3, int8 or fp16."""
    if factor.dtype == torch.float16 and factor.dim() == 2:
        return "fp16"
    for name, bits in COMPENSATORS.items():
        if factor.dim() == 3 and factor.dtype == torch.uint8 and factor.shape[2] == LR_GROUP // 8 * bits + 2:
            return name
    raise ShapeError(
        f"a compensator factor of shape {list(factor.shape)} {factor.dtype} belongs to no known format"
    )


def factor_groups(factor: Tensor) -> Tensor:
    """Cut a factor into its scale groups, the last one padded with zeros: [R, L] -> [R, ceil(L/64), 64]."""
    padded = torch.nn.functional.pad(factor, (0, -factor.shape[1] % LR_GROUP))
    return padded.view(factor.shape[0], padded.shape[1] // LR_GROUP, LR_GROUP)


def encode_factor(factor: Tensor, scale: Tensor, compensator: str) -> Tensor:
    """Round a compensator factor to the nearest multiples of given scales and store it (MiLo eq. 13).

    Codes are round(w / scale) + c in 0 .. 2c-1 with c = 2**(bits-1); a scale may be negative.

    factor: [R, L] fp32    scale: [R, ceil(L/64)] fp32, ignored for fp16    returns: the stored form
    """
    if compensator == "fp16":
        return factor.half().contiguous()
    bits = COMPENSATORS[compensator]
    centre = 2 ** (bits - 1)
    half = scale[..., None].half()
    step = half.float()
    inverse = torch.where(step != 0, 1 / step, torch.zeros_like(step))
    codes = (
        (factor_groups(factor) * inverse).round_().clamp_(-centre, centre - 1).add_(centre).to(torch.uint8)
    )
    return torch.cat((pack_stream(codes, bits), half.view(torch.uint8)), -1)


def decode_factor(factor: Tensor, length: int) -> Tensor:
    """Stored compensator factor back to [R, length] fp32."""
    kind = compensator_of(factor)
    if kind == "fp16":
        return factor.float()
    bits = COMPENSATORS[kind]
    codes = unpack_stream(factor[..., :-2].contiguous(), bits).float() - 2 ** (bits - 1)
    scale = factor[..., -2:].contiguous().view(torch.float16).float()
    values: Tensor = codes * scale
    return values.flatten(1)[:, :length]


def low_rank_bytes(compensator: str, rank: int, n: int, k: int) -> int:
    """Bytes of both stored factors of a rank-`rank` compensator of an [n, k] matrix."""
    shapes = (factor_shape(compensator, rank, length) for length in (n, k))
    values = sum(torch.Size(s).numel() for s in shapes)
    return values * (2 if compensator == "fp16" else 1)


def spins(w: PackedWeight) -> tuple[Spin, Spin]:
    """The transforms T_in and T_out of a weight in a lattice format."""
    assert w.lattice is not None
    assert w.signs_in is not None
    assert w.signs_out is not None
    transform = lattice.read_record(w.lattice).format.transform
    n, k = w.shape
    return read_signs(w.signs_in, transform, k), read_signs(w.signs_out, transform, n)


def rotated(w: PackedWeight) -> Tensor:
    """What the codes of a weight in a lattice format stand for, in rotated coordinates: [N, K] fp32."""
    assert w.lattice is not None
    return lattice.decode(w.packed, lattice.read_record(w.lattice), w.shape)


def unrotated(c: Tensor, spin_in: Spin, spin_out: Spin) -> Tensor:
    """W = T_out^T C T_in, a matrix in plain coordinates; differentiable in C and in the spins' vectors s.

    c: [N, K] fp32    returns: [N, K] fp32
    """
    return spin_out.adjoint(spin_in.adjoint(c).T.contiguous()).T.contiguous()


def with_real_signs(w: PackedWeight) -> PackedWeight:
    """A weight in a lattice format with its random vectors stored as fp16, as tuned ones are."""
    spin_in, spin_out = spins(w)
    return replace(w, signs_in=store_signs(spin_in.s), signs_out=store_signs(spin_out.s))


def dequantize(w: PackedWeight) -> Tensor:
    """The matrix that a packed weight stands for: dequant(codes) + U V, or T_out^T decode(codes) T_in + U V; times 2^e.

    returns: [N, K] fp32
    """
    if w.lattice is not None:
        base = unrotated(rotated(w), *spins(w))
    else:
        fmt = w.format
        assert isinstance(fmt, Format)
        base = affine.decode(w.packed, w.scale, fmt, w.shape)
    if w.lra is not None and w.lrb is not None:
        n, k = w.shape
        base = torch.addmm(base, decode_factor(w.lra, n).T, decode_factor(w.lrb, k))
    return base * 2.0**w.exponent if w.exponent else base


def check_unscaled(w: PackedWeight) -> PackedWeight:
    """The same weight. Raises ShapeError for one with an exponent, which kernels do not know."""
    if w.exponent:
        raise ShapeError(
            f"a weight times 2^{w.exponent}: kernels run none; decode it (formats.weight.dequantize)"
        )
    return w
