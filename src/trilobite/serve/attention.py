"""Attention of a batch of texts, each with its own keys.

transformers' `sdpa` multiplies all queries of a batch with all of its keys, and masks what belongs to other texts: with
16 texts 15/16 of the work are thrown away, and the keys are repeated for every head. Here each text is a product of its
own, as in flash attention, which CPUs do not have; and the newest tokens of texts read keys and values where they lie.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.full_attention import (
    FullAttentionCacheAllocator,
)

from trilobite.kernels.ops import attend, attends, reads_prompts

ATTENTION = "trilobite_by_text"
"""Its name in transformers' registry."""


def attention_by_text(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention inside of each text, on keys and values that `kwargs["cache"]` keeps in pages.

    query: [1, heads, T, D]    key, value: [1, kv heads, T, D] of the new tokens of all texts    returns [1, T, heads, D]
    The keyword arguments are those of transformers' attention functions and of its continuous batching.
    """
    width = value.shape[-1]
    value = pad(value, (0, key.shape[-1] - width))  # pages have one width; MLA has two
    keys, values, rows = _kept(module, key, value, kwargs)
    window, sinks, softcap = (kwargs.get(name) for name in ("sliding_window", "s_aux", "softcap"))
    scale = kwargs.get("scaling")
    lengths = (pairwise(kwargs[name].tolist()) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    texts = list(zip(*lengths, strict=True))
    query = query[0].transpose(0, 1)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if attends(query) and keys.dtype == query.dtype:
        prompts = reads_prompts() or sinks is not None or softcap
        natively = [(a, b) for a, b in texts if prompts or a[1] - a[0] == 1]
        texts = [] if prompts else [(a, b) for a, b in texts if a[1] - a[0] > 1]
        if natively:
            at, starts, ends = _tokens(natively, window)
            output[at] = attend(
                query[at], keys, values, rows, starts, ends, scale=scale, softcap=softcap, sinks=sinks
            )
    for (q0, q1), (k0, k1) in texts:
        read = rows[k0:k1]
        q, k, v = (t.transpose(0, 1)[None] for t in (query[q0:q1], keys[read], values[read]))
        if sinks is None and not softcap:
            made = _product(q, k, v, scale, window)
        else:
            made = _softmax(q, k, v, scale, window, sinks, softcap)
        output[q0:q1] = made[0].transpose(0, 1)
    return output[None, ..., :width], None


def _tokens(
    texts: list[tuple[tuple[int, int], tuple[int, int]]], window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens those of some texts are, and where what each looks at begins and ends among the rows of all.

    texts: of each its new tokens, from .. to, and its rows
    """
    at = torch.cat([torch.arange(q0, q1) for (q0, q1), _ in texts])
    ends = torch.cat([torch.arange(k1 - (q1 - q0), k1) + 1 for (q0, q1), (_, k1) in texts])
    starts = torch.cat([torch.full((q1 - q0,), k0) for (q0, q1), (k0, _) in texts])
    return at, starts if window is None else starts.maximum(ends - window), ends


class Deferred:
    """The `update` of a server's cache: modules of transformers 5.24 call it, and then attention, which really does it.

    So pages hold what attention reads, not the latents it is made of, and nothing is gathered from them.
    """

    def __init__(self, cache: PagedAttentionCache) -> None:
        """Put it into a cache."""
        self.cache = cache
        cache.update = self

    def __call__(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are; attention is told of the cache."""
        kwargs["cache"] = self.cache
        return key_states, value_states


def _kept(module: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the new keys and values; returns all, [.., kv heads, D], and which rows of them the texts have, in order."""
    cache, layer = kwargs["cache"], module.layer_idx
    pages = pages_of(kwargs, layer)
    if pages is not None:
        kwargs["read_index"] = [found[:0] for found in kwargs["read_index"]]  # write, and gather nothing
        type(cache).update(cache, key, value, layer, kwargs)
        return pages[:3]
    key, value = type(cache).update(cache, key, value, layer, kwargs)
    if key.stride() != value.stride():  # with nothing in pages yet they are what the layer made
        key, value = key.contiguous(), value.contiguous()
    return key[0].transpose(0, 1), value[0].transpose(0, 1), torch.arange(key.shape[2], device=key.device)


def pages_of(kwargs: dict[str, Any], layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """All keys and values of a layer, [.., kv heads, D], which rows of them the texts of a batch have, in order.

    And where in these each text begins, and the last one ends. None where no text has any yet, and where a layer with a
    window is to keep several tokens of a text: these take the places of others, which the first of them looks at.
    """
    allocator = kwargs["cache"].layer_to_allocator[layer]
    rows, written = (kwargs[name][allocator.index] for name in ("read_index", "write_index"))
    starts = kwargs["cu_seq_lens_k"][allocator.layer_type]
    if not rows.numel():
        return None
    if not allocator.supports_block_table:
        if len(written) != len(starts) - 1:
            return None
        rows = rows.index_copy(0, starts[1:].long() - 1, written)  # which transformers leaves open
    keys, values = (
        pages.flatten(0, 1)
        for pages in FullAttentionCacheAllocator.get_cache_for_block_table(allocator, layer)
    )
    return keys, values, rows, starts


def _product(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    """q: [1, heads, T, D]    k, v: [1, kv heads, S, D], S >= T: the last T keys are those of the queries."""
    (_, heads, tokens, dim), (_, kv_heads, length, _) = q.shape, k.shape
    if tokens == 1:  # heads that share keys become the queries of one product
        grouped = q.view(1, kv_heads, heads // kv_heads, dim)
        return scaled_dot_product_attention(grouped, k, v, scale=scale).view(1, heads, 1, dim)
    whole = tokens == length and (window is None or length <= window)
    mask = None if whole else _mask(tokens, length, window, q.device)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=heads > kv_heads
    )


def _softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """As `_product`, for models that bound the scores, or let heads attend to nothing. sinks: [heads]."""
    (_, heads, tokens, dim), length = q.shape, k.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) * (dim**-0.5 if scale is None else scale)).float()
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_mask(tokens, length, window, q.device), -torch.inf)
    if sinks is not None:
        nothing = sinks.float().view(1, heads, 1, 1).expand(1, heads, tokens, 1)
        scores = torch.cat((scores, nothing), -1)
    return scores.softmax(-1)[..., :length].to(v.dtype) @ v


def _mask(tokens: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[T, S] bool, true where the last T of S tokens may look."""
    back = torch.arange(length - tokens, length, device=device)[:, None] - torch.arange(length, device=device)
    return back >= 0 if window is None else (back >= 0) & (back < window)


AttentionInterface.register(ATTENTION, attention_by_text)
