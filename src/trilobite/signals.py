"""Ctrl-C and SIGTERM: one line and the end, at any moment, from before the first slow import on.

The handler ends the process itself. An exception would be lost where it meets imports, destructors and callbacks, and
threads in the middle of a matrix would be waited for. What is being written survives it as it survives a kill.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # as in trilobite/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
SHOW_CURSOR = "\x1b[?25h"

_state: Callable[[], str] | None = None


def answer_signals() -> None:
    """Answer both from now on, where they are not ignored (as after `nohup`, or in a script's background)."""
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def tell_state(state: Callable[[], str] | None) -> None:
    """What the last line says of the work that is going on; None = nothing."""
    global _state
    _state = state


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    line = WORDS[signal.Signals(number)] + (f": {_state()}" if _state else "") + "\n"
    try:  # noqa: SIM105 - contextlib takes long to import
        sys.stdout.flush()
    except (OSError, RuntimeError, ValueError, AttributeError):
        pass  # nobody reads it, the signal met a print, or it is closed
    try:
        os.write(
            2, (("\n" + SHOW_CURSOR if os.isatty(2) else "") + line).encode()
        )  # a print may be under way
    finally:
        os._exit(128 + number)
