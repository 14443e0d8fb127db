"""Standard streams: missing ones, readers that go away, and bytes that are no text; the line of an error."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from trilobite.cli.console import note
from trilobite.errors import DestinationError


def fail(message: str) -> NoReturn:
    """End with one line on standard error and status 1."""
    note(f"error: {' '.join(message.split())}")
    sys.exit(1)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Make the streams fit to use, and see what was printed through to its reader.

    Input that is not in the locale's encoding comes as surrogates, which `generate` and `chat` refuse; what the output
    cannot encode becomes a question mark. Raises DestinationError where nobody can take what is printed.
    """
    _fill_closed()
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as e:
        raise _unread() from e
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # typer says nothing, and exits
            raise _unread() from e
        try:
            sys.stdout.flush()
        except BrokenPipeError as broken:
            raise _unread() from broken
        raise


def _unread() -> DestinationError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes when it ends
    return DestinationError(
        "standard output was closed before all was printed; keep its reader until the end"
    )


def _fill_closed() -> None:
    """Open /dev/null in the place of closed streams: no file of ours may get a number that others print to."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - open as long as the process
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w")  # noqa: SIM115
        raise DestinationError("standard output is closed; send it to a file, or to /dev/null")
