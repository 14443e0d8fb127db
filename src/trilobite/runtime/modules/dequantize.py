"""Turn packed modules back into those of PyTorch and transformers, with the weights that the packed ones stand for."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.runtime.modules.experts import BIASES, PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.residence import PackedModule


def dequantize_modules(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace every packed module of a model, one at a time; parameters that have the model's dtype get `dtype`.

    Raises CheckpointError for double-quantized weights on a GPU.
    """
    before = model.dtype
    for path in [name for name, module in model.named_modules() if isinstance(module, PackedModule)]:
        module = model.get_submodule(path)
        assert isinstance(module, PackedModule)
        model.set_submodule(path, _plain(module, dtype))
    if dtype != before:
        for parameter in model.parameters():
            if parameter.dtype == before:
                parameter.data = parameter.data.to(dtype)


def decode_scaled(model: PreTrainedModel) -> None:
    """Replace the modules of which a matrix has an exponent, which kernels do not know, once tensors have arrived.

    An exponent is rare: of a matrix all of whose weights are below 2**-10.
    """
    for path, module in list(model.named_modules()):
        if not isinstance(module, PackedModule):
            continue
        if any(m is not None and m.exponent for row in module.matrices() for m in row):
            model.set_submodule(path, _plain(module, model.dtype))


def _plain(module: PackedModule, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, PackedExperts):
        return dense_experts(module, dtype)
    assert isinstance(module, PackedLinear)
    return dense_linear(module, dtype)


@torch.no_grad()
def dense_linear(module: PackedLinear, dtype: torch.dtype) -> nn.Linear:
    """nn.Linear with the dequantized weight [N, K] and the very bias of a packed one."""
    ((weight,),) = module.residence.stored(module)
    assert weight is not None
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(dequantize(weight)[:, : module.in_features].to(dtype))
    linear.register_parameter("bias", module.bias)
    return linear.train(module.training)


@torch.no_grad()
def dense_experts(module: PackedExperts, dtype: torch.dtype) -> nn.Module:
    """The transformers module that was packed, its stacked parameters filled with the dequantized matrices."""
    if module.residence is None:
        weights: Any = [[None if m is None else m.packed() for m in row] for row in module.matrices()]
    else:
        weights = module.residence.stored(module)
    original = module.original
    stacks: dict[str, Tensor] = {}
    for expert, row in enumerate(weights):
        for name, weight in zip(module.leaves(expert), row, strict=True):
            if name is None:
                continue
            assert isinstance(weight, PackedWeight)
            w, stacked = module.plain(dequantize(weight), name), module.stacked_name(name)
            if stacked not in stacks:
                shape = original.get_parameter(stacked).shape
                stacks[stacked] = torch.empty(shape, dtype=dtype, device=w.device)
            module.cut(stacks[stacked], expert, name).copy_(w)
    for stacked, values in stacks.items():
        original.register_parameter(stacked, nn.Parameter(values))
    for name in BIASES:
        if original._parameters.get(name) is not None:
            original.register_parameter(name, module.get_parameter(name))
    return original.train(module.training)
