"""Where each expert lies in the checkpoint's files, and how it is described wherever its bytes come to lie."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.kernels.expert_table import Column, build
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.offload.reader import Stretch

_NAMES = ("PACKED", "SCALE", "LRA", "LRB", "LATTICE", "SIGNS_IN", "SIGNS_OUT")
OFFSETS = [int(Column[name]) for name in _NAMES]
"""Columns of a table that count from the beginning of the slab."""


Places = Mapping[int, tuple[Path, int]]
"""Address of a tensor in a mapped file -> that file, and the tensor's offset in it."""


class ExpertStore:
    """All experts of a model whose buffers are views of mapped files; they may differ in format and rank.

    rows: for every layer [E, 3, 16] int64 as in `expert_table`, offsets counted from where the reader begins
    stretches: for every layer, the bytes of each expert    slot_bytes: the most that one needs
    """

    def __init__(self, layers: Sequence[PackedExperts], places: Places) -> None:
        """Raises OffloadError for experts that lie elsewhere."""
        self.rows: list[np.ndarray] = []
        self.stretches: list[list[Stretch]] = []
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

    @property
    def nbytes(self) -> int:
        """Of all experts."""
        return sum(s.nbytes for stretches in self.stretches for s in stretches)

    @property
    def count(self) -> int:
        """Of all experts."""
        return sum(map(len, self.stretches))

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
