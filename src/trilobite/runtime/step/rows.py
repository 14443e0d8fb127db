"""Keys and values of one layer in memory with room for more: a new token is written behind those that are there, or
where a server has a place for it."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trilobite.kernels import ops
from trilobite.runtime.step.unsuited import NotNow, Unsuited

ROOM = 64
"""Least rows of room for more; or a fourth of those that are there."""
AHEAD = 16
"""Steps whose views are made at once: one alone has its code to fetch from memory, between two tokens."""


class Source:
    """Keys and values of a source text, which a layer of transformers' cache holds: a step only reads them."""

    def __init__(self, heads: int, width: int, dtype: torch.dtype, texts: int = 1) -> None:
        """Empty. width: of keys and of values."""
        self.heads, self.width, self.dtype = heads, width, dtype
        self.natives = [ops.StepCache() for _ in range(texts)]
        self.seen: tuple[Tensor, Tensor] | None = None
        self.lengths: list[int] | None = None

    def follow(self, layer: Any, lengths: list[int] | None) -> None:
        """Read what the layer holds; lengths: of the texts, where it holds more."""
        keys, values = layer.keys, layer.values
        if self.seen is None or keys is not self.seen[0] or values is not self.seen[1]:
            self._read(keys, values)
        elif lengths == self.lengths:
            return
        self.lengths = lengths
        for native, length in zip(self.natives, lengths or [keys.shape[2]] * len(self.natives), strict=True):
            native.end = length

    def forget(self) -> None:
        """Hold nothing."""
        self.seen = None

    def _read(self, keys: Tensor, values: Tensor) -> None:
        shape = len(self.natives), self.heads, keys.shape[2], self.width
        if not keys.shape == values.shape == shape or not keys.dtype == values.dtype == self.dtype:
            raise NotNow(f"its cache holds keys of a source of shape {list(keys.shape)}")
        if keys.stride() != values.stride() or keys.stride(3) != 1:
            raise NotNow("its cache holds keys of a source that lie elsewhere than their values")
        self.seen, self.numbers = (keys, values), torch.arange(shape[2])
        last = sum((n - 1) * step for n, step in zip(shape[1:], keys.stride()[1:], strict=True))
        for native, key, value in zip(self.natives, keys, values, strict=True):
            native.k, native.v, native.rows = (t.data_ptr() for t in (key, value, self.numbers))
            native.first, native.capacity, native.limit = 0, shape[2], shape[2]
            native.row_stride, native.head_stride = keys.stride(2), keys.stride(1)
            native.bytes = (last + 1) * keys.element_size()


class Rows:
    """What a layer of transformers' cache holds; the layer's own tensors are views of it.

    A tensor that somebody kept never changes: rows are written behind all that a view shows, and a layer that got other
    tensors than the last views is copied. Of several texts, which are as long as each other, each has its own memory.
    """

    def __init__(
        self,
        heads: int,
        width: int,
        value_width: int,
        dtype: torch.dtype,
        *,
        texts: int = 1,
        joined: bool = False,
        chunk: int | None = None,
    ) -> None:
        """Empty. width, value_width: of keys and of values, the narrower of which are filled up with zeros.

        joined: the layer holds latents and rotated keys, which lie side by side and are read as keys and as values
        chunk: tokens of a chunk of the text, where a token looks at those of its own alone
        """
        self.heads, self.width, self.value_width, self.dtype = heads, width, value_width, dtype
        self.joined, self.chunk = joined, chunk
        self.natives = [ops.StepCache() for _ in range(texts)]
        self.native = self.natives[0]
        self.views: tuple[Tensor, Tensor] | None = None
        self.ahead: list[tuple[Tensor, Tensor]] = []
        self.copied = False

    def follow(self, layer: Any, padding: list[int] | None = None) -> None:
        """Hold what the layer holds, and have room for one more row.

        padding: tokens that only fill texts up, in front of each, where there are some
        """
        views, native = self.views, self.native
        if (
            views is None
            or layer.keys is not views[0]
            or layer.values is not views[1]
            or native.end >= native.capacity
        ):
            self._copy(layer)
        first = max(0, native.end + 1 - layer.sliding_window) if layer.is_sliding else 0
        if self.chunk is None and padding is None:
            for each in self.natives:
                each.first = first
            return
        length = layer.get_seq_length()
        for each, before in zip(self.natives, padding or [0] * len(self.natives), strict=True):
            begin = before if self.chunk is None else length - (length - before) % self.chunk
            each.first = max(first, begin - (length - native.end))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _copy(self, layer: Any) -> None:
        keys, values = layer.keys, layer.values
        texts = len(self.natives)
        shapes = (texts, self.heads, self.width), (texts, self.heads, self.value_width)
        found = (*keys.shape[:2], keys.shape[3]), (*values.shape[:2], values.shape[3])
        if found != shapes or not keys.dtype == values.dtype == self.dtype:
            raise NotNow(f"its cache holds keys of shape {list(keys.shape)}")
        length = keys.shape[2]
        capacity = length + max(ROOM, length // 4)
        wide = self.width + self.value_width if self.joined else self.width
        key = torch.empty(texts, self.heads, capacity, wide, dtype=self.dtype)
        filled = torch.empty_like if self.value_width == wide else torch.zeros_like
        value = key if self.joined else filled(key)
        first = self.width if self.joined else 0
        self.keys, self.values = key[..., : self.width], value[..., first : first + self.value_width]
        self.keys[:, :, :length] = keys
        self.values[:, :, :length] = values
        self.numbers = torch.arange(capacity)
        self.ahead, self.copied = [], True
        for native, k, v in zip(self.natives, key, value, strict=True):
            native.k, native.v, native.rows = k.data_ptr(), v.data_ptr(), self.numbers.data_ptr()
            native.end, native.capacity, native.limit = length, capacity, capacity
            native.row_stride, native.head_stride = wide, capacity * wide
            native.bytes = k.nbytes

    def advance(self, layer: Any) -> None:
        """Show the layer the row that was written."""
        if layer.is_sliding:
            layer.cumulative_length += 1
        if not self.ahead:
            self._look_ahead(layer.sliding_window if layer.is_sliding else self.native.capacity + 1)
        self.views = self.ahead.pop()
        layer.keys, layer.values = self.views

    @torch.inference_mode(False)
    @torch.no_grad()
    def _look_ahead(self, window: int) -> None:
        """What the layer will show from now on, the next step last. window: rows that a token sees, itself included."""
        end = self.native.end
        # Who chooses among texts, as beams do, puts other tensors into the layer before the next step.
        steps, self.copied = 1 if self.copied else AHEAD, False
        for last in reversed(range(end, min(end + steps, self.native.capacity + 1))):
            first = max(0, last + 1 - window)
            rows = 2, first, last - first
            self.ahead.append((self.keys.narrow(*rows), self.values.narrow(*rows)))

    def lie_in(self, keys: Tensor, values: Tensor, index: Tensor, starts: Tensor) -> None:
        """Be the rows of others' memory that index says, the last of each text's for its new token.

        keys, values: [rows, heads, width], dense    index: [S] int64, dense
        starts: where in the index each text begins, and the end of the last one, [texts + 1]
        """
        if self.joined:
            raise Unsuited("its pages hold keys and values, where its own cache holds latents")
        if self.chunk is not None:
            raise Unsuited("it attends in chunks")
        shape = keys.shape[0], self.heads, self.width
        for t in (keys, values):
            if t.shape != shape or t.dtype != self.dtype or not t.is_contiguous() or not t.is_cpu:
                raise Unsuited(f"its pages are of shape {list(t.shape)}")
        if index.dtype != torch.int64 or not index.is_contiguous():
            raise Unsuited("rows of its pages are counted otherwise")
        self.forget()
        where = keys.data_ptr(), values.data_ptr()
        for native, (first, end) in zip(self.natives, pairwise(starts.tolist()), strict=True):
            native.k, native.v = where
            native.rows = index.data_ptr() + first * index.element_size()
            count = end - first
            native.first, native.end, native.capacity, native.limit = 0, count - 1, count, len(keys)
            native.row_stride, native.head_stride = self.heads * self.width, self.width
            native.bytes = keys.nbytes

    def forget(self) -> None:
        """Hold nothing: what was written is not known."""
        self.views, self.ahead = None, []
        self.keys = self.values = torch.empty(0)
