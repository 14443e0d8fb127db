"""Native loops of GPTQ over rows: a block of columns rounded, and a span of them found once more.

The twins of quantize/methods/{gptq,descent}.py. Codes differ where a weight lies within rounding of the middle between
two, and what follows in that row with them.
"""

import ctypes
from ctypes import Structure, c_int64, c_void_p

from torch import Tensor

from trilobite.kernels.cpu import native
from trilobite.recipe import Format

_lib, _ = native.load()


class _FeedbackArgs(Structure):
    """`trilobite_feedback_args`."""

    _fields_ = (
        *((name, c_void_p) for name in ("w", "upper", "cost", "units", "scale", "offset", "codes", "errors")),
        *(
            (name, c_int64)
            for name in ("rows", "columns", "upper_ld", "group", "bits", "symmetric", "steps", "threads")
        ),
    )


class _DescentArgs(Structure):
    """`trilobite_descent_args`."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scale", "offset", "units", "error", "slope", "hessian")),
        *((name, c_int64) for name in ("rows", "columns", "hessian_ld", "group", "bits", "threads")),
    )


def supports(w: Tensor) -> bool:
    """Whether the native library works on such rows."""
    return _lib is not None and w.device.type == "cpu"


def feed_back(
    w: Tensor,
    upper: Tensor,
    fmt: Format,
    group: int,
    *,
    lines: tuple[Tensor, Tensor],
    codes: Tensor,
    errors: Tensor,
    cost: Tensor | None = None,
    units: Tensor | None = None,
    steps: int = 0,
) -> None:
    """Round a block of columns, each error fed back to the block's columns behind it, on the calling thread.

    w: [C, N] fp32, columns of the matrix    upper: [C, C] fp32, of U, a view whose rows are contiguous
    group: columns of a line    lines: scale and offset [C / group, N] fp32; with units sub-scales and offset codes
    codes: [C, N] uint8, receives them    errors: [C, N] fp32, receives what each column loses over U_jj
    cost: [C] fp32 > 0, weights of a search whose lines are written; None: lines are known
    units: [N] fp32, super-scales that they are found under    steps: alternations of that search
    Raises ShapeError for shapes that do not fit, ResourceError without memory.
    """
    assert _lib is not None
    count, rows = w.shape
    _check((count, rows), w, codes, errors)
    _check((count // group, rows), *lines)
    if cost is not None:
        _check((count,), cost)
    if units is not None:
        _check((rows,), units)
    _check_square(upper, count)
    pointers = [None if t is None else t.data_ptr() for t in (w, upper, cost, units, *lines, codes, errors)]
    sizes = (rows, count, upper.stride(0), group, fmt.bits, int(fmt.symmetric), steps, 1)
    _lib.trilobite_feed_back(ctypes.byref(_FeedbackArgs(*pointers, *sizes)))


def descend(
    fmt: Format,
    *,
    codes: Tensor,
    lines: tuple[Tensor, Tensor],
    units: Tensor,
    error: Tensor,
    slope: Tensor,
    hessian: Tensor,
) -> None:
    """Find the unit, the lines and the codes of a span once more, in place, on the calling thread.

    codes: [C, N] fp32, whole numbers    lines: sub-scales and offset codes [C/G, N] fp32    units: [N] fp32
    error: [C, N] fp32, (W - W_q)^T, kept up to date    slope: [C, N] fp32, (error H)^T
    hessian: [C, C] fp32, a view whose rows are contiguous
    Raises ShapeError for shapes that do not fit, ResourceError without memory.
    """
    assert _lib is not None
    count, rows = codes.shape
    _check((count, rows), codes, error, slope)
    _check((count // fmt.group, rows), *lines)
    _check((rows,), units)
    _check_square(hessian, count)
    pointers = [t.data_ptr() for t in (codes, *lines, units, error, slope, hessian)]
    sizes = (rows, count, hessian.stride(0), fmt.group, fmt.bits, 1)
    _lib.trilobite_descend(ctypes.byref(_DescentArgs(*pointers, *sizes)))


def _check(shape: tuple[int, ...], *tensors: Tensor) -> None:
    for t in tensors:
        assert t.shape == shape
        assert t.is_contiguous()


def _check_square(t: Tensor, side: int) -> None:
    """Of a part of a matrix, whose rows are contiguous."""
    assert t.shape == (side, side)
    assert t.stride(1) == 1
