"""Products of 16-bit floats in fp32, on processors that torch has no fast 16-bit products for.

Without bf16 instructions torch multiplies bf16 with plain loops, on AVX2 seven times slower than fp32. Here a few rows
of a weight at a time are widened, multiplied, and the result rounded once: what a 16-bit product with sums in fp32
gives, up to the order of the sum.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CHUNK = 2**22
"""Weights that are wide at a time."""
FEW = 12
"""Rows of inputs for which widening a weight costs more than a slow product."""


def wide_products(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """In this context products of tensors of a dtype are taken in fp32, where torch would be slow. One thread's."""
    if device.type == "cpu" and not _fast(dtype):
        return WideProducts(dtype)
    return nullcontext()


def _fast(dtype: torch.dtype) -> bool:
    """Whether torch hands products of this dtype to a library that has instructions for them."""
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in asked:
        return True
    # Without oneDNN, as on a Mac, torch has none of these questions either.
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and bool(getattr(torch.ops.mkldnn, asked[dtype])())


class WideProducts(TorchDispatchMode):
    """Takes products of CPU tensors of one dtype of 16 bits in fp32, and rounds them to it."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: whose products are taken."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch.mm, addmm, bmm or grouped_mm are called with is multiplied here, everything else by torch."""
        product = PRODUCTS.get(func)
        if product is not None and all(self._ours(a) for a in args[:2]):
            return product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _ours(self, t: Tensor) -> bool:
        return t.dtype == self.dtype and t.device.type == "cpu"


def _into(out: Tensor, x: Tensor, w: Tensor, finish: Callable[[Tensor, slice], Tensor] | None = None) -> None:
    """out = x w, rounded once. out: [M, N]    x: [M, K]    w: [K, N]    finish: what becomes of some columns"""
    if len(x) <= FEW and finish is None:
        torch.mm(x, w, out=out)
        return
    wide = x.float()
    step = max(1, CHUNK // max(1, len(w)))
    for first in range(0, w.shape[1], step):
        columns = slice(first, first + step)
        part = wide @ w[:, columns].float()
        out[:, columns] = part if finish is None else finish(part, columns)


def _mm(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_empty(len(x), w.shape[1])
    _into(out, x, w)
    return out


def _addmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    added = bias.expand(len(x), w.shape[1])
    out = x.new_empty(added.shape)
    _into(out, x, w, lambda part, columns: alpha * part + beta * added[:, columns].float())
    return out


def _bmm(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_empty(len(x), x.shape[1], w.shape[2])
    for of_one in zip(out, x, w, strict=True):
        _into(*of_one)
    return out


def _grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As torch has it for x [T, K] and w [G, K, N], where rows up to offs [G] int32 belong to each group."""
    if x.dim() != 2 or w.dim() != 3 or offs is None or bias is not None:
        return torch.ops.aten._grouped_mm(x, w, offs, bias, out_dtype)  # type: ignore[no-any-return]
    out = x.new_zeros(len(x), w.shape[2])
    first = 0
    for of_group, last in zip(w, offs.tolist(), strict=True):
        if last > first:
            _into(out[first:last], x[first:last], of_group)
        first = last
    return out if out_dtype is None else out.to(out_dtype)


_ATEN = torch.ops.aten
PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN._grouped_mm.default: _grouped_mm,
}
