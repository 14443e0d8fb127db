"""Encoder-decoders, run block by block: the encoder on sentences, then the decoder on their given translations.

Sentences differ in length: batches are padded on the right, masks are part of what blocks are called with, batch by
batch, and what entered a module counts without its padding. What the decoder reads of the encoder is what the encoder's
last block left, so behind quantized blocks where these propagate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoEModelOutput

from trilobite.models.pairs import NONE, Forced, Pair, forced
from trilobite.quantize.calibrate.inputs import BlockInputs, PairInputs
from trilobite.quantize.calibrate.loop import Loop, RoutedTokens, Seen
from trilobite.quantize.calibrate.model import BlockModel


class EncoderDecoder(BlockModel):
    """Both stacks of a model. Arguments of blocks are remembered by a batch's first pair."""

    def load(self, block: str) -> None:
        """The same; both stacks embed with the one embedding that is on disk."""
        super().load(block)
        if not block:
            self.model.tie_weights()

    @torch.no_grad()
    def enter(self, stack: int, first: int, batch: Forced, encoded: Tensor | None) -> Tensor:
        """What enters a stack (0: the encoder), [B, T, H]; remembers what its blocks are called with for this batch.

        first: number of the batch's first pair    encoded: [B, S, H], what the encoder made of it, for the decoder
        """
        blocks = self.stacks[stack]

        def run() -> None:
            if encoded is None:
                self._encode(batch)
            else:
                self._to_head(self._behind(batch, encoded))

        self._arguments[first] = self._arguments.get(first, {}) | self._called(blocks, run)
        return self._entered_first(blocks[0], run)

    @torch.no_grad()
    def encoded(self, batch: Forced, hidden: Tensor) -> Tensor:
        """What the encoder makes of what left its last block: [B, S, H] both."""
        with self._giving(hidden, self.stacks[0]):
            return self._encode(batch)

    @torch.no_grad()
    def decoded(self, batch: Forced, encoded: Tensor, hidden: Tensor) -> Tensor:
        """What enters the output head, given what left the decoder's last block: [B, T, H] both."""
        entered: list[Tensor] = []
        with self._giving(hidden, self.stacks[1]):
            self._to_head(self._behind(batch, encoded), entered)
        return entered[0]

    def _encode(self, batch: Forced) -> Tensor:
        inputs = batch.arguments(self.device)
        out = self.model.get_encoder()(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        states: Tensor = out[0]
        return states

    def _behind(self, batch: Forced, encoded: Tensor) -> dict[str, Any]:
        """What the model is called with when its encoder is done."""
        inputs: dict[str, Any] = batch.arguments(self.device)
        del inputs["input_ids"]
        return inputs | {"encoder_outputs": MoEModelOutput(last_hidden_state=encoded)}

    def _batch(self, hidden: Tensor, first: int) -> int:
        return first


@dataclass(kw_only=True)
class PairLoop(Loop):
    """A walk through both stacks. pairs: token ids; `ids` are the sentences, padded."""

    model: EncoderDecoder
    pairs: Sequence[Pair]

    _stack: int = field(init=False, default=0)
    _encoded: dict[int, Tensor] = field(
        init=False, default_factory=dict
    )  # [B, S, H], by a batch's first pair

    def _forced(self, rows: slice) -> Forced:
        return forced(self.pairs[rows], self.model.model.config)

    def _mask(self, rows: slice, stack: int) -> Tensor:
        """Which tokens of a batch are no padding, [B, T] bool."""
        batch = self._forced(rows)
        return batch.labels != NONE if stack else batch.mask.bool()

    def _place(self, rows: slice) -> tuple[slice, slice]:
        return rows, slice(max(len(pair[self._stack]) for pair in self.pairs[rows]))

    def _inputs(self) -> BlockInputs:
        stack = self._stack
        return PairInputs(self._hidden, self._batches(), self._place, lambda rows: self._mask(rows, stack))

    def _batches(self) -> list[slice]:
        """Where blocks are trained, as many as that takes at the least."""
        batches, pairs = super()._batches(), len(self.pairs)
        if self.trainer is None or len(batches) >= self.trainer.least:
            return batches
        size = max(1, pairs // self.trainer.least)
        return [slice(first, min(pairs, first + size)) for first in range(0, pairs, size)]

    def _real(self, rows: slice, inputs: Seen, routed: RoutedTokens) -> tuple[Seen, RoutedTokens]:
        mask = self._mask(rows, self._stack).flatten().to(self.model.device)
        encoded = self._encoded.get(rows.start)
        source = None if encoded is None else self._mask(rows, 0).flatten().to(self.model.device)

        def of(x: Tensor) -> Tensor:
            """Keys and values of the decoder's second attention are made of what the encoder gave."""
            read = encoded is not None and x.data_ptr() == encoded.data_ptr()
            return x[source if read else mask]

        return (
            {name: of(x) for name, x in inputs.items()},
            {path: (states[mask], index[mask]) for path, (states, index) in routed.items()},
        )

    def _entered(self, index: int) -> Tensor:
        model = self.model
        model.load("")
        if index:
            for rows in self._batches():
                hidden = self._hidden[self._place(rows)].to(model.device)
                self._encoded[rows.start] = model.encoded(self._forced(rows), hidden)
            self._stack = 1
        model.load(model.stacks[self._stack][0])
        longest = max(len(pair[self._stack]) for pair in self.pairs)
        hidden = self.buffer((len(self.pairs), longest, model.model.config.hidden_size), model.dtype)
        for rows in self._batches():
            encoded = self._encoded.get(rows.start)
            entered = model.enter(self._stack, rows.start, self._forced(rows), encoded)
            hidden[self._place(rows)] = entered.to(hidden.device)
        model.drop("")
        return hidden

    def _head_input(self, rows: slice) -> Tensor:
        hidden = self._hidden[self._place(rows)].to(self.model.device)
        entered = self.model.decoded(self._forced(rows), self._encoded[rows.start], hidden)
        return entered[self._mask(rows, 1).to(entered.device)]

    @property
    def _length(self) -> int:
        return max(len(side) for pair in self.pairs for side in pair)
