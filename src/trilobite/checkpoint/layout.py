"""Where every tensor of a packed checkpoint lies: known before the first of them is made."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trilobite.checkpoint.source import DTYPES, ROWS

ALIGN = 64


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of the packed checkpoint. dtype: safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Tensors that are written together, in file order.

    block: units of one block (the experts of a layer) stay in one file
    rows: N of a matrix whose last tiles are partial; the others' tiles tell it
    """

    name: str
    tensors: tuple[StoredTensor, ...]
    block: str
    rows: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(t.nbytes for t in self.tensors)


@dataclass
class Shard:
    """One file: what is in it, in order."""

    name: str
    units: list[Unit] = field(default_factory=list)
    nbytes: int = 0

    @property
    def file_bytes(self) -> int:
        """Bytes of the file, with its header."""
        return len(self.header()) + self.nbytes

    def header(self) -> bytes:
        """The safetensors header; padded with spaces so that the data starts at a multiple of 64 bytes."""
        rows = {unit.name: unit.rows for unit in self.units if unit.rows is not None}
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", ROWS: json.dumps(rows)}}
        offset = 0
        for unit in self.units:
            for t in unit.tensors:
                span = [offset, offset + t.nbytes]
                entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": span}
                offset += t.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        return struct.pack("<Q", len(text)) + text


def make_shards(units: Sequence[Unit], limit: int) -> list[Shard]:
    """Fill files up to `limit` bytes; a block never straddles two files."""
    blocks: list[list[Unit]] = []
    for unit in units:
        if blocks and blocks[-1][0].block == unit.block:
            blocks[-1].append(unit)
        else:
            blocks.append([unit])
    shards = [Shard("")]
    for block in blocks:
        size = sum(u.nbytes for u in block)
        if shards[-1].units and shards[-1].nbytes + size > limit:
            shards.append(Shard(""))
        shards[-1].units += block
        shards[-1].nbytes += size
    for i, shard in enumerate(shards, 1):
        shard.name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    return shards
