"""Turn packed modules back into those of PyTorch and transformers, with the weights that the packed ones stand for."""

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
        plain: nn.Module
        if isinstance(module, PackedExperts):
            plain = dense_experts(module, dtype)
        else:
            assert isinstance(module, PackedLinear)
            plain = dense_linear(module, dtype)
        model.set_submodule(path, plain)
    if dtype != before:
        for parameter in model.parameters():
            if parameter.dtype == before:
                parameter.data = parameter.data.to(dtype)


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
    residence = module.settle() if module.residence is None else module.residence
    weights = residence.stored(module)
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
