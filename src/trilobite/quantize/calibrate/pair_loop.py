"""Encoder-decoders, run block by block: the encoder on sentences, then the decoder on their given translations.

Sentences differ in length: batches are padded on the right, masks are part of what blocks are called with, batch by
batch, and what entered a module counts without its padding. What the decoder reads of the encoder is what the encoder's
last block left, so behind quantized blocks where these propagate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilobite.models.pairs import NONE, Forced, Pair, forced
from trilobite.quantize.calibrate.encoder_decoder import EncoderDecoder
from trilobite.quantize.calibrate.inputs import BlockInputs, PairInputs
from trilobite.quantize.calibrate.loop import Loop, RoutedTokens, Seen
from trilobite.quantize.calibrate.whole import Buffer, WholePairs


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

    def _whole(self) -> WholePairs:
        """Batches as blocks have them."""

        def inputs(stack: int, buffer: Buffer) -> PairInputs:
            self._stack = stack
            longest = max(len(pair[stack]) for pair in self.pairs)
            hidden = buffer((len(self.pairs), longest, self.model.model.config.hidden_size), torch.float32)
            return PairInputs(hidden, self._batches(), self._place, lambda rows: self._mask(rows, stack))

        return WholePairs(self.model, self._batches(), inputs, self._forced)

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
