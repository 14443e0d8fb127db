"""Reads stretches of files into memory, by threads of its own, around the page cache where the file system allows it.

What is waited for overtakes what is only guessed: a read is a row of requests of a few MiB, and each thread takes the
next request of the oldest urgent read, or of the oldest guess where there is none. So at most one request per thread
stands between a miss and the disk.
"""

import errno
import fcntl
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trilobite.errors import OffloadError
from trilobite.runtime.offload.memory import ALIGN, aligned

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


class Read:
    """One stretch on its way into memory; its first byte comes to lie at `offset - start`."""

    def __init__(self, queue: "_Queue", stretch: Stretch, into: memoryview, request: int) -> None:
        """into: at least `stretch.span` bytes at a multiple of ALIGN, written to until the read is over."""
        self.stretch, self.into = stretch, into
        self.error: OffloadError | None = None
        self._queue = queue
        self.pending = deque(range(0, stretch.span, request))
        self.flying = 0

    @property
    def over(self) -> bool:
        """Whether nothing writes into the memory any more: all is there, failed, or cancelled."""
        return not self.pending and not self.flying

    def wait(self) -> None:
        """Until it is over. Raises OffloadError when it failed."""
        self._queue.check()
        with self._queue.changed:
            self._queue.changed.wait_for(lambda: self.over)
        if self.error is not None:
            raise self.error

    def hurry(self) -> None:
        """A guess turned out to be right: read it before all other guesses."""
        self._queue.check()
        with self._queue.changed:
            if self in self._queue.guesses:
                self._queue.guesses.remove(self)
                self._queue.urgent.append(self)

    def cancel(self) -> int:
        """Begin no more requests of it; those in flight still end in the memory (`settle`). Returns the bytes saved."""
        with self._queue.changed:
            saved = self.stretch.span - self.pending[0] if self.pending else 0
            self._queue.drop(self)
            self._queue.changed.notify_all()
        return saved

    def settle(self) -> None:
        """Until nothing writes into the memory any more, whatever became of it."""
        if self._queue.owner == os.getpid():
            with self._queue.changed:
                self._queue.changed.wait_for(lambda: self.over)


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
        self._request = request
        self._queue = _Queue({path: _File(path, size, direct) for path, size in files.items()})
        self._workers = [
            threading.Thread(target=self._queue.work, name=f"trilobite-read-{i}", daemon=True)
            for i in range(threads)
        ]
        for worker in self._workers:
            worker.start()
        self._finalizer = weakref.finalize(self, self._queue.close)

    def read(self, stretch: Stretch, into: memoryview, *, urgent: bool) -> Read:
        """Begin to read. urgent: somebody waits for it. Raises OffloadError after a fork or `close`."""
        assert len(into) >= stretch.span, (len(into), stretch)
        self._queue.check()
        read = Read(self._queue, stretch, into, self._request)
        with self._queue.changed:
            (self._queue.urgent if urgent else self._queue.guesses).append(read)
            self._queue.changed.notify_all()
        return read

    @property
    def notes(self) -> list[str]:
        """One line for each file that is read through the page cache."""
        return [f.note for f in self._queue.files.values() if f.note]

    def close(self) -> None:
        """End the threads and close the files; reads that are not over fail."""
        self._finalizer()
        if self._queue.owner == os.getpid():
            for worker in self._workers:
                worker.join()


class _Queue:
    """What the threads share; knows nothing of the Reader, so that one that is forgotten can end them."""

    def __init__(self, files: dict[Path, "_File"]) -> None:
        self.owner = os.getpid()
        self.files = files
        self.changed = threading.Condition()
        self.urgent: deque[Read] = deque()
        self.guesses: deque[Read] = deque()
        self.closed = False

    def check(self) -> None:
        """Raise OffloadError in a process that has no threads, before it waits for them for ever."""
        if self.owner != os.getpid():
            raise OffloadError(
                "the threads that read experts belong to the process that loaded the model; load it again after a fork"
            )
        if self.closed:
            raise OffloadError("the files of this model are closed; load it again")

    def drop(self, read: Read) -> None:
        read.pending.clear()
        for queue in (self.urgent, self.guesses):
            if read in queue:
                queue.remove(read)

    def work(self) -> None:
        """Of one thread."""
        while (job := self._next()) is not None:
            read, at, stop = job
            error = None
            try:
                self.files[read.stretch.file].fill(read.stretch, read.into[at:stop], at)
            except OffloadError as e:
                error = e
            with self.changed:
                read.flying -= 1
                if error is not None:
                    read.error = read.error or error
                    self.drop(read)
                self.changed.notify_all()
            del read, job  # an idle thread keeps no memory alive

    def _next(self) -> tuple[Read, int, int] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.urgent or self.guesses or self.closed)
            if self.closed:
                return None
            queue = self.urgent or self.guesses
            read = queue[0]
            at = read.pending.popleft()
            stop = read.pending[0] if read.pending else read.stretch.span
            read.flying += 1
            if not read.pending:
                queue.popleft()
            return read, at, stop

    def close(self) -> None:
        if self.owner != os.getpid():
            return
        with self.changed:
            self.closed = True
            for read in (*self.urgent, *self.guesses):
                read.error = OffloadError("the files of this model were closed while it read; load it again")
                read.pending.clear()
            self.urgent.clear()
            self.guesses.clear()
            self.changed.notify_all()


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
