"""Reads mapped files before anybody asks for their pages: a disk gives a file faster from its first byte to its last."""

import ctypes
import sys
import weakref
from collections.abc import Sequence
from threading import Thread
from typing import Any

from trilobite.runtime.offload.plan import available_bytes

POPULATE_READ = 22
"""Linux's advice (since 5.14) to read and map pages now, for which Python has no name."""
CHUNK = 16 << 20
"""Bytes a call, which nothing interrupts."""


def read_ahead(files: Sequence[Any]) -> Thread | None:
    """Begin, where memory has room for all files; they are read in order for as long as somebody else holds them.

    files: arrays of uint8, mapped    returns: the thread that reads; None where there is none
    """
    room = available_bytes()
    if sys.platform != "linux" or room is None or sum(len(file) for file in files) > room:
        return None
    reader = Thread(target=_read, args=([weakref.ref(file) for file in files],), daemon=True)
    reader.start()
    return reader


def _read(files: list["weakref.ref[Any]"]) -> None:
    # By ctypes, which lets others run meanwhile; `mmap.madvise` does not.
    advise = ctypes.CDLL(None).madvise
    for file in files:
        first = 0
        while size := _read_part(file(), first, advise):
            first += size


def _read_part(file: Any, first: int, advise: Any) -> int:
    """Bytes that were read: 0 behind the end, of what nobody holds, and where the system does not do it."""
    size = 0 if file is None else min(CHUNK, len(file) - first)
    if size and advise(ctypes.c_void_p(file.ctypes.data + first), ctypes.c_size_t(size), POPULATE_READ):
        return 0
    return size
