"""Products of some tokens with a dense matrix of few rows, such as a router's, or with one for each head.

torch's add up in an order that depends on the threads and on the tokens, and wake threads of its own, in whose way the
engine's are as they wait for its next call. Here neither threads nor other tokens of the call change a bit.
"""

import ctypes

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels.cpu import native
from trilobite.kernels.cpu.engine import team
from trilobite.kernels.cpu.matrix import DTYPES, dtype_code

MOST_TOKENS = 64
"""As many as steps have that come from a list; more are faster by torch where it packs them into tiles."""
MOST_VALUES = 1 << 24
"""Of x, where it does not: they are kept in fp32 until the call returns."""
TILES = torch.backends.cpu.get_cpu_capability() != "AVX2"
"""Whether torch has them for 16-bit numbers. On AVX2 it multiplies these one dot product after the other."""

_lib, _ = native.load()


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Whether the native library does that: tokens [..., K] on the CPU, few or such that torch has no tiles for, and a
    contiguous W [N, K] of the same dtype."""
    return (
        _lib is not None
        and x.is_cpu
        and w.is_cpu
        and x.dtype == w.dtype
        and x.dtype in DTYPES
        and w.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == w.shape[1]
        and 0 < x.numel() <= (MOST_TOKENS * w.shape[1] if TILES or x.dtype == torch.float32 else MOST_VALUES)
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
    _multiply(x, w, bias, y, 1)
    return y


def dense_heads(x: Tensor, w: Tensor) -> Tensor:
    """y[h] = x[h] W[h]^T, one matrix for each head; sums are fp32.

    x: [heads, T, K]    w: [heads, N, K], contiguous    returns: [heads, T, N]; all of one dtype. Raises ShapeError.
    """
    fits = (
        x.dim() == w.dim() == 3 and len(x) == len(w) and x.shape[2] == w.shape[2] and x.numel() and w.numel()
    )
    if _lib is None or not fits or x.dtype != w.dtype or x.dtype not in DTYPES or not w.is_contiguous():
        raise ShapeError(f"dense: x is {list(x.shape)} {x.dtype}, the matrices {list(w.shape)} {w.dtype}")
    x = x.contiguous()
    y = torch.empty(*x.shape[:2], w.shape[1], dtype=x.dtype)
    _multiply(x, w, None, y, len(x))
    return y


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, heads: int) -> None:
    assert _lib is not None
    pointers = [None if t is None else t.data_ptr() for t in (x, w, bias, y)]
    tokens = x.numel() // (heads * x.shape[-1])
    sizes = dtype_code(x, "dense"), heads, tokens, *w.shape[-2:], team(None)
    _lib.trilobite_dense(ctypes.byref(native.DenseArgs(*pointers, *sizes)))
