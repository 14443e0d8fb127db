"""Writing to disk: whole files or none, all of a buffer, and what to tell the user when there is no room."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trilobite.errors import DestinationError


def write_at(handle: int, data: memoryview, at: int) -> None:
    """All of a buffer to a place in a file, however little the system takes at a time."""
    while data:
        written = os.pwrite(handle, data[: 1 << 28], at)
        data, at = data[written:], at + written


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that it is either absent or whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


@contextmanager
def explained(dst: Path) -> Iterator[None]:
    """Turn errors of the operating system into one line that says what survives."""
    try:
        yield
    except DestinationError:
        raise
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DestinationError(
                f"{dst}: the disk is full; nothing is lost: free some space and run the same command again"
            ) from e
        raise DestinationError(f"{dst}: cannot write: {e.strerror or e}; choose another destination") from e
