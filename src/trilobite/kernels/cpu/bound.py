"""Calls of the CPU engine that know their weights: everything about these is checked and laid out once.

While a model decodes, megabytes of weights pass the caches between two calls, and Python code that checks shapes and
dispatches operators runs cold: 100 microseconds and more a call, of which a warm loop shows 10. A bound call does what
depends on the activations and no more. It keeps the memory whose addresses it knows, also when a tensor gets other
memory (`.data = ...`); copies of a module, and pickles, get None in its place and bind again.
"""

import ctypes
from operator import attrgetter, is_
from typing import Generic, TypeVar

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels.cpu import engine, native
from trilobite.kernels.cpu.matrix import lattice_matrix, matrix
from trilobite.kernels.cpu.operands import dense_operand
from trilobite.kernels.cpu.step import Kind, pointing
from trilobite.kernels.expert_table import has_lattice
from trilobite.kernels.layer import CpuSettings, ExpertsLayer


class _Bound:
    """Addresses belong to one process and to these tensors."""

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


Made = TypeVar("Made")
_VERSION = attrgetter("_version")


class Binding(_Bound, Generic[Made]):
    """What a residence keeps: what was made of some tensors, a call or None where no backend has one, and these tensors.

    Changes in place that torch does not count, through `.data` and of inference tensors, are seen in what the engine
    reads where it lies; not in what it has a copy of: biases that alternate, are strided, or differ in dtype.
    """

    def __init__(self, made: Made, *tensors: Tensor | None) -> None:
        """tensors: all that its memory or a copy of it comes from."""
        self.made = made
        self._tensors = tensors
        self._there = [t for t in tensors if t is not None]
        self._counted = [t for t in self._there if not t.is_inference()]
        self._addresses, self._versions = self._addresses_now(), self._versions_now()

    def holds(self, *tensors: Tensor | None) -> bool:
        """Whether it was made for these very tensors, and they have the same memory and values as then."""
        return (
            len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and self._addresses_now() == self._addresses
            and self._versions_now() == self._versions
        )

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._there))

    def _versions_now(self) -> list[int]:
        """Counts of changes, which inference tensors have none of."""
        return list(map(_VERSION, self._counted))


def _memory(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Aliases that keep the memory of tensors when those get other memory."""
    return tuple(t.detach() for t in tensors if t is not None)


class BoundLinear(_Bound):
    """`engine.linear` with one weight and bias. Raises ShapeError when these do not fit."""

    def __init__(self, w: PackedWeight, bias: Tensor | None, settings: CpuSettings) -> None:
        """w: [N, K]    bias: [N] or None."""
        self._digits, self._threads = engine.DIGITS[settings.activations], settings.threads
        self._rows, self._k = w.shape
        if w.lattice is None:
            self._matrix, parts = matrix(w.packed, w.scale, w.lra, w.lrb, w.shape)
        else:
            self._matrix, parts = lattice_matrix(w)
        bias, self._bias_dtype = engine.linear_bias(bias, self._rows)
        self._address = ctypes.addressof(self._matrix)
        self._bias_address = None if bias is None else bias.data_ptr()
        self._bias_bytes = 0 if bias is None else bias.nbytes
        self._memory = _memory(*parts, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K] -> [..., N] in x.dtype. Raises ShapeError."""
        if x.shape[-1] != self._k:
            raise ShapeError(f"linear: x has K={x.shape[-1]}, the weight has K={self._k}")
        bias = self._bias_address, self._bias_dtype
        return engine.run_linear(x, self._address, self._rows, *bias, self._digits, self._threads)

    def node(self, x: Tensor, y: Tensor) -> native.StepNode:
        """This call as a node of a step, on tensors that keep their places; the node needs this object's memory.

        x: [..., K] and y: [..., N], dense, of one dtype. Raises ShapeError.
        """
        if x.shape[-1] != self._k or y.shape != (*x.shape[:-1], self._rows):
            raise ShapeError(f"linear: x is {list(x.shape)}, y is {list(y.shape)}")
        bias = native.Operand(self._bias_address, self._bias_bytes, self._bias_dtype)
        return native.StepNode(
            Kind.LINEAR,
            (0, 0, x.numel() // self._k, 0),
            dense_operand(y),
            dense_operand(x),
            bias,
            digits=self._digits,
            threads=self._threads or 0,
            call=self._address,
        )


class BoundExperts(_Bound):
    """`engine.experts` with one layer. Raises ShapeError or ArchitectureError when its parts do not fit."""

    def __init__(self, layer: ExpertsLayer, settings: CpuSettings) -> None:
        """layer: as stored."""
        self._threads = settings.threads
        self._args, parts = engine.experts_args(layer, settings)
        self._memory = _memory(*parts)
        self.sums_up = not has_lattice(layer.table)

    def __call__(
        self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, sums: Tensor | None = None
    ) -> Tensor:
        """x: [T, H] -> [T, H] in x.dtype. sums: as in `engine.run_experts`, where `sums_up`. Raises ShapeError."""
        return engine.run_experts(x, top_k_index, top_k_weights, self._args, self._threads, sums)

    def node(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, y: Tensor) -> native.StepNode:
        """This call as a node of a step, on dense tensors that keep their places; the node needs this object's memory.

        Raises ShapeError.
        """
        args = engine.experts_call(self._args, x, top_k_index, top_k_weights, y)
        return pointing(Kind.EXPERTS, args, self._threads or 0)

    def parts(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> "Sums":
        """A call in several, where `sums_up`."""
        return Sums(self, x, top_k_weights)


class Sums:
    """One call of `experts` in several, where not all of its experts are there at a time.

    sums: [T, H] fp32    Calls in ascending order of experts give the bits of one call with all of them.
    """

    def __init__(self, call: BoundExperts, x: Tensor, top_k_weights: Tensor) -> None:
        """Arguments as of the call."""
        self.sums = torch.zeros(x.shape, dtype=torch.float32)
        self._call, self._x, self._weights = call, x, top_k_weights
        self._y = torch.zeros_like(x)

    def add(self, index: Tensor) -> None:
        """Compute the experts of `index` [T, A]: those of the call that are there now, E for all others."""
        self._y = self._call(self._x, index, self._weights, self.sums)

    def result(self, others: Tensor | None = None) -> Tensor:
        """[T, H] in x.dtype. others: [T, H] fp32, the sum over experts that were computed elsewhere."""
        return self._y if others is None else (self.sums + others).to(self._x.dtype)
