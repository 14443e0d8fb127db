"""Memory of the emulated GPU: global, with bounds, and shared, with bounds and the order of accesses."""

import ctypes
from collections.abc import Callable, Set

import numpy as np
from numpy.typing import NDArray

from .program import SHARED_BASE

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]
NOBODY, SEVERAL = -1, -2


class EmulationError(Exception):
    """The code does what no GPU allows, or what this emulator does not know."""


class GlobalMemory:
    """Ranges of the host's memory, which stand for buffers on the GPU, as one launch sees them.

    A launch that begins early finds the launches before it at work: until a program of it has waited, it writes nothing,
    and reads nothing that these write. Every program waits, so that who waits for this launch has waited for those, too.
    """

    def __init__(self, *, early: bool = False, unsettled: Set[int] = frozenset()) -> None:
        """unsettled: where the buffers begin that launches wrote since one last waited for all before it."""
        self._ranges: dict[int, tuple[str, Bytes]] = {}
        self._early, self._unsettled = early, unsettled
        self._waited = not early
        self.written: set[int] = set()

    def wait(self) -> None:
        """All that launches before this one write is there, for the rest of this program."""
        self._waited = True

    def end_program(self) -> None:
        """The next program begins. Raises EmulationError where this one has not waited."""
        if not self._waited:
            raise EmulationError("a program of an early launch ends and has not waited for the launch before")
        self._waited = not self._early

    def add(self, name: str, start: int, size: int) -> None:
        """Let kernels use `size` bytes of this process from address `start` on."""
        if size:
            self._ranges[start] = (name, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)))

    def load(self, at: Addresses, width: int) -> Bytes:
        """at [n] -> bytes [n, width]. Raises EmulationError outside of all ranges and off `width`."""
        found = np.empty((len(at), width), np.uint8)

        def read(start: int, part: NDArray[np.bool_], data: Bytes, index: NDArray[np.int64]) -> None:
            if not self._waited and start in self._unsettled:
                raise EmulationError("race: a read of what a launch before writes, which nothing waited for")
            found[part] = data[index]

        self._each(at, width, read)
        return found

    def store(self, at: Addresses, values: Bytes) -> None:
        """values [n, width] to at [n]. Raises EmulationError like `load`."""

        def write(start: int, part: NDArray[np.bool_], data: Bytes, index: NDArray[np.int64]) -> None:
            if not self._waited:
                raise EmulationError("race: a write while launches before are at work")
            data[index] = values[part]
            self.written.add(start)

        self._each(at, values.shape[1], write)

    def _each(
        self,
        at: Addresses,
        width: int,
        use: Callable[[int, NDArray[np.bool_], Bytes, NDArray[np.int64]], None],
    ) -> None:
        if (at % width).any():
            raise EmulationError(f"{width} bytes of global memory at no multiple of {width}")
        left = np.ones(len(at), bool)
        for start, (_, data) in self._ranges.items():
            inside = left & (at >= start) & (at + width <= start + len(data))
            if inside.any():
                use(start, inside, data, (at[inside] - start)[:, None] + np.arange(width))
                left &= ~inside
                if not left.any():
                    return
        if left.any():
            lost = int(at[left][0])
            near = [f"{name}{lost - start:+d} of {len(d)}" for start, (name, d) in self._ranges.items()]
            raise EmulationError(f"{width} bytes outside of global memory: " + ", ".join(near))


class SharedMemory:
    """Shared memory of one block, byte by byte: its value, and who touched it since the last barrier.

    A race is an access to what another warp wrote, or a write to what another warp read, without a barrier in between;
    within a warp threads are in step. Copies and products that run asynchronously hold their bytes until they are
    waited for. Every violation raises EmulationError.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._values = np.full(size, 0xFF, np.uint8)
        self._written = np.zeros(size, bool)
        self._writer = np.full(size, NOBODY, np.int16)
        self._reader = np.full(size, NOBODY, np.int16)
        self._arriving = np.zeros(size, np.int16)
        self._in_use = np.zeros(size, np.int16)

    def barrier(self) -> None:
        """All threads met: whatever was written, all may read."""
        self._writer.fill(NOBODY)
        self._reader.fill(NOBODY)

    def load(self, at: Addresses, width: int, warps: NDArray[np.int16]) -> Bytes:
        """at [n], of these warps [n] -> bytes [n, width]."""
        index = self._index(at, width, width)
        self._check_readable(index)
        if _others(self._writer[index], warps[:, None]).any():
            raise EmulationError("race: a read of what another warp wrote, without a barrier")
        self._read(index, warps)
        return self._values[index]

    def store(self, at: Addresses, values: Bytes, warps: NDArray[np.int16]) -> None:
        """values [n, width] to at [n], by these warps [n]."""
        index = self._index(at, values.shape[1], values.shape[1])
        self._check_writable(index, warps)
        both = _others(self._writer[index], warps[:, None])
        if (both & (self._values[index] != values)).any():
            raise EmulationError("race: two warps write different values to one place")
        if self._arriving[index].any():
            raise EmulationError("a write to where an asynchronous copy may still write")
        self._put(index, values, warps)

    def begin_copy(self, at: Addresses, width: int, warps: NDArray[np.int16]) -> None:
        """From now on an asynchronous copy may write here at any time."""
        index = self._index(at, width, width)
        self._check_writable(index, warps)
        if _others(self._writer[index], warps[:, None]).any():
            raise EmulationError("race: an asynchronous copy to where another warp wrote, without a barrier")
        np.add.at(self._arriving, index, 1)

    def end_copy(self, at: Addresses, values: Bytes, warps: NDArray[np.int16]) -> None:
        """The warps waited for the copy that began before."""
        index = self._index(at, values.shape[1], values.shape[1])
        np.subtract.at(self._arriving, index, 1)
        self._put(index, values, warps)

    def begin_use(self, at: Addresses, width: int) -> None:
        """From now on a tensor core reads `width` bytes at each of these places, past all warps."""
        index = self._index(at, width, 1)
        self._check_readable(index)
        if (self._writer[index] != NOBODY).any():
            raise EmulationError("race: a tensor core reads what was written, without a barrier")
        np.add.at(self._in_use, index, 1)

    def end_use(self, at: Addresses, width: int) -> Bytes:
        """The tensor core is done. returns: what it read, [n, width]."""
        index = self._index(at, width, 1)
        np.subtract.at(self._in_use, index, 1)
        return self._values[index]

    def _index(self, at: Addresses, width: int, multiple: int) -> NDArray[np.int64]:
        if (at % multiple).any():
            raise EmulationError(f"{width} bytes of shared memory at no multiple of {multiple}")
        first = at - SHARED_BASE
        if (first < 0).any() or (first + width > self.size).any():
            raise EmulationError(
                f"bytes {first.min()} to {first.max() + width} of {self.size} of shared memory"
            )
        return first[:, None] + np.arange(width)

    def _check_readable(self, index: NDArray[np.int64]) -> None:
        if self._arriving[index].any():
            raise EmulationError("a read of what an asynchronous copy is still to write")
        if not self._written[index].all():
            raise EmulationError("a read of shared memory that nobody wrote")

    def _check_writable(self, index: NDArray[np.int64], warps: NDArray[np.int16]) -> None:
        if _others(self._reader[index], warps[:, None]).any():
            raise EmulationError("race: a write to what another warp read, without a barrier")
        if self._in_use[index].any():
            raise EmulationError("a write to what a tensor core may still read")

    def _read(self, index: NDArray[np.int64], warps: NDArray[np.int16]) -> None:
        for warp in np.unique(warps):  # in turn, as several may read one byte
            part = index[warps == warp]
            self._reader[part] = np.where(_others(self._reader[part], warp), SEVERAL, warp)

    def _put(self, index: NDArray[np.int64], values: Bytes, warps: NDArray[np.int16]) -> None:
        self._values[index] = values
        self._written[index] = True
        self._writer[index] = warps[:, None]


def _others(who: NDArray[np.int16], warps: NDArray[np.int16]) -> NDArray[np.bool_]:
    return (who != NOBODY) & (who != warps)
