"""Memory in pages of 2 MB, where the system has them: what streams through weights misses its table of pages less."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def prefer_huge_pages(pages: mmap.mmap) -> None:
    """Ask for them, before the first byte is touched; nothing happens where there are none.

    Of a file they are what the cache of the file system is read into from then on (Linux: ext4 since 6.16, XFS since
    5.18); what lies there already stays as it is.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not all kernels have them
            pages.madvise(mmap.MADV_HUGEPAGE)


def private_memory(nbytes: int) -> mmap.mmap:
    """So many bytes of this process, in huge pages. Raises OSError when there is no such memory."""
    # Private: a shared mapping would be written to by both after a fork.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_huge_pages(pages)
    return pages


def empty(nbytes: int) -> Tensor:
    """[nbytes] uint8 in such memory, zeros until they are written; at least one byte."""
    return torch.frombuffer(private_memory(nbytes), dtype=torch.uint8)


def ones(nbytes: int) -> Tensor:
    """The same, all of it touched: what a probe of the memory reads."""
    return empty(nbytes).fill_(1)
