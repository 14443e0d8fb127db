"""PackedMatrix holds one packed weight as buffers; PackedLinear is the nn.Linear made of it."""

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trilobite.errors import CheckpointError, ShapeError
from trilobite.formats.weight import SUFFIXES, PackedWeight, check
from trilobite.kernels import ops

if TYPE_CHECKING:
    from trilobite.kernels.ops import Pack

_parts = itemgetter(*(f"weight_{s}" for s in SUFFIXES))


class PackedMatrix(nn.Module):
    """One packed weight [N, K]: buffers `weight_packed`, `weight_scale`, … (formats.weight.SUFFIXES) as stored.

    Buffers, not parameters: transformers takes a model's dtype from its first parameter, and ours are bytes.
    """

    def __init__(self, shape: tuple[int, int], parts: dict[str, Tensor]) -> None:
        """parts: the tensors by suffix (`packed`, ...), on the meta device before loading."""
        super().__init__()
        self.shape = shape
        for suffix in SUFFIXES:
            self.register_buffer(f"weight_{suffix}", parts.get(suffix))

    def packed(self) -> PackedWeight:
        """The packed weight, as views of the buffers."""
        parts = {s: getattr(self, f"weight_{s}") for s in SUFFIXES}
        return PackedWeight(shape=self.shape, **parts)

    def replace(self, w: PackedWeight) -> None:
        """Put other tensors in the place of the buffers."""
        for suffix in SUFFIXES:
            setattr(self, f"weight_{suffix}", getattr(w, suffix))

    def clear(self) -> None:
        """Let the buffers go: the weight lives elsewhere."""
        for suffix in SUFFIXES:
            setattr(self, f"weight_{suffix}", None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedMatrix":
        """Buffers move and keep their types: `model.to(bfloat16)` does not change how a compensator is stored."""
        before = {n: b for n, b in self._buffers.items() if b is not None and b.is_floating_point()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


def moved(pack: "Pack", fn: Callable[[Tensor], Tensor]) -> "Pack":
    """A pack whose tensors went through `fn`, as `nn.Module._apply` does with buffers."""
    return replace(pack, slab=fn(pack.slab), table=fn(pack.table))


class PackedLinear(PackedMatrix):
    """nn.Linear on a packed weight.

    On a GPU the weight is repacked once, when it arrives (`settle`), and the buffers are let go: the same bytes in the
    order of the GPU kernels. `state_dict`, and moving back to the CPU, restore the buffers bit for bit.

    forward: x [..., K] -> [..., N] in x.dtype
    """

    def __init__(self, shape: tuple[int, int], parts: dict[str, Tensor], bias: nn.Parameter | None) -> None:
        """bias: [N], taken over from the linear layer that this replaces."""
        super().__init__(shape, parts)
        self.out_features, self.in_features = shape
        self.bias = bias
        self.register_parameter("weight", None)  # some models ask for its dtype when it is a tensor
        self._bound: ops.Binding[ops.BoundLinear] | None = None
        self.pack: Pack | None = None
        self.double_quant = parts.get("scale") is not None

    def forward(self, x: Tensor) -> Tensor:
        """y = x W^T + bias."""
        if self.pack is not None:
            if x.shape[-1] != self.in_features:
                raise ShapeError(f"linear: x has K={x.shape[-1]}, the weight has K={self.in_features}")
            return ops.linear_gpu(x, self.pack, self.bias, self.out_features)
        if type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling():
            call = self._call()
            if call is not None:
                return call(x)
        return ops.linear(x, self.packed(), self.bias)

    def _call(self) -> "ops.BoundLinear | None":
        """The call bound to the tensors that are in place now."""
        tensors = (*_parts(self._buffers), self.bias)
        if self._bound is None or not self._bound.holds(*tensors):
            self._bound = ops.Binding(ops.bind_linear(self.packed(), self.bias), *tensors)
        return self._bound.call

    def settle(self) -> None:
        """Repack a weight that has arrived on a GPU whose kernels compute its format."""
        w = self.packed()
        if self.pack is None and ops.gpu_layout([w]):
            self.pack = ops.repack([[w]])
            self.clear()

    def stored(self) -> PackedWeight:
        """The weight as stored, wherever it is now. Raises CheckpointError where the GPU has only the repacked one."""
        if self.pack is None:
            return self.packed()
        check_restorable(self.double_quant)
        weight = ops.restore(self.pack, [self.shape])[0][0]
        assert weight is not None
        return weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        if self.pack is not None and leaves_gpu(fn, self.pack.table):
            self.replace(self.stored())
            self.pack = None
        super()._apply(fn, recurse)
        self._bound = None
        if self.pack is not None:
            self.pack = moved(self.pack, fn)
        elif self.weight_packed is not None:
            self.settle()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.pack is not None:
            for suffix, part in self.stored().tensors().items():
                destination[f"{prefix}weight_{suffix}"] = part.cpu()  # the GPU may not hold all layers twice

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        if self.pack is not None:
            return f"{self.in_features}, {self.out_features}, GPU layout {self.pack.codings[0][0]}"
        w = self.packed()
        return f"{self.in_features}, {self.out_features}, {w.format}, rank={w.rank}"


def leaves_gpu(fn: Callable[[Tensor], Tensor], table: Tensor) -> bool:
    """Whether `fn` moves tensors away from CUDA devices."""
    return table.device.type == "cuda" and fn(table[:0]).device.type != "cuda"


def check_restorable(double_quant: bool) -> None:
    """Raise CheckpointError for double-quantized weights: the GPU layout keeps their scales in fp16."""
    if double_quant:
        raise CheckpointError(
            "double-quantized weights on a GPU do not turn back into the stored ones; load the checkpoint again with "
            "device='cpu' to save or move it"
        )


def check_loaded(matrix: PackedMatrix, name: str) -> None:
    """Raise CheckpointError when a buffer was not loaded, ShapeError when the parts do not fit together."""
    for suffix in SUFFIXES:
        part = getattr(matrix, f"weight_{suffix}")
        if part is not None and part.device == torch.device("meta"):
            raise CheckpointError(f"{name}.weight_{suffix} is missing from the checkpoint; copy it again")
    check(matrix.packed(), name)
