"""What loading is measured beside: `trilobite.load` without its advice on pages, and without reading ahead."""

import importlib
from typing import Any


def in_small_pages() -> None:
    """From now on, files are mapped without advice, in this process."""
    _leave_out("trilobite.runtime.mapped", "prefer_huge_pages")


def without_reading_ahead() -> None:
    """From now on, pages come in when somebody asks for them."""
    _leave_out("trilobite.runtime.load", "read_ahead")


def _leave_out(module: str, name: str) -> None:
    def nothing(_: Any) -> None:
        pass

    setattr(importlib.import_module(module), name, nothing)
