"""What enters a block, as training takes it: windows, of which any pass together, or pairs in batches of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TOGETHER = 8
"""Windows that pass a block at a time."""


class BlockInputs:
    """Windows. hidden: [S, T, H], what enters the block for all of them."""

    together: int | None = None
    """How many have to pass at a time; None = any number."""

    def __init__(self, hidden: Tensor) -> None:
        """Nothing is copied."""
        self.hidden = hidden

    def __len__(self) -> int:
        """How many there are to train on, or to set aside."""
        return len(self.hidden)

    def slices(self) -> list[Tensor]:
        """Those that pass a block at a time, in order, where nothing is trained."""
        return list(torch.split(torch.arange(len(self)), self.together or TOGETHER))

    def place(self, chosen: Tensor) -> Any:
        """Where some of them lie in `hidden`. chosen: their numbers, int64"""
        return chosen

    def first(self, chosen: Tensor) -> int:
        """By what the model knows what the block is called with besides."""
        return 0

    def real(self, chosen: Tensor, values: Tensor) -> Tensor:
        """What is no padding of values for some of them. values: [B, T, H]"""
        return values


class PairInputs(BlockInputs):
    """Batches of pairs: a block is called with their masks, which the model knows batch by batch."""

    together = 1

    def __init__(
        self,
        hidden: Tensor,
        batches: Sequence[slice],
        place: Callable[[slice], Any],
        mask: Callable[[slice], Tensor],
    ) -> None:
        """place: where a batch lies in `hidden`    mask: which of its tokens are no padding, [B, T] bool."""
        super().__init__(hidden)
        self._batches, self._place, self._mask = batches, place, mask

    def __len__(self) -> int:
        """How many batches."""
        return len(self._batches)

    def place(self, chosen: Tensor) -> Any:
        """Where a batch lies, its padding left out where all its pairs have some."""
        return self._place(self._batch(chosen))

    def first(self, chosen: Tensor) -> int:
        """Number of the batch's first pair."""
        start: int = self._batch(chosen).start
        return start

    def real(self, chosen: Tensor, values: Tensor) -> Tensor:
        """[tokens, H]"""
        return values[self._mask(self._batch(chosen)).to(values.device)]

    def _batch(self, chosen: Tensor) -> slice:
        return self._batches[int(chosen)]
