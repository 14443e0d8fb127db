"""What a step of decoding is, and what its cache held before it."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers import cache_utils as theirs

from trilobite.runtime.step.index import INDICES, index_of
from trilobite.runtime.step.states import states_of

ROWS = (theirs.DynamicLayer, theirs.DynamicSlidingWindowLayer)
BOTH = (
    theirs.LinearAttentionAndFullAttentionLayer,
    theirs.LinearAttentionAndSlidingWindowAttentionLayer,
)
STATES = (theirs.LinearAttentionLayer, *BOTH)
LAYERS = (*ROWS, *STATES, getattr(theirs, "DummyLayer", None))
"""Of caches: keys and values of each token, states of a fixed size, both, and nothing, which the oldest do not know."""


def _holds_rows(layer: Any) -> bool:
    return type(layer) in (*ROWS, *BOTH) or index_of(layer) is not None


def _is_known(layer: Any) -> bool:
    return type(layer) in LAYERS or index_of(layer) is not None


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
    """Whether every layer of a cache holds keys and values of some tokens, or states, and nothing else."""
    layers = cache.layers
    return (
        not cache.offloading
        and any(_holds_rows(x) for x in layers)
        and all(_is_known(x) and _begun(x) for x in layers)
    )


def _begun(layer: Any) -> bool:
    """Whether a layer of the cache has met the text, and keeps no more of it than a step needs."""
    kind = type(layer)
    states = kind not in STATES or (not layer.record_past and all(layer.has_previous_state.values()))
    return states and (kind is theirs.LinearAttentionLayer or bool(layer.is_initialized))


def strange_layers(config: PreTrainedConfig) -> list[str]:
    """Kinds of layers in a model's cache that steps do not know."""
    return sorted({type(x).__name__ for x in DynamicCache(config=config).layers if not _is_known(x)})


def follows(length: int, mask: Tensor | None, position: Tensor | None) -> bool:
    """Whether a token stands behind so many others, and sees them all."""
    if mask is not None and not (type(mask) is Tensor and mask.shape == (1, length + 1) and bool(mask.all())):
        return False
    return position is None or (position.shape == (1, 1) and int(position) == length)


class Kept:
    """What a cache holds, to go back to."""

    def __init__(self, cache: DynamicCache) -> None:
        """Tensors of rows, which are never changed in place, and copies of states, which are."""
        indices = (field for _, field in INDICES.values())
        rows = ("keys", "values", "cumulative_length", *indices, "is_indexer_initialized")
        self.layers = [
            (x, {name: getattr(x, name) for name in rows if hasattr(x, name)}) for x in cache.layers
        ]
        self.states = [{key: (t, t.clone()) for key, t in states_of(x).items()} for x in cache.layers]

    def restore(self) -> None:
        """Go back."""
        for (layer, held), states in zip(self.layers, self.states, strict=True):
            vars(layer).update(held)
            for (kind, i), (t, copy) in states.items():
                getattr(layer, kind)[i] = t.copy_(copy)

    def same_as(self, cache: DynamicCache) -> bool:
        """Whether a cache holds the same bits now."""
        layers = zip(self.layers, self.states, cache.layers, strict=True)
        for (_, held), states, layer in layers:
            now = states_of(layer)
            pairs = [(t, getattr(layer, name)) for name, t in held.items() if isinstance(t, Tensor)]
            pairs += [(copy, now[key]) for key, (_, copy) in states.items()]
            if not all(same_bits(a, b) for a, b in pairs):
                return False
        return True


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, signs of zeros and NaNs included."""
    ours, theirs = (t.contiguous().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(ours, theirs)
