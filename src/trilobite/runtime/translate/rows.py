"""The rows of a batch while it is decoded, and how finished sentences leave it (batch pruning, elephants §3.5)."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedModel

from trilobite.models.stacked_experts import PlainExperts
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.finite import not_finite
from trilobite.runtime.modules.experts import PackedExperts

Pruning = Literal["compact", "mask", "off"]
"""What becomes of a finished sentence: its rows leave the batch; they stay, without experts; they stay as they are."""
EXPERTS = (PackedExperts, PlainExperts)
"""Modules that know index E."""


class Rows:
    """What a model keeps for the b sentences in a batch, K rows for each: R = b K.

    encoder: hidden states [R, S, H]    mask: [R, S] int64    cache: keys and values of R rows
    sentence: [b] int64, places of the sentences in the batch as it came    closed: [b] bool, finished but still there
    """

    def __init__(
        self,
        model: PreTrainedModel,
        source: Tensor,
        inputs: Mapping[str, Any],
        *,
        beams: int,
        pruning: Pruning,
    ) -> None:
        """source: [B, S] int64    inputs: encoder_outputs, attention_mask and the cache, as `generate` made them."""
        self.model, self.source, self.beams, self.pruning = model, source, beams, pruning
        # Masks are hooks, with which no step runs from a list: there is nothing to find out anew.
        self.forward = functools.partial(type(model).forward, model) if pruning == "mask" else model
        self.encoder, self.mask = inputs["encoder_outputs"], inputs.get("attention_mask")
        self.cache: EncoderDecoderCache = inputs[CACHE]
        rows, device = self.encoder.last_hidden_state.shape[0], self.encoder.last_hidden_state.device
        self.sentence = torch.arange(rows // beams, device=device)
        self.closed = torch.zeros(rows // beams, dtype=torch.bool, device=device)
        self.row_steps = 0

    @property
    def done(self) -> bool:
        """Whether every sentence is finished."""
        return bool(self.closed.all())

    def step(self, tokens: Tensor) -> Tensor:
        """Read the next tokens [R, t] int64 -> logits [R, V] float32 of what follows. Raises EvaluationError."""
        self.row_steps += len(tokens)
        made = self.forward(
            decoder_input_ids=tokens,
            encoder_outputs=self.encoder,
            attention_mask=self.mask,
            use_cache=True,
            return_dict=True,
            **{CACHE: self.cache},
        )
        logits: Tensor = made.logits[:, -1].float()
        bad = ~logits.amax(-1).isfinite()
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            sentence = self.source[self.sentence[row // self.beams]]
            raise not_finite(
                self.model, {"input_ids": sentence[None], "decoder_input_ids": tokens[row : row + 1]}
            )
        return logits

    def retire(self, dead: Tensor) -> Tensor | None:
        """Sentences [b] bool have finished. returns: [b'] int64, those that stay; None = all do, the dead ones too."""
        self.closed = self.closed | dead
        if self.pruning != "compact" or not bool(dead.any()):
            return None
        stay = (~self.closed).nonzero()[:, 0]
        self.sentence, self.closed = self.sentence[stay], self.closed[stay]
        if len(stay):
            rows = self.rows_of(stay)
            self.encoder = self._encoded(rows)
            self.mask = None if self.mask is None else self.mask.index_select(0, rows)
            self.cache.cross_attention_cache.reorder_cache(rows)
        return stay

    def rows_of(self, sentences: Tensor, beams: Tensor | None = None) -> Tensor:
        """Rows [b K] of sentences [b] int64; beams: [b, K] int64, which ones, None = all in order."""
        if beams is None:
            beams = torch.arange(self.beams, device=sentences.device)
        return (sentences[:, None] * self.beams + beams).flatten()

    def follow(self, rows: Tensor) -> None:
        """The rows [R'] int64 of before whose text goes on: cross-attention is the same for all beams of a sentence."""
        self.cache.self_attention_cache.reorder_cache(rows)

    def _encoded(self, rows: Tensor | slice) -> Any:
        return type(self.encoder)(last_hidden_state=self.encoder.last_hidden_state[rows])


@contextmanager
def without_experts(rows: Rows) -> Iterator[None]:
    """Inside, rows of closed sentences get no routed expert: their index is E (elephants §3.5)."""

    def mask(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        assert isinstance(module, EXPERTS)
        closed = rows.closed.repeat_interleave(rows.beams)
        if len(hidden) != len(closed):
            return args
        return hidden, index.masked_fill(closed[:, None], module.num_experts), weights

    layers = [m for m in rows.model.get_decoder().modules() if isinstance(m, EXPERTS)]
    hooks = [layer.register_forward_pre_hook(mask) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rows_are_coupled(model: PreTrainedModel) -> bool:
    """Whether what becomes of a sentence depends on the others in its batch: then nobody may leave it.

    NLLB-MoE drops tokens beyond a share of the batch where its configuration says less than all of it; two processors of
    transformers look sentences up by their row.
    """
    config, generation = model.config, model.generation_config
    fraction = getattr(config, "moe_eval_capacity_token_fraction", 1.0)
    return bool(
        fraction < 1
        or generation.encoder_no_repeat_ngram_size
        or (generation.encoder_repetition_penalty or 1.0) != 1.0
    )
