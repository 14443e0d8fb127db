"""Tensors as nodes of a decoding step take them: where they lie, how much memory is theirs, and their strides."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels.cpu import native
from trilobite.kernels.cpu.matrix import DTYPES, dtype_code

TYPES = {**DTYPES, torch.bool: 3}
"""Of operands that go element by element: `trilobite_dtype`, TRILOBITE_BOOL."""


def operand(t: Tensor, strides: Sequence[int] = (), dtype: int = 0) -> native.Operand:
    """A tensor, and how much memory of it lies behind its first element."""
    room = t.untyped_storage().nbytes() - t.storage_offset() * t.element_size()
    return native.Operand(t.data_ptr(), room, dtype, tuple(strides))


def dense_operand(t: Tensor) -> native.Operand:
    """A dense tensor. Raises ShapeError for one that is not, or not on the CPU."""
    if not t.is_contiguous() or not t.is_cpu:
        raise ShapeError(
            f"step: a tensor of shape {list(t.shape)} and strides {t.stride()}; expected a dense one"
        )
    return operand(t, dtype=dtype_code(t, "step"))


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The same elements in fewer dimensions: those that lie like one in all operands become one."""
    sizes, rows = [1], [[1] for _ in strides]
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            continue
        if sizes[0] == 1:
            sizes[0] = shape[d]
            for row, stride in zip(rows, strides, strict=True):
                row[0] = stride[d]
        elif all(stride[d] == row[0] * sizes[0] for row, stride in zip(rows, strides, strict=True)):
            sizes[0] *= shape[d]
        else:
            sizes.insert(0, shape[d])
            for row, stride in zip(rows, strides, strict=True):
                row.insert(0, stride[d])
    return sizes, rows
