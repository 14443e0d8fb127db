"""PackedWeight and Compensator: all that is needed to decode one matrix, and THE one `dequantize`.

On disk a packed weight `model.layers.0.self_attn.q_proj.weight` is up to four tensors, the original name plus a suffix:

    weight_packed   tiles (formats/affine.py)                  always
    weight_scale    second-level scales                        double quantization only
    weight_lra      compensator factor U, transposed           rank > 0
    weight_lrb      compensator factor V                       rank > 0

A compensator factor of R vectors of length L is stored vector by vector in groups of 64 values, the last one padded
with zero codes. For 3 and 8 bits a group is a bit stream of 64 codes followed by its fp16 scale: 26 or 66 bytes; so a
factor is [R, ceil(L/64), 26 or 66] uint8. In 16 bit it is [R, L] fp16. Grouping runs along the long dimension, so
every rank-one term has scales of its own and no rank wastes a bit. U is stored as its transpose [R, N].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats import affine
from trilobite.formats.bitpack import pack_stream, unpack_stream
from trilobite.recipe import COMPENSATORS, Format

LR_GROUP = 64
"""Values of a compensator factor that share one scale."""
SUFFIXES = ("packed", "scale", "lra", "lrb")


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A quantized matrix [N, K] as stored: codes, scales and an optional low-rank compensator.

    packed: [ceil(N/16), K/G, tile_bytes] uint8        scale: [ceil(N/16), S, 8 or 16] uint8, or None
    lra: U^T, a factor of R vectors of length N        lrb: V, a factor of R vectors of length K; both or none
    """

    shape: tuple[int, int]
    packed: Tensor
    scale: Tensor | None = None
    lra: Tensor | None = None
    lrb: Tensor | None = None

    @property
    def format(self) -> Format:
        """The format of the codes, as the shapes determine it."""
        return affine.format_of(self.packed, self.scale, self.shape[1])

    @property
    def rank(self) -> int:
        """Rank of the compensator; 0 without one."""
        return 0 if self.lra is None else self.lra.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by suffix, in file order."""
        parts = {s: getattr(self, s) for s in SUFFIXES}
        return {s: t for s, t in parts.items() if t is not None}

    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(t.nbytes for t in self.tensors().values())


def check(w: PackedWeight, name: str = "weight") -> None:
    """Raise ShapeError unless the tensors of `w` fit each other and its shape."""
    n, k = w.shape
    if w.packed.dtype != torch.uint8:
        raise ShapeError(f"{name}: packed codes are {w.packed.dtype}, the format stores uint8")
    fmt = w.format
    expected = affine.packed_shape(fmt, n, k)
    if tuple(w.packed.shape) != expected:
        raise ShapeError(
            f"{name}: packed codes are {list(w.packed.shape)}, a [{n}, {k}] matrix needs {list(expected)}"
        )
    if w.scale is not None and (w.scale.dtype, tuple(w.scale.shape)) != (
        torch.uint8,
        affine.scale_shape(fmt, n, k),
    ):
        raise ShapeError(
            f"{name}: second-level scales are {w.scale.dtype} {list(w.scale.shape)}, a [{n}, {k}] matrix needs "
            f"torch.uint8 {affine.scale_shape(fmt, n, k)}"
        )
    if (w.lra is None) != (w.lrb is None):
        raise ShapeError(f"{name}: one compensator factor is missing; both or none belong to a matrix")
    if w.lra is None or w.lrb is None:
        return
    kind = compensator_of(w.lra)
    for part, factor, length in (("lra", w.lra, n), ("lrb", w.lrb, k)):
        if factor.dtype != w.lra.dtype or tuple(factor.shape) != factor_shape(kind, w.rank, length):
            raise ShapeError(
                f"{name}: compensator factor {part} is {factor.dtype} {list(factor.shape)}, rank {w.rank} of length "
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


def dequantize(w: PackedWeight) -> Tensor:
    """The matrix that a packed weight stands for: dequant(codes) + U V.

    returns: [N, K] fp32
    """
    base = affine.decode(w.packed, w.scale, w.format, w.shape)
    if w.lra is None or w.lrb is None:
        return base
    n, k = w.shape
    return torch.addmm(base, decode_factor(w.lra, n).T, decode_factor(w.lrb, k))
