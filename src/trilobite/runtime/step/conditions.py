"""What a step of decoding is, and what its cache held before it."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def is_step_in_pages(kwargs: dict[str, Any]) -> bool:
    """Whether this is one token of a server's batch."""
    ids: Any = kwargs.get("input_ids")
    return (
        type(ids) is Tensor
        and ids.shape == (1, 1)
        and kwargs.get("read_index") is not None
        and kwargs.get("attention_mask") is None
        and undisturbed()
    )


def undisturbed() -> bool:
    """Whether nobody records, compiles, converts or differentiates what torch does."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def grows(cache: DynamicCache) -> bool:
    """Whether every layer of a cache holds keys and values of some tokens, and of nothing else."""
    layers = cache.layers
    return (
        bool(layers) and not cache.offloading and all(type(x) in LAYERS and x.is_initialized for x in layers)
    )


def follows(length: int, mask: Tensor | None, position: Tensor | None) -> bool:
    """Whether a token stands behind so many others, and sees them all."""
    if mask is not None and not (type(mask) is Tensor and mask.shape == (1, length + 1) and bool(mask.all())):
        return False
    return position is None or (position.shape == (1, 1) and int(position) == length)


class Kept:
    """What a cache holds, to go back to."""

    def __init__(self, cache: DynamicCache) -> None:
        """Its tensors, which are never changed in place."""
        self.layers = [(x, x.keys, x.values, getattr(x, "cumulative_length", None)) for x in cache.layers]

    def restore(self) -> None:
        """Go back."""
        for layer, keys, values, length in self.layers:
            layer.keys, layer.values = keys, values
            if length is not None:
                layer.cumulative_length = length


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, signs of zeros and NaNs included."""
    ours, theirs = (t.contiguous().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(ours, theirs)
