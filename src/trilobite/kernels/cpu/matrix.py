"""A packed matrix as the native library takes it: addresses, sizes, encoding, its parts checked against each other."""

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats.affine import format_of, packed_shape, scale_shape
from trilobite.formats.bitpack import ROWS
from trilobite.formats.incoherence import factors, hadamard_matrix
from trilobite.formats.weight import LR_GROUP, PackedWeight, factor_shape
from trilobite.kernels.cpu import native
from trilobite.kernels.expert_table import metadata_kind
from trilobite.recipe import COMPENSATORS

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def dtype_code(t: Tensor, name: str) -> int:
    """The library's number of an element type. Raises ShapeError for one that it does not take."""
    code = DTYPES.get(t.dtype)
    if code is None:
        raise ShapeError(f"{name} is {t.dtype}; the operators take float32, float16 and bfloat16")
    return code


def dense(t: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """`t`, contiguous. Raises ShapeError where it is not on the CPU, or of another dtype than asked for."""
    if not t.is_cpu:
        raise ShapeError(f"{name} is on {t.device}, the other tensors are on the CPU; move all to one device")
    if dtype is not None and t.dtype != dtype:
        raise ShapeError(f"{name} is {t.dtype}, expected {dtype}")
    return t if t.is_contiguous() else t.contiguous()


@lru_cache(maxsize=1024)
def _format(
    packed: tuple[int, ...], rows: int, k: int, scale: tuple[int, ...] | None
) -> tuple[int, int, int, int]:
    """Shapes of the stored tensors -> (bits, group, symmetric, metadata). Raises ShapeError."""
    if rows < 1:
        raise ShapeError(
            f"linear: packed tensor of shape {list(packed)} does not belong to a [{rows}, {k}] matrix"
        )
    try:
        fmt = format_of(packed, scale, k)
    except ShapeError as e:
        raise ShapeError(f"linear: {e}") from None
    expected = packed_shape(fmt, rows, k)
    if packed != expected:
        raise ShapeError(
            f"linear: packed codes are {list(packed)}, a [{rows}, {k}] matrix needs {list(expected)}"
        )
    if scale is not None and scale != scale_shape(fmt, rows, k):
        raise ShapeError(f"linear: second-level scales are {list(scale)}, not {scale_shape(fmt, rows, k)}")
    return fmt.bits, fmt.group, int(fmt.symmetric), metadata_kind(fmt)


@lru_cache(maxsize=1024)
def _rank_bits(lra: tuple[int, ...], lrb: tuple[int, ...], half: bool, n: int, k: int) -> int:
    """Shapes of the compensator factors -> bits. Raises ShapeError."""
    kinds = ("fp16",) if half else ("int3", "int8")
    for kind in kinds:
        if lra == factor_shape(kind, lra[0], n) and lrb == factor_shape(kind, lra[0], k):
            return COMPENSATORS[kind]
    raise ShapeError(
        f"linear: compensator factors {list(lra)} and {list(lrb)} do not fit a [{n}, {k}] matrix "
        f"(groups of {LR_GROUP} values of int3 or int8, or fp16)"
    )


def _factors(
    lra: Tensor | None, lrb: Tensor | None, n: int, k: int
) -> tuple[Tensor | None, Tensor | None, int]:
    if lra is None or lrb is None:
        if lra is not lrb:
            raise ShapeError("linear: one compensator factor is missing; both or none belong to a matrix")
        return None, None, 0
    half = lra.dtype == torch.float16
    dtype = torch.float16 if half else torch.uint8
    lra, lrb = dense(lra, "lra", dtype), dense(lrb, "lrb", dtype)
    return lra, lrb, _rank_bits(tuple(lra.shape), tuple(lrb.shape), half, n, k)


def matrix(
    packed: Tensor, scale: Tensor | None, lra: Tensor | None, lrb: Tensor | None, shape: tuple[int, int]
) -> tuple[native.MatrixArgs, tuple[Tensor | None, ...]]:
    """A stored matrix [N, K] as the library takes it, and the tensors that its addresses belong to.

    Raises ShapeError when the parts do not fit each other or the shape.
    """
    rows, k = shape
    packed = dense(packed, "linear: packed", torch.uint8)
    scale_size = None
    if scale is not None:
        scale = dense(scale, "linear: scale", torch.uint8)
        scale_size = tuple(scale.shape)
    bits, group, symmetric, metadata = _format(tuple(packed.shape), rows, k, scale_size)
    lra, lrb, rank_bits = _factors(lra, lrb, rows, k)
    rank = 0 if lra is None else lra.shape[0]
    parts = (packed, scale, lra, lrb)
    addresses = (None if t is None else t.data_ptr() for t in parts)
    return native.MatrixArgs(*addresses, rows, k, rank, rank_bits, bits, group, symmetric, metadata), parts


class _Rotation:
    """The Hadamard matrix of order n, as the library takes it; keeps the memory of its cores alive."""

    def __init__(self, n: int) -> None:
        """Raises ShapeError where no Hadamard matrix is known."""
        orders = factors(n)
        if orders is None:
            raise ShapeError(f"no Hadamard matrix of order {n} is known here; use the fourier transform")
        cores = [m for m in orders if m & (m - 1)]
        self._cores = [hadamard_matrix(m).float().contiguous() for m in cores]
        order = (ctypes.c_int64 * native.CORES)(*cores)
        core = (ctypes.c_void_p * native.CORES)(*(h.data_ptr() for h in self._cores))
        self._structure = native.Rotation(n, len(cores), order, core)
        self.address = ctypes.addressof(self._structure)


_rotation = cache(_Rotation)  # their addresses are given away


def rotation(n: int) -> int:
    """Address of the Hadamard matrix of order n for the library. Raises ShapeError where none is known."""
    return _rotation(n).address


def lattice_matrix(w: PackedWeight) -> tuple[native.MatrixArgs, tuple[Tensor | None, ...]]:
    """A stored lattice matrix as the library takes it, and the tensors that its addresses belong to.

    w: fits its shape, and `cpu.runs` accepts its format.
    """
    (n, k), parts = w.shape, list[Tensor]()
    for name, t in (
        ("packed", w.packed),
        ("lattice", w.lattice),
        ("signs_in", w.signs_in),
        ("signs_out", w.signs_out),
    ):
        assert t is not None
        parts.append(dense(t, f"linear: {name}", torch.uint8))
    packed, record, signs_in, signs_out = parts
    lra, lrb, rank_bits = _factors(w.lra, w.lrb, n, k)
    stored = native.MatrixArgs(
        packed=packed.data_ptr(),
        lra=None if lra is None else lra.data_ptr(),
        lrb=None if lrb is None else lrb.data_ptr(),
        n=n,
        k=k,
        rank=w.rank,
        rank_bits=rank_bits,
        bits=packed.shape[2] // ROWS,
        lattice=record.data_ptr(),
        signs_in=signs_in.data_ptr(),
        signs_out=signs_out.data_ptr(),
        tuned=int(signs_in.numel() == 2 * k),
        rotate_in=rotation(k),
        rotate_out=rotation(n),
    )
    return stored, (*parts, lra, lrb)
