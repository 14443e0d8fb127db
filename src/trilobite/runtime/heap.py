"""Memory that an operator frees is the next one's, not the kernel's.

Between the products of a prompt, torch makes tensors of some megabytes and frees them again. The C library gives such
memory back, and the kernel clears every page of it for the next tensor: a norm over 512 tokens took up to four times as
long.
"""

import ctypes
import sys

_TRIM, _MAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h."""
KEPT = 128 * 2**20
"""Bytes that stay with the process at most."""
LARGEST = 32 * 2**20
"""Bytes of a tensor that may: the most that every glibc takes."""


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, within bounds; False where its C library is not glibc."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MAP, LARGEST)) and bool(mallopt(_TRIM, KEPT))
