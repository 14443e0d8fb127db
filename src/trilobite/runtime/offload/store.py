"""Where experts come from, and how each is described wherever its bytes come to lie. First of all: from the disk."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.kernels.expert_table import Column, build
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.offload.memory import ALIGN, Arena
from trilobite.runtime.offload.policies import Key
from trilobite.runtime.offload.reader import Reader, Stretch
from trilobite.runtime.offload.transfers import Transfer

_NAMES = ("PACKED", "SCALE", "LRA", "LRB", "LATTICE", "SIGNS_IN", "SIGNS_OUT")
OFFSETS = [int(Column[name]) for name in _NAMES]
"""Columns of a table that count from the beginning of the slab."""
GLANCE, GLANCE_SECONDS = 8 * 2**20, 0.15
"""Bytes of one read of a short look at the disk, and how long that goes on."""


Places = Mapping[int, tuple[Path, int]]
"""Address of a tensor in a mapped file -> that file, and the tensor's offset in it."""


class ExpertStore(ABC):
    """All experts of a model, one contiguous transfer each; they may differ in format and rank.

    rows: for every layer [E, 3, columns] int64, a table whose offsets count from the beginning of a slot; absent = -1
    offsets: the columns that hold offsets, the first of them never absent; they count in `unit` bytes
    slot_bytes: the most that one needs
    """

    rows: Sequence[np.ndarray]
    offsets: Sequence[int]
    unit: int
    slot_bytes: int

    @abstractmethod
    def size(self, key: Key) -> int:
        """Bytes of an expert."""

    @abstractmethod
    def fetch(self, key: Key, arena: Arena, slot: int, *, urgent: bool) -> Transfer:
        """Begin to bring an expert into a slot. Raises OffloadError."""

    def expect(self, layer: int, experts: Sequence[int]) -> None:  # noqa: B027 - most need no warning
        """A call has come that will fetch these experts of a layer and no others."""

    def load(self, key: Key) -> None:  # noqa: B027 - most have all there
        """Have an expert on the host. Raises OffloadError."""

    def near(self, key: Key) -> bool:
        """Whether an expert may be fetched on speculation, for which nothing but idle bandwidth is spent."""
        return True

    def holds(self, layer: int, count: int) -> bool:
        """Whether so many experts of a layer may be on the host at a time."""
        return True

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        return []

    @abstractmethod
    def close(self) -> None:
        """End the threads."""

    @property
    def nbytes(self) -> int:
        """Of all experts."""
        return sum(self.size((layer, e)) for layer, rows in enumerate(self.rows) for e in range(len(rows)))

    @property
    def count(self) -> int:
        """Of all experts."""
        return sum(map(len, self.rows))


class FileStore(ExpertStore):
    """Experts of a model whose buffers are views of mapped files.

    rows: [E, 3, 16] as in `expert_table`, offsets counted from where the reader begins
    stretches: for every layer, the bytes of each expert
    """

    offsets = OFFSETS
    unit = 1

    def __init__(self, layers: Sequence[PackedExperts], places: Places, sizes: Mapping[Path, int]) -> None:
        """sizes: of the files, in bytes. Raises OffloadError for experts that lie elsewhere."""
        self.rows: list[np.ndarray] = []
        self.stretches: list[list[Stretch]] = []
        self._sizes = sizes
        self._reader: Reader | None = None
        for layer in layers:
            weights = [tuple(None if m is None else m.packed() for m in row) for row in layer.matrices()]
            parts = [[t for w in row if w is not None for t in w.tensors().values()] for row in weights]
            stretches = [_stretch(p, places) for p in parts]
            slab, table = build(weights)  # type: ignore[arg-type]
            rows = table.numpy()
            for expert, stretch in enumerate(stretches):
                first = min(t.data_ptr() for t in parts[expert])
                shift = slab.data_ptr() - first + stretch.offset - stretch.start
                offsets = rows[expert][:, OFFSETS]
                rows[expert][:, OFFSETS] = np.where(offsets >= 0, offsets + shift, offsets)
            self.rows.append(rows)
            self.stretches.append(stretches)
        self.slot_bytes = max(s.span for stretches in self.stretches for s in stretches)

    def open(self) -> None:
        """Open the files and start the threads. Raises OffloadError."""
        self._reader = Reader({path: self._sizes[path] for path in self.files()})

    def size(self, key: Key) -> int:
        """Bytes of an expert."""
        return self.stretches[key[0]][key[1]].nbytes

    def fetch(self, key: Key, arena: Arena, slot: int, *, urgent: bool) -> Transfer:
        """Begin to read. Raises OffloadError."""
        if self._reader is None:
            self.open()
        assert self._reader is not None
        return self._reader.read(self.stretches[key[0]][key[1]], arena.view(slot), urgent=urgent)

    @property
    def notes(self) -> list[str]:
        """Files that are read through the page cache."""
        return [] if self._reader is None else self._reader.notes

    def close(self) -> None:
        """End the reading threads and close the files."""
        if self._reader is not None:
            self._reader.close()

    def speed(self, seconds: float = GLANCE_SECONDS) -> float:
        """Bytes per second of a short look at the disk: first parts of experts, one by one. Raises OffloadError."""
        if self._reader is None:
            self.open()
        assert self._reader is not None
        arena, done, started = Arena(1, GLANCE + ALIGN), 0, perf_counter()
        for stretch in itertools.chain.from_iterable(self.stretches):
            part = replace(stretch, nbytes=min(stretch.nbytes, GLANCE))
            self._reader.read(part, arena.view(0), urgent=True).wait()
            done += part.nbytes
            if perf_counter() - started > seconds:
                break
        return done / (perf_counter() - started)

    def files(self) -> list[Path]:
        """Those that hold experts."""
        return sorted({s.file for stretches in self.stretches for s in stretches})


def _stretch(parts: Sequence[Tensor], places: Places) -> Stretch:
    first = min(t.data_ptr() for t in parts)
    last = max(t.data_ptr() + t.nbytes for t in parts)
    file, offset = places.get(first, (None, 0))
    if file is None or any(places.get(t.data_ptr()) != (file, offset + t.data_ptr() - first) for t in parts):
        raise OffloadError(
            "the experts of this model do not lie in one mapped file, from which they could stream; compress the "
            "original again"
        )
    if last - first != sum(t.nbytes for t in parts):
        raise OffloadError(
            f"{file}: the parts of an expert do not lie next to each other, as `trilobite compress` writes them; "
            "compress the original again"
        )
    return Stretch(file=file, offset=offset, nbytes=last - first)
