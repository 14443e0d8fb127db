"""Experts that a device gets from the memory of the host: pinned there once and for all, or cached in front of the disk.

A device of which the GPU kernels are known has them in the GPU layout: packed once into pinned memory, or, where the
host holds slots of the disk's bytes, repacked by the device behind each copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops
from trilobite.kernels.expert_table import DOWN, expert_weight
from trilobite.kernels.layer import Codings, PackColumn
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.copies import CopyEngine
from trilobite.runtime.offload.memory import Arena, aligned
from trilobite.runtime.offload.policies import Key
from trilobite.runtime.offload.store import ExpertStore, FileStore
from trilobite.runtime.offload.transfers import Transfer

WORD = 4


@dataclass(frozen=True, kw_only=True)
class GpuLayout:
    """Where the parts of each expert lie in its slot.

    rows: for every layer [E, 3, 10] int64, columns as in `PackColumn`, offsets from the beginning of the slot
    words: for every layer, of each expert    codings: for every layer
    """

    rows: Sequence[np.ndarray]
    words: Sequence[Sequence[int]]
    codings: Sequence[Codings]

    @property
    def slot_bytes(self) -> int:
        """The most that an expert takes."""
        return aligned(WORD * max(w for words in self.words for w in words))


OFFSETS = [int(column) for column in PackColumn if column < PackColumn.RANK]
"""Columns of a table in the GPU layout that count from the beginning of the slab."""


def gpu_layout(layers: Sequence[PackedExperts]) -> GpuLayout:
    """Arrange the experts of these layers, each for itself. Raises ShapeError for formats without a GPU kernel."""
    found = [_arrange(layer) for layer in layers]
    rows, words, codings = zip(*found, strict=True)
    return GpuLayout(rows=rows, words=words, codings=codings)


def _arrange(layer: PackedExperts) -> tuple[np.ndarray, list[int], Codings]:
    table, codings, end = ops.arrange(_weights(layer))
    rows = table.numpy()
    offsets = rows[:, :, OFFSETS]
    starts = np.where(offsets < 0, end, offsets).min((1, 2))
    rows[:, :, OFFSETS] = np.where(offsets < 0, offsets, offsets - starts[:, None, None])
    return rows, np.diff(starts, append=end).tolist(), codings


def _weights(layer: PackedExperts) -> list[list[PackedWeight | None]]:
    return [[None if m is None else m.packed() for m in row] for row in layer.matrices()]


class HostStore(ExpertStore):
    """All experts in the memory of the host, each ready for one copy."""

    def __init__(self, engine: CopyEngine, files: FileStore, sources: Sequence[Sequence[Tensor]]) -> None:
        """As stored. sources: for every layer, the bytes of each expert, [bytes] uint8."""
        self.engine, self.sources = engine, sources
        self.rows, self.offsets, self.unit = files.rows, files.offsets, files.unit
        self.slot_bytes = files.slot_bytes
        self._pads = [[s.offset - s.start for s in stretches] for stretches in files.stretches]

    def size(self, key: Key) -> int:
        """Bytes of an expert."""
        return self.sources[key[0]][key[1]].numel()

    def fetch(self, key: Key, arena: Arena, slot: int, *, urgent: bool) -> Transfer:
        """Begin to copy. Raises OffloadError."""
        source, pad = self.sources[key[0]][key[1]], self._pads[key[0]][key[1]]
        target = arena.slot(slot)[pad : pad + source.numel()]
        return self.engine.copy(source, target, urgent=urgent)

    def close(self) -> None:
        """End the copying threads."""
        self.engine.close()


def mapped(layers: Sequence[PackedExperts]) -> list[list[Tensor]]:
    """The bytes of each expert where its file is mapped."""
    return [[_bytes([w for w in row if w is not None]) for row in _weights(layer)] for layer in layers]


def _bytes(weights: Sequence[PackedWeight]) -> Tensor:
    parts = [t for w in weights for t in w.tensors().values()]
    storage = parts[0].untyped_storage()
    first = min(t.data_ptr() for t in parts) - storage.data_ptr()
    last = max(t.data_ptr() + t.nbytes for t in parts) - storage.data_ptr()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return whole[first:last]  # type: ignore[no-any-return]


class PinnedStore(HostStore):
    """All experts in the GPU layout, in pinned memory."""

    def __init__(self, engine: CopyEngine, layers: Sequence[PackedExperts], layout: GpuLayout) -> None:
        """Repack each expert on the device, and copy it back. Raises OffloadError when there is no such memory."""
        self.engine = engine
        self.rows, self.offsets, self.unit = layout.rows, OFFSETS, WORD
        self.slot_bytes = layout.slot_bytes
        self._pads = [[0] * len(words) for words in layout.words]
        nbytes = [[WORD * w for w in words] for words in layout.words]
        self._arena = Arena(1, aligned(sum(map(sum, nbytes))))
        engine.pin(self._arena)
        sources, end = list[list[Tensor]](), 0
        for layer, rows, sizes in zip(layers, layout.rows, nbytes, strict=True):
            sources.append([])
            for weights, row, size in zip(_weights(layer), rows, sizes, strict=True):
                home = self._arena.tensor[end : end + size]
                slab = torch.zeros(size // WORD, dtype=torch.int32, device=engine.device)
                ops.fill(slab, torch.from_numpy(row), [_on(engine.device, w) for w in weights])
                home.copy_(slab.view(torch.uint8))
                sources[-1].append(home)
                end += size
        self.sources = sources


def _on(device: torch.device, w: PackedWeight | None) -> PackedWeight | None:
    return None if w is None else w.to(device)


class SlotStore(ExpertStore):
    """Experts in slots of the host, in front of the disk: what is missing there is read first."""

    def __init__(
        self,
        engine: CopyEngine,
        lower: ExpertCache,
        layers: Sequence[PackedExperts],
        layout: GpuLayout | None,
    ) -> None:
        """lower: the slots of the host    layout: of the device; None: as stored."""
        assert isinstance(lower.store, FileStore)
        self.engine, self.lower, self.files = engine, lower, lower.store
        self.layout = layout
        self._shapes = [(layer.intermediate_size, layer.hidden_size) for layer in layers]
        engine.pin(lower.arena)
        self._copying: list[Transfer] = []
        self._keep: set[Key] = set()
        self.rows, self.offsets, self.unit = self.files.rows, self.files.offsets, self.files.unit
        self.slot_bytes = self.files.slot_bytes
        if layout is not None:
            self.rows, self.offsets, self.unit = layout.rows, OFFSETS, WORD
            self.slot_bytes = max(self.slot_bytes, layout.slot_bytes)

    def size(self, key: Key) -> int:
        """Bytes of an expert as stored, which is what is copied."""
        return self.files.size(key)

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to read what is missing."""
        keys = {(layer, e) for e in experts}
        self._keep = keys if self.lower.holds(layer, len(keys)) else set()
        with self.lower.lock:
            self.lower.forget_guesses(layer, experts)
            self.lower.guess(layer, experts)

    def holds(self, layer: int, count: int) -> bool:
        """In its slots."""
        return self.lower.holds(layer, count)

    def near(self, key: Key) -> bool:
        """Whether the host has it; else it begins to be read."""
        if self.lower.slots.slot(key) is not None:
            return True
        with self.lower.lock:
            self.lower.guess(key[0], [key[1]])
        return False

    def load(self, key: Key) -> None:
        """Wait for it to be read. Raises OffloadError."""
        with self.lower.lock:
            if self.lower.slots.slot(key) is None:
                for transfer in self._copying:  # out of slots that may be evicted now
                    transfer.settle()
                self._copying.clear()
            self.lower.bring(key, {*self._keep, key})

    def fetch(self, key: Key, arena: Arena, slot: int, *, urgent: bool) -> Transfer:
        """Wait for it to be read, and begin to copy. Raises OffloadError."""
        layer, expert = key
        self.load(key)
        home = self.lower.slots.slot(key)
        assert home is not None
        stretch = self.files.stretches[layer][expert]
        pad = stretch.offset - stretch.start
        part = slice(pad, pad + stretch.nbytes)
        target = arena.slot(slot)
        finish = None if self.layout is None else lambda: self._repack(key, target)
        source = self.lower.arena.slot(home)[part]
        transfer = self.engine.copy(source, target[part], urgent=urgent, finish=finish)
        self._copying = [*(t for t in self._copying if not t.over), transfer]
        return transfer

    def _repack(self, key: Key, slot: Tensor) -> None:
        """From the stored bytes in a slot of the device to the GPU layout, in place."""
        assert self.layout is not None
        layer, expert = key
        shape = self._shapes[layer]
        weights = [
            expert_weight(slot, torch.from_numpy(row), shape[::-1] if p == DOWN else shape)
            for p, row in enumerate(self.files.rows[layer][expert])
        ]
        ops.fill(slot.view(torch.int32), torch.from_numpy(self.layout.rows[layer][expert]), weights)

    @property
    def notes(self) -> list[str]:
        """Those of the disk."""
        return self.files.notes

    def close(self) -> None:
        """End all threads."""
        self.engine.close()
        self.lower.close()
