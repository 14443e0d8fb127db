"""Where tensors lie in the files of a packed checkpoint, and writing them there, from any process that sees the files.

Several machines may write one file at a time, each to places of its own.
"""

import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trilobite.checkpoint.checksums import of_tensors
from trilobite.checkpoint.files import explained, write_at
from trilobite.checkpoint.layout import StoredTensor, Unit
from trilobite.checkpoint.source import DTYPES
from trilobite.errors import DestinationError

MARK = "mark"
"""File of an unfinished run: tells its folder from another one of the same path, on another machine."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the tensors of a unit lie, one after the other. offset: of the first, in the file."""

    file: Path
    offset: int
    unit: Unit

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """All tensors of the unit, given in its order, by name."""
        return {planned.name: t for planned, t in zip(self.unit.tensors, tensors, strict=True)}

    def put(self, handle: int, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Write those tensors of the unit that are named into the open file; returns their checksums."""
        written, offset = [], self.offset
        for planned in self.unit.tensors:
            if (tensor := tensors.get(planned.name)) is not None:
                data = _bytes(planned, tensor)
                write_at(handle, data, offset)
                written.append((planned.name, planned.dtype, data))
            offset += planned.nbytes
        return of_tensors(self.unit.name, written)

    def store(self, tensors: Sequence[Tensor]) -> dict[str, str]:
        """All tensors of the unit, from any process: on disk once this returns. Raises DestinationError."""
        # O_DSYNC also keeps NFS from writing whole pages, of which another machine may be writing the rest.
        with explained(self.file.parent), opened(self.file, os.O_WRONLY | os.O_DSYNC) as handle:
            return self.put(handle, self.named(tensors))

    def read(self) -> list[Tensor]:
        """The tensors as they are on disk, whichever machine wrote them."""
        # Network file systems look for news when a file is opened.
        with opened(self.file, os.O_RDONLY) as handle:
            return self.tensors(os.pread(handle, self.unit.nbytes, self.offset))

    def tensors(self, data: bytes) -> list[Tensor]:
        """The tensors that some bytes are, those of the place."""
        tensors, offset = [], 0
        for planned in self.unit.tensors:
            part = bytearray(data[offset : offset + planned.nbytes])
            tensors.append(torch.frombuffer(part, dtype=DTYPES[planned.dtype]).view(planned.shape))
            offset += planned.nbytes
        return tensors


@dataclass(frozen=True)
class Mark:
    """What tells the folder of a run, on every machine that sees it."""

    folder: Path
    token: str

    def check(self) -> None:
        """Raise DestinationError where this process sees another folder under that path, or none."""
        try:
            found = (self.folder / MARK).read_text()
        except OSError:
            found = ""
        if found != self.token:
            raise DestinationError(
                f"{self.folder}: not there as seen from {socket.gethostname()}, or another folder; SRC and DST must "
                "lie on storage that all nodes share, under the same paths: mount it there, or run without --ray"
            )


def new_mark(folder: Path) -> Mark:
    """Mark the folder of a run; whoever marked it before has ended."""
    mark = Mark(folder.absolute(), secrets.token_hex(16))
    (folder / MARK).write_text(mark.token)
    return mark


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file's handle."""
    handle = os.open(path, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def _bytes(planned: StoredTensor, tensor: Tensor) -> memoryview:
    assert tuple(tensor.shape) == planned.shape, (
        f"{planned.name}: {tuple(tensor.shape)} is not {planned.shape}"
    )
    assert tensor.nbytes == planned.nbytes, f"{planned.name}: {tensor.nbytes} bytes, not {planned.nbytes}"
    flat = tensor.contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
