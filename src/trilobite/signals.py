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
    from typing import Any, NoReturn

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
GRACE = 0.3
"""Seconds that the main thread has to answer before another one does."""
SHOW_CURSOR = "\x1b[?25h"

_state: Callable[[], str] | None = None
_terminal: list[Any] | None = None


def answer_signals() -> None:
    """Answer both from now on, where they are not ignored (as after `nohup`, or in a script's background)."""
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def tell_state(state: Callable[[], str] | None) -> None:
    """What the last line says of the work that is going on; None = nothing."""
    global _state
    _state = state


def keep_terminal() -> None:
    """Give the terminal back as it is now, whatever an editor of lines makes of it until a signal comes."""
    global _terminal
    import termios  # where there is no such module, there is no editor of lines either

    _terminal = termios.tcgetattr(0)


def answer_beside_an_editor() -> None:
    """Answer SIGTERM from a thread where this one does not.

    An editor of lines looks whether a signal came, and then waits for a key: one that comes in between wakes nobody.
    """
    import threading

    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    threading.Thread(target=_answer_late, args=(read,), daemon=True).start()


def _answer_late(read: int) -> None:
    import time

    while number := os.read(read, 1):
        if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _stop:
            time.sleep(GRACE)
            _stop(signal.SIGTERM, None)


class Patience:
    """A context in which the first Ctrl-C is only noted, in `asked`; the second ends the process as ever."""

    def __init__(self, *, wanted: bool = True) -> None:
        """Nobody has asked yet. wanted: else Ctrl-C stays what it is."""
        self.wanted, self.asked = wanted, False

    def __enter__(self) -> Patience:
        """Take Ctrl-C over, unless it is ignored."""
        self._before = signal.getsignal(signal.SIGINT)
        if self.wanted and self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            _stop(number, frame)
        self.asked = True


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
        if _terminal is not None:
            import termios

            termios.tcsetattr(0, termios.TCSANOW, _terminal)
    finally:
        os._exit(128 + number)
