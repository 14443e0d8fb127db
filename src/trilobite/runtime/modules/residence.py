"""Where the packed weights of a module live, and so how they run.

A `PackedModule` asks its residence to run its inputs. `AsStored`: the weights lie in the module's buffers, views of the
mapped file; the CPU engine runs them there, by a call bound to these very tensors. `OnGpu`: they were repacked for the
GPU kernels and the buffers let go. Another residence (slots of fast memory, say) is another class, not another branch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from trilobite.errors import CheckpointError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops
from trilobite.kernels.layer import EXACT, CpuSettings, Pack
from trilobite.runtime.modules.matrix import PackedMatrix

Weights = Sequence[Sequence[PackedWeight | None]]
"""The one matrix of a linear layer, or (gate, up, down) of every expert."""
M = TypeVar("M", bound="PackedModule")


class Residence(ABC, Generic[M]):
    """Where the weights of a module `M` live."""

    in_buffers: ClassVar[bool]
    """Whether they are the module's buffers, which PyTorch saves, loads and moves."""
    buffers_stay: ClassVar[bool] = False
    """Whether the buffers stay on the host when the module moves to where its weights are used."""
    binding: ops.Binding[Any] | None = None
    """What was made of the weights, the biases and the module's settings, for as long as these stay."""

    @abstractmethod
    def run(self, module: M, *inputs: Tensor) -> Tensor:
        """What the module's `forward` returns."""

    @abstractmethod
    def stored(self, module: M) -> Weights:
        """The weights as stored, bit for bit. Raises CheckpointError where too little is kept for that."""

    @abstractmethod
    def moved(self, module: M, fn: Callable[[Tensor], Tensor]) -> "Residence[M] | None":
        """The residence behind `nn.Module._apply(fn)`, which then applies it to the buffers; None: to be made anew."""


class AsStored(Residence[M]):
    """In the module's buffers. A call of the CPU engine is bound to them; what it does not run, the operators do."""

    in_buffers = True

    def run(self, module: M, *inputs: Tensor) -> Tensor:
        """By the bound call, made again when the module has got other tensors; gradients are the operator's."""
        x = inputs[0]
        if type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling():
            tensors, binding = self.tensors(module), self.binding
            if ops.needs_gradient(*inputs, *tensors):
                return self.operate(module, *inputs)
            if binding is None or not binding.holds(*tensors):
                binding = self.binding = ops.Binding(self.bind(module), *tensors)
            call: Callable[..., Tensor] | None = binding.made
            if call is not None:
                return call(*inputs)
        return self.operate(module, *inputs)

    @abstractmethod
    def tensors(self, module: M) -> tuple[Tensor | None, ...]:
        """All that a bound call depends on."""

    @abstractmethod
    def bind(self, module: M) -> Callable[..., Tensor] | None:
        """A call on these tensors, or None where no backend has one."""

    @abstractmethod
    def operate(self, module: M, *inputs: Tensor) -> Tensor:
        """The operator, for compiled graphs, other devices, and what has no bound call."""

    def stored(self, module: M) -> Weights:
        """The buffers."""
        return [[None if m is None else m.packed() for m in row] for row in module.matrices()]


class OnGpu(Residence[M]):
    """Repacked once for the GPU kernels: the same bytes in their order, from which the stored ones come back."""

    in_buffers = False

    def __init__(self, pack: Pack, restorable: bool) -> None:
        """restorable: not so for double-quantized weights, whose scales the GPU layout keeps in fp16."""
        self.pack, self.restorable = pack, restorable

    def stored(self, module: M) -> Weights:
        """Out of the GPU layout."""
        if not self.restorable:
            raise CheckpointError(
                "double-quantized weights on a GPU do not turn back into the stored ones; load the checkpoint again "
                "with device='cpu' to save, move or dequantize it"
            )
        return ops.restore(self.pack)

    def moved(self, module: M, fn: Callable[[Tensor], Tensor]) -> Residence[M] | None:
        """Stays in the GPU layout; off the GPU, the weights go back to the buffers."""
        if leaves_gpu(fn, self.pack.table):
            module.put(self.stored(module))
            return None
        return type(self)(
            replace(self.pack, slab=fn(self.pack.slab), table=fn(self.pack.table)), self.restorable
        )


class PackedModule(nn.Module, ABC):
    """A module of packed matrices that live in a residence; None: they have arrived in the buffers, and wait.

    On a GPU `settle` repacks them; `state_dict`, and moving back to the CPU, restore them bit for bit.
    """

    residence: Residence[Any] | None
    settings: CpuSettings = EXACT

    def configure(self, settings: CpuSettings) -> None:
        """Compute so on CPUs from now on."""
        self.settings = settings
        if self.residence is not None:
            self.residence.binding = None

    @abstractmethod
    def matrices(self) -> Sequence[Sequence[PackedMatrix | None]]:
        """Those whose buffers hold the weights as stored."""

    @abstractmethod
    def as_stored(self) -> Residence[Any]:
        """The residence of weights that stay in the buffers."""

    @abstractmethod
    def on_gpu(self, pack: Pack, restorable: bool) -> Residence[Any]:
        """The residence of weights that were repacked."""

    def settle(self) -> Residence[Any]:
        """Repack weights that have arrived on a GPU whose kernels compute their formats; let others lie."""
        if self.residence is None or self.residence.in_buffers:
            if ops.gpu_layout(self._arrived()):
                weights = [[None if m is None else m.packed() for m in row] for row in self.matrices()]
                restorable = not any(w is not None and w.double_quant for row in weights for w in row)
                self.residence = self.on_gpu(ops.repack(weights), restorable)
                self.put(None)
            else:
                self.residence = self.as_stored()
        return self.residence

    def put(self, weights: Weights | None) -> None:
        """Let the buffers be those of these weights; None: let them go."""
        for e, row in enumerate(self.matrices()):
            for p, matrix in enumerate(row):
                if matrix is not None:
                    weight = None if weights is None else weights[e][p]
                    if weight is None:
                        matrix.clear()
                    else:
                        matrix.replace(weight)

    def _arrived(self) -> Iterator[PackedWeight]:
        return (m.packed() for row in self.matrices() for m in row if m is not None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if self.residence is not None:
            self.residence = self.residence.moved(self, fn)
        recurse = recurse and not (self.residence is not None and self.residence.buffers_stay)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.residence is None or self.residence.in_buffers:
            waiting = self.residence is None and next(self._arrived()).packed.device.type != "meta"
            if waiting or ops.gpu_layout(self._arrived()):
                self.settle()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The tensors under the names of the checkpoint, as stored; on the CPU when they come from elsewhere."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.residence is None or self.residence.in_buffers:
            return
        names = {module: name for name, module in self.named_modules()}
        for row, weights in zip(self.matrices(), self.residence.stored(self), strict=True):
            for matrix, weight in zip(row, weights, strict=True):
                if matrix is not None and weight is not None:
                    for suffix, part in weight.tensors().items():
                        path = f"{names[matrix]}.weight_{suffix}".removeprefix(".")
                        destination[prefix + path] = part.cpu()  # the GPU may not hold all layers twice


def leaves_gpu(fn: Callable[[Tensor], Tensor], table: Tensor) -> bool:
    """Whether `fn` moves tensors away from CUDA devices."""
    return table.device.type == "cuda" and fn(table[:0]).device.type != "cuda"


def modules_that_run(module: nn.Module, known: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Each of a model's modules, but of packed experts not the thousands that only hold their weights.

    known: those that have come already
    """
    known = set() if known is None else known
    if module in known:
        return
    known.add(module)
    yield module
    for child in module.children():
        if not (isinstance(module, PackedModule) and type(child) is nn.Module):
            yield from modules_that_run(child, known)
