"""Transfers of bytes by threads of their own, in pieces, so that what is waited for overtakes what is only guessed.

A transfer is a row of pieces of a few MiB. Each thread takes the next piece of the oldest urgent transfer, or of the
oldest guess where there is none: at most one piece per thread stands between a miss and its bytes.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from trilobite.errors import OffloadError

Move = Callable[[int, int], None]
"""Brings bytes [at, stop) of a transfer, or raises OffloadError."""


class Transfer:
    """Bytes on their way into memory, which is written to until it is over."""

    def __init__(
        self, queue: "_Queue", nbytes: int, piece: int, move: Move, finish: Callable[[], None] | None
    ) -> None:
        """As `Transfers.begin` says."""
        self.nbytes, self.move, self.finish = nbytes, move, finish
        self.error: OffloadError | None = None
        self.pending = deque(range(0, nbytes, piece))
        self.missing, self.flying = len(self.pending), 0
        self._queue = queue

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
        """A guess turned out to be right: bring it before all other guesses."""
        self._queue.check()
        with self._queue.changed:
            if self in self._queue.guesses:
                self._queue.guesses.remove(self)
                self._queue.urgent.append(self)

    def cancel(self) -> int:
        """Begin no more pieces of it; those in flight still end in the memory (`settle`). Returns the bytes saved."""
        with self._queue.changed:
            saved = self.nbytes - self.pending[0] if self.pending else 0
            self._queue.drop(self)
            self._queue.changed.notify_all()
        return saved

    def settle(self) -> None:
        """Until nothing writes into the memory any more, whatever became of it."""
        if self._queue.owner == os.getpid():
            with self._queue.changed:
                self._queue.changed.wait_for(lambda: self.over)


class Transfers:
    """Threads that move bytes, until they are closed or forgotten."""

    def __init__(self, name: str, *, threads: int, piece: int) -> None:
        """name: of the threads    piece: bytes that a thread moves at a time."""
        self._piece = piece
        self._queue = _Queue()
        self.workers = [
            threading.Thread(target=self._queue.work, name=f"trilobite-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for worker in self.workers:
            worker.start()
        self._finalizer = weakref.finalize(self, self._queue.close)

    def begin(
        self, nbytes: int, move: Move, *, urgent: bool, finish: Callable[[], None] | None = None
    ) -> Transfer:
        """Begin to move so many bytes. urgent: somebody waits for them    finish: called when all of them are there.

        Raises OffloadError after a fork or `close`.
        """
        self._queue.check()
        transfer = Transfer(self._queue, nbytes, self._piece, move, finish)
        with self._queue.changed:
            (self._queue.urgent if urgent else self._queue.guesses).append(transfer)
            self._queue.changed.notify_all()
        return transfer

    def close(self) -> None:
        """End the threads; transfers that are not over fail."""
        self._finalizer()
        if self._queue.owner == os.getpid():
            for worker in self.workers:
                worker.join()


class _Queue:
    """What the threads share; knows nothing of `Transfers`, so that ones that are forgotten can end them."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.changed = threading.Condition()
        self.urgent: deque[Transfer] = deque()
        self.guesses: deque[Transfer] = deque()
        self.closed = False

    def check(self) -> None:
        """Raise OffloadError in a process that has no threads, before it waits for them for ever."""
        if self.owner != os.getpid():
            raise OffloadError(
                "the threads that bring experts belong to the process that loaded the model; load it again after a fork"
            )
        if self.closed:
            raise OffloadError("the files of this model are closed; load it again")

    def drop(self, transfer: Transfer) -> None:
        transfer.pending.clear()
        for queue in (self.urgent, self.guesses):
            if transfer in queue:
                queue.remove(transfer)

    def work(self) -> None:
        """Of one thread."""
        while (job := self._next()) is not None:
            transfer, at, stop = job
            error: OffloadError | None = None
            try:
                transfer.move(at, stop)
                if self._is_last(transfer) and transfer.finish is not None:
                    transfer.finish()
            except Exception as e:  # whoever waits must hear of it
                error = (
                    e if isinstance(e, OffloadError) else OffloadError(f"an expert cannot be brought: {e}")
                )
            with self.changed:
                transfer.flying -= 1
                if error is not None:
                    transfer.error = transfer.error or error
                    self.drop(transfer)
                self.changed.notify_all()
            del transfer, job  # an idle thread keeps no memory alive

    def _is_last(self, transfer: Transfer) -> bool:
        """Whether the piece that a thread has just moved was the last one that was missing; true for one thread."""
        with self.changed:
            transfer.missing -= 1
            return transfer.missing == 0

    def _next(self) -> tuple[Transfer, int, int] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.urgent or self.guesses or self.closed)
            if self.closed:
                return None
            queue = self.urgent or self.guesses
            transfer = queue[0]
            at = transfer.pending.popleft()
            stop = transfer.pending[0] if transfer.pending else transfer.nbytes
            transfer.flying += 1
            if not transfer.pending:
                queue.popleft()
            return transfer, at, stop

    def close(self) -> None:
        if self.owner != os.getpid():
            return
        with self.changed:
            self.closed = True
            for transfer in (*self.urgent, *self.guesses):
                transfer.error = OffloadError(
                    "the files of this model were closed while it read; load it again"
                )
                transfer.pending.clear()
            self.urgent.clear()
            self.guesses.clear()
            self.changed.notify_all()
