"""Keys and values that outlive one text: a conversation's, and those in tensors of a fixed size.

cache = GrowingCache(model)
generate(model, tokenizer, "The sea", tokens=64, sampling=Sampling(), cache=cache)
generate(model, tokenizer, "The sea is", tokens=64, sampling=Sampling(), cache=cache)  # reads one token
"""

from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from trilobite.errors import ArchitectureError
from trilobite.runtime.cache_name import CACHE

SHORTEST = 2048
"""Tokens of the smallest cache of fixed size: each size is compiled anew."""
WARM_UP = 4
"""Tokens after which a step is compiled, recorded as a graph and has run as one."""


class TextCache(Protocol):
    """What `generate` asks of a cache."""

    def ready(self, ids: Tensor, length: int, limit: int | None) -> Cache:
        """The cache for a prompt [1, T] and for `length` tokens in all; it may hold the beginning of the prompt.

        limit: tokens the model was made for, None = unknown
        """

    def keep(self, cache: Cache, ids: Tensor) -> None:
        """The cache after a text [1, T] is made; without this call it is not known what it holds."""


class GrowingCache:
    """Keeps what a conversation has read and made: the next turn reads only what is new.

    Where layers have windows, or states of a fixed size, there is no going back: a turn that is not the kept text and
    more reads everything.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Begin empty."""
        self.config = model.config
        self.cache: Cache | None = None
        self.ids: Tensor = torch.empty(0, dtype=torch.long)

    def ready(self, ids: Tensor, length: int, limit: int | None) -> Cache:
        """The kept tokens with which the prompt begins, but for its last one."""
        cache, self.cache = self.cache, None
        known = min(self._common(ids[0]), ids.shape[1] - 1)
        if cache is None or known == 0:
            return DynamicCache(config=self.config)
        if (surplus := int(cache.get_seq_length()) - known) > 0:
            if not all(type(layer) is DynamicLayer for layer in cache.layers):
                return DynamicCache(config=self.config)
            cache.crop(-surplus)  # 0 would be all in some versions of transformers
        return cache

    def _common(self, ids: Tensor) -> int:
        """How many first tokens ids [T] shares with the text that is kept."""
        both = min(len(ids), len(self.ids))
        return int((ids[:both] == self.ids[:both].to(ids.device)).long().cumprod(0).sum())

    def keep(self, cache: Cache, ids: Tensor) -> None:
        """All but the last token of a text have been read."""
        if type(cache) is DynamicCache:
            self.cache, self.ids = cache, ids[0, : int(cache.get_seq_length())]


class FixedCache:
    """A cache in tensors of a fixed size: then transformers compiles the decoding step, on a GPU to a CUDA graph.

    Step by step a GPU waits for Python between its launches; a graph of a whole step does not. The price is the
    compiler's time before the first token, and again where a text outgrows the cache. Every text is read whole.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raise ArchitectureError for a model whose step transformers cannot compile."""
        if model.config.is_encoder_decoder or not model._can_compile_fullgraph:
            raise ArchitectureError(
                f"{type(model).__name__}: its decoding step cannot be compiled; run it without --compile"
            )
        self.model = model
        self.cache: StaticCache | None = None
        self.length = 0

    def ready(self, ids: Tensor, length: int, limit: int | None) -> Cache:
        """Empty, in a power of two of tokens; before a new one is used it runs some steps, which compiles them."""
        if self.cache is None or length > self.length:
            size = max(SHORTEST, 1 << (length - 1).bit_length())
            self.length = max(length, min(size, limit or size))
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.length)
            self._warm_up(self.cache)
        self.cache.reset()
        return self.cache

    def keep(self, cache: Cache, ids: Tensor) -> None:
        """Nothing: the next text begins anew."""

    def _warm_up(self, cache: StaticCache) -> None:
        ids = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=WARM_UP,
            max_new_tokens=WARM_UP,
            pad_token_id=0,
            **{CACHE: cache},
        )
