"""Dense matrices of blocks with routed experts, a row for each of these or one: routers, gates of shared experts.

Their products with a few tokens are the CPU engine's, wherever a model's code calls `linear`, so that steps that are
replayed have the bits of the model's own forward.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trilobite.kernels import ops
from trilobite.runtime.modules.residence import PackedModule
from trilobite.runtime.routing import moe_layers

CONVERSIONS = (Tensor.to, Tensor.type, Tensor.float)


class _Routing:
    """What a router's weight and its conversions have in common."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`linear` with it is `ops.dense_linear` where that multiplies; a conversion stays a router's."""
        with torch._C.DisableTorchFunctionSubclass():
            made = _natively(*args, **(kwargs or {})) if func is linear else None
            if made is None:
                made = func(*args, **(kwargs or {}))
            if func in CONVERSIONS and type(made) is Tensor and not torch.compiler.is_compiling():
                return made.as_subclass(ConvertedWeight)
            return made


class RouterWeight(_Routing, nn.Parameter):
    """A parameter [N, K] that multiplies few tokens by the engine; everything else is what it would be of any other."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of its own kind, in copies too."""
        return RouterWeight, (self.data, self.requires_grad)


class ConvertedWeight(_Routing, Tensor):
    """The same in another dtype, for as long as a model's code holds it: some multiply by their routers in fp32."""


def _natively(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """By the engine; None where torch has to do it."""
    if (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or ops.needs_gradient(input, weight, bias)
        or not ops.multiplies(input, weight)
    ):
        return None
    return ops.dense_linear(input, weight, bias)


def route_natively(model: nn.Module) -> None:
    """Let a model multiply by its routers so, those that lie on the CPU."""
    for layer in moe_layers(model):
        inside = set(layer.experts.modules())
        for module in layer.block.modules():
            if module in inside or isinstance(module, PackedModule):
                continue
            for name, p in module._parameters.items():
                if type(p) is nn.Parameter and p.dim() == 2 and len(p) in (1, layer.num_experts):
                    module._parameters[name] = RouterWeight(p.data, p.requires_grad)
