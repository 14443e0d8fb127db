"""Keys and values in tensors of a fixed size: then transformers compiles the decoding step, on a GPU to a CUDA graph.

Step by step a GPU waits for Python between its launches; a graph of a whole step does not. The price is the compiler's
time before the first token, and again where a conversation outgrows the cache.
"""

import torch
from transformers import PreTrainedModel, StaticCache

from trilobite.errors import ArchitectureError

SHORTEST = 2048
"""Tokens of the smallest cache: each size is compiled anew."""
WARM_UP = 4
"""Tokens after which a step is compiled, recorded as a graph and has run as one."""


class FixedCache:
    """The cache of a model for one conversation at a time, which grows by powers of two."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raise ArchitectureError for a model whose step transformers cannot compile."""
        if model.config.is_encoder_decoder or not model._can_compile_fullgraph:
            raise ArchitectureError(
                f"{type(model).__name__}: its decoding step cannot be compiled; run it without --compile"
            )
        self.model = model
        self.cache: StaticCache | None = None
        self.length = 0

    def emptied(self, length: int, limit: int | None) -> StaticCache:
        """The cache, empty, with room for `length` tokens; a new one runs some steps first, which compiles them.

        limit: tokens the model was made for, None = unknown
        """
        if self.cache is None or length > self.length:
            size = max(SHORTEST, 1 << (length - 1).bit_length())
            self.length = max(length, min(size, limit or size))
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.length)
            self._warm_up(self.cache)
        self.cache.reset()
        return self.cache

    def _warm_up(self, cache: StaticCache) -> None:
        ids = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            min_new_tokens=WARM_UP,
            max_new_tokens=WARM_UP,
            pad_token_id=0,
        )
