"""What weights in huge pages are measured beside: `trilobite.load` as it was before it asked for them."""

import importlib
import mmap


def in_small_pages() -> None:
    """From now on, files are mapped without advice, in this process."""

    def nothing(pages: mmap.mmap) -> None:
        pass

    importlib.import_module("trilobite.runtime.load").prefer_huge_pages = nothing  # type: ignore[attr-defined]
