"""Memory of the emulated GPU: global, with bounds, and shared, with bounds and the order of accesses."""

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .program import SHARED_BASE

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]
NOBODY, SEVERAL = -1, -2


class EmulationError(Exception):
    """The code does what no GPU allows, or what this emulator does not know."""


class GlobalMemory:
    """Ranges of the host's memory, which stand for buffers on the GPU."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[str, Bytes]] = {}

    def add(self, name: str, start: int, size: int) -> None:
        """Let kernels use `size` bytes of this process from address `start` on."""
        if size:
            self._ranges[start] = (name, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)))

    def load(self, at: Addresses, width: int) -> Bytes:
        """at [n] -> bytes [n, width]. Raises EmulationError outside of all ranges and off `width`."""
        found = np.empty((len(at), width), np.uint8)
        self._each(at, width, lambda part, data, index: found.__setitem__(part, data[index]))
        return found

    def store(self, at: Addresses, values: Bytes) -> None:
        """values [n, width] to at [n]. Raises EmulationError like `load`."""
        self._each(at, values.shape[1], lambda part, data, index: data.__setitem__(index, values[part]))

    def _each(
        self, at: Addresses, width: int, use: Callable[[NDArray[np.bool_], Bytes, NDArray[np.int64]], None]
    ) -> None:
        if (at % width).any():
            raise EmulationError(f"{width} bytes of global memory at no multiple of {width}")
        left = np.ones(len(at), bool)
        for start, (_, data) in self._ranges.items():
            inside = left & (at >= start) & (at + width <= start + len(data))
            if inside.any():
                use(inside, data, (at[inside] - start)[:, None] + np.arange(width))
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
