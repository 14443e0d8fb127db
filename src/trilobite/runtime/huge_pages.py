"""Memory in pages of 2 MB, where the system has them: what streams through weights misses its table of pages less."""

import mmap
from contextlib import suppress


def prefer_huge_pages(pages: mmap.mmap) -> None:
    """Ask for them, before the first byte is touched; nothing happens where there are none.

    Of a file they are what the cache of the file system is read into from then on (Linux: ext4 since 6.16, XFS since
    5.18); what lies there already stays as it is.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not all kernels have them
            pages.madvise(mmap.MADV_HUGEPAGE)
