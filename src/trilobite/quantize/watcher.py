"""Who looks on at a long run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _nobody(*_: Any) -> None:
    """Where nobody looks on."""


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """progress: (what, done, total) of a long step    note: a line for the user to read."""

    progress: Callable[[str, int, int], None] = _nobody
    note: Callable[[str], None] = _nobody


SILENT = Watcher()
