"""Reads stretches of files into memory, by threads of its own, around the page cache where the file system allows it."""

import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trilobite.errors import OffloadError
from trilobite.runtime.offload.memory import ALIGN, aligned
from trilobite.runtime.offload.transfers import Transfer, Transfers

THREADS = 4
"""Requests in flight: enough to keep an NVMe disk busy."""
REQUEST = 2 * 2**20
"""Bytes of a request; 1-8 MiB read at the full speed of a disk (research: llama.cpp #29130)."""
DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Bytes [offset, offset + nbytes) of a file."""

    file: Path
    offset: int
    nbytes: int

    @property
    def start(self) -> int:
        """Where the reader begins: `offset`, rounded down to a multiple of ALIGN."""
        return self.offset - self.offset % ALIGN

    @property
    def span(self) -> int:
        """Bytes that the reader needs for it, a multiple of ALIGN."""
        return aligned(self.offset + self.nbytes - self.start)


class Reader:
    """Threads that read from a fixed set of files, which stay open: one that is deleted meanwhile reads on.

    notes: what a user should know, such as that O_DIRECT is not to be had
    """

    def __init__(
        self,
        files: Mapping[Path, int],
        *,
        threads: int = THREADS,
        request: int = REQUEST,
        direct: bool = True,
    ) -> None:
        """files: path -> the size it must have    direct: go around the page cache where possible.

        Raises OffloadError for a file that is gone or of another size.
        """
        assert request % ALIGN == 0, request
        self._files = {path: _File(path, size, direct) for path, size in files.items()}
        self.transfers = Transfers("read", threads=threads, piece=request)

    def read(self, stretch: Stretch, into: memoryview, *, urgent: bool) -> Transfer:
        """Begin to read; the first byte comes to lie at `offset - start`. urgent: somebody waits for it.

        into: at least `stretch.span` bytes at a multiple of ALIGN. Raises OffloadError after a fork or `close`.
        """
        assert len(into) >= stretch.span, (len(into), stretch)
        file = self._files[stretch.file]

        def move(at: int, stop: int) -> None:
            file.fill(stretch, into[at:stop], at)

        return self.transfers.begin(stretch.span, move, urgent=urgent)

    @property
    def notes(self) -> list[str]:
        """One line for each file that is read through the page cache."""
        return [f.note for f in self._files.values() if f.note]

    def close(self) -> None:
        """End the threads and close the files; reads that are not over fail."""
        self.transfers.close()


class _File:
    """One open file. note: why it is read through the page cache, or nothing."""

    def __init__(self, path: Path, size: int, direct: bool) -> None:
        self.path, self.size, self.note = path, size, ""
        self._lock = threading.Lock()
        self._handle, self._direct = self._open(bool(direct and DIRECT))
        self._closer = weakref.finalize(self, os.close, self._handle)
        found = os.fstat(self._handle).st_size
        if found != size:
            raise OffloadError(
                f"{path}: {found} bytes long, {size} when its header was read; copy it again and load the model again"
            )

    def _open(self, direct: bool) -> tuple[int, bool]:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | (DIRECT if direct else 0)), direct
        except OSError as e:
            if direct and e.errno in (errno.EINVAL, errno.ENOTSUP):
                self.note = self._no_direct()
                return self._open(False)
            raise OffloadError(
                f"{self.path}: cannot be opened ({e.strerror}); restore it and load again"
            ) from e

    def fill(self, stretch: Stretch, into: memoryview, at: int) -> None:
        """Read bytes [at, at + len(into)) of a stretch, counted from its start. Raises OffloadError."""
        first = stretch.start + at
        needed = min(len(into), stretch.offset + stretch.nbytes - first)
        done = 0
        while done < needed:
            direct = self._direct
            try:
                count = os.preadv(self._handle, [into[done:]], first + done)
            except OSError as e:
                if e.errno == errno.EINVAL and direct:
                    self._give_up_direct()
                    continue
                raise OffloadError(
                    f"{self.path}: {len(into)} bytes at {first} cannot be read ({e.strerror}); check the disk, restore "
                    "the file and load the model again"
                ) from e
            if done + count < needed and count < ALIGN:
                raise OffloadError(
                    f"{self.path}: ends at byte {first + done + count}, {self.size} expected: it has shrunk since the "
                    "model was loaded; copy it again and load the model again"
                )
            done += count
            if done < needed:
                done -= done % ALIGN  # what O_DIRECT goes on from

    def _give_up_direct(self) -> None:
        with self._lock:
            if self._direct:
                fcntl.fcntl(self._handle, fcntl.F_SETFL, os.O_RDONLY)
                self.note = self._no_direct()
                self._direct = False

    def _no_direct(self) -> str:
        return f"{self.path}: its file system has no O_DIRECT: experts are read through the page cache"
