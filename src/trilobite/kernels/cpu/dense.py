"""Products of a few tokens with a dense matrix of few rows, such as a router's.

torch's take 0.3 ms for 128 rows of bfloat16 with two threads, ten times what reading them takes, and add up in an order
that depends on the threads. Here neither these nor other tokens of the call change a bit.
"""

import ctypes

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels.cpu import native
from trilobite.kernels.cpu.engine import team
from trilobite.kernels.cpu.matrix import DTYPES, dtype_code

MOST_TOKENS = 16
"""More are faster by torch, which packs them into tiles."""

_lib, _ = native.load()


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Whether the native library does that: few tokens [..., K] on the CPU, a contiguous W [N, K] of the same dtype."""
    return (
        _lib is not None
        and x.is_cpu
        and w.is_cpu
        and x.dtype == w.dtype
        and x.dtype in DTYPES
        and w.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == w.shape[1]
        and 0 < x.numel() <= MOST_TOKENS * w.shape[1]
        and w.is_contiguous()
    )


def dense_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias, where it `multiplies`; sums are fp32.

    x: [..., K]    w: [N, K]    bias: [N] or None    returns: [..., N]; all of one dtype. Raises ShapeError.
    """
    if not multiplies(x, w) or (bias is not None and (bias.shape != w.shape[:1] or bias.dtype != w.dtype)):
        raise ShapeError(f"dense: x is {list(x.shape)} {x.dtype}, the matrix {list(w.shape)} {w.dtype}")
    assert _lib is not None
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    y = torch.empty(*x.shape[:-1], w.shape[0], dtype=x.dtype)
    pointers = [None if t is None else t.data_ptr() for t in (x, w, bias, y)]
    sizes = dtype_code(x, "dense"), x.numel() // w.shape[1], *w.shape, team(None)
    _lib.trilobite_dense(ctypes.byref(native.DenseArgs(*pointers, *sizes)))
    return y
