"""The whole model as a function of its blocks, as training takes it: on windows, or on pairs in batches of their own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trilobite.models.pairs import Forced
from trilobite.quantize.calibrate.encoder_decoder import EncoderDecoder
from trilobite.quantize.calibrate.inputs import BlockInputs, PairInputs
from trilobite.quantize.calibrate.model import BlockModel, Exchange, as_it_is

Parameters = Mapping[str, Tensor]
"""Those outside of the blocks, by name, fp32."""
T = TypeVar("T")
Buffer = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Block(Protocol):
    """A block on a batch. hidden: [B, T, H]    returns: [B, T, H] fp32."""

    def __call__(self, hidden: Tensor, first: int = 0, exchange: Exchange = as_it_is) -> Tensor:
        """first, exchange: as `BlockModel.apply` has them."""


class Whole(Protocol):
    """What enters a model, and how its blocks are run on it. Everything outside of them must be loaded."""

    def __len__(self) -> int:
        """Windows, or batches of pairs."""

    def outputs(
        self,
        blocks: Sequence[Callable[[], AbstractContextManager[Block]]],
        outside: Parameters,
        buffer: Buffer,
    ) -> BlockInputs:
        """What leaves the last block, all windows through one block after the other."""

    def output(self, chosen: Tensor, blocks: Sequence[Block], outside: Parameters) -> Tensor:
        """What leaves the last block for some windows, differentiable. chosen: their numbers, int64"""

    def logits(self, chosen: Tensor, hidden: Tensor, outside: Parameters) -> Tensor:
        """What the model makes of that, differentiable: [tokens, V], or [B, T, V]."""


class WholeWindows:
    """Of a decoder. ids: [S, T] int64."""

    def __init__(self, model: BlockModel, ids: Tensor, sizes: set[int]) -> None:
        """sizes: how many windows pass at a time. The first block must be loaded."""
        self.model, self.ids = model, ids
        for size in sorted(sizes):
            model.learn_arguments(ids[:size])

    def __len__(self) -> int:
        """Windows."""
        return len(self.ids)

    def outputs(
        self,
        blocks: Sequence[Callable[[], AbstractContextManager[Block]]],
        outside: Parameters,
        buffer: Buffer,
    ) -> BlockInputs:
        """[S, T, H]"""
        model, ids = self.model, self.ids
        hidden = buffer((*ids.shape, model.embed(ids[:1]).shape[-1]), torch.float32)
        inputs = BlockInputs(hidden)
        for rows in inputs.slices():
            hidden[rows] = model.embed(ids[rows]).float().to(hidden.device)
        for loaded in blocks:
            with loaded() as block:
                for rows in inputs.slices():
                    hidden[rows] = block(hidden[rows].to(model.device)).to(hidden.device)
        return inputs

    def output(self, chosen: Tensor, blocks: Sequence[Block], outside: Parameters) -> Tensor:
        """[B, T, H]"""
        hidden = self.model.embed(self.ids[chosen])
        for block in blocks:
            hidden = block(hidden)
        return hidden

    def logits(self, chosen: Tensor, hidden: Tensor, outside: Parameters) -> Tensor:
        """[B, T, V]"""
        return self.model.logits(self.ids[chosen], hidden, outside)


class WholePairs:
    """Of an encoder-decoder, under forced targets.

    inputs: of each stack, given room for what enters it    forced: batches of pairs, by where they are
    """

    def __init__(
        self,
        model: EncoderDecoder,
        batches: Sequence[slice],
        inputs: Callable[[int, Buffer], PairInputs],
        forced: Callable[[slice], Forced],
    ) -> None:
        """Nothing is run yet."""
        self.model, self._batches, self._inputs, self._forced = model, batches, inputs, forced
        self._known: dict[
            int, Tensor
        ] = {}  # what the decoder was told of the encoder, by a batch's first pair
        self._last: PairInputs

    def __len__(self) -> int:
        """Batches."""
        return len(self._batches)

    def outputs(
        self,
        blocks: Sequence[Callable[[], AbstractContextManager[Block]]],
        outside: Parameters,
        buffer: Buffer,
    ) -> BlockInputs:
        """Of the decoder's last block; blocks know what they are called with from now on."""
        model = self.model
        encoded: dict[int, Tensor] = {}
        for stack, of_stack in enumerate(self._by_stack(blocks)):
            for i, loaded in enumerate(of_stack):
                with loaded() as block:
                    if i == 0:
                        self._last = self._entered(stack, buffer)
                    for rows, place in self._places():
                        exchange = self._exchange(rows, encoded[rows.start]) if stack else as_it_is
                        made = block(self._last.hidden[place].to(model.device), rows.start, exchange)
                        self._last.hidden[place] = made.to(self._last.hidden.device)
            if stack == 0:
                for rows, place in self._places():
                    hidden = self._last.hidden[place].to(model.device)
                    encoded[rows.start] = model.encode(self._forced(rows), hidden, outside)
                self._known = {first: e.to(model.dtype) for first, e in encoded.items()}
        return self._last

    def _by_stack(self, blocks: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        turn = len(self.model.stacks[0])
        return blocks[:turn], blocks[turn:]

    def _places(self) -> Iterator[tuple[slice, Any]]:
        """Batches, and where they lie in what is kept of the present stack."""
        for rows, chosen in zip(self._batches, self._last.slices(), strict=True):
            yield rows, self._last.place(chosen)

    def _entered(self, stack: int, buffer: Buffer) -> PairInputs:
        inputs = self._inputs(stack, buffer)
        for rows, chosen in zip(self._batches, inputs.slices(), strict=True):
            entered = self.model.enter(stack, rows.start, self._forced(rows), self._known.get(rows.start))
            inputs.hidden[inputs.place(chosen)] = entered.float().to(inputs.hidden.device)
        return inputs

    def _exchange(self, rows: slice, encoded: Tensor) -> Exchange:
        """The decoder reads this in the place of what it was told of when it was first entered."""
        known = self._known[rows.start]
        return lambda t: encoded if t.data_ptr() == known.data_ptr() and t.shape == known.shape else t

    def output(self, chosen: Tensor, blocks: Sequence[Block], outside: Parameters) -> Tensor:
        """[B, T, H]; what the decoder reads of the encoder is what these blocks make of it."""
        rows = self._batches[int(chosen)]
        batch, (encoder, decoder) = self._forced(rows), self._by_stack(blocks)
        hidden = self.model.entering(0, batch, None)
        for block in encoder:
            hidden = block(hidden, rows.start)
        exchange = self._exchange(rows, self.model.encode(batch, hidden, outside))
        hidden = self.model.entering(1, batch, self._known[rows.start])
        for block in decoder:
            hidden = block(hidden, rows.start, exchange)
        return hidden

    def logits(self, chosen: Tensor, hidden: Tensor, outside: Parameters) -> Tensor:
        """[tokens, V]"""
        rows = self._batches[int(chosen)]
        made = self.model.decode(self._forced(rows), self._known[rows.start], hidden, outside)
        return self._last.real(chosen, made)
