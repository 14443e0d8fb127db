"""Writing to disk: whole files or none, all of a buffer, one run at a time, and what to tell when there is no room."""

import errno
import glob
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from trilobite.errors import CheckpointError, DestinationError, TrilobiteError

READ = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".safetensors", ".md"})
"""Suffixes of the files of a checkpoint that somebody reads, be it transformers."""


def check_regular(folder: Path) -> None:
    """Raise CheckpointError for what nobody can read to its end: a pipe or a device in the place of a file."""
    for path in sorted(folder.iterdir()):
        odd = path.exists() and not path.is_file() and not path.is_dir()
        if odd and path.suffix in READ and not path.name.startswith("."):
            raise CheckpointError(f"{path}: a pipe or a device, expected a file; copy the checkpoint again")


def write_at(handle: int, data: memoryview, offset: int) -> None:
    """All of a buffer to a place in a file, however little the system takes at a time."""
    while data:
        written = os.pwrite(handle, data[: 1 << 28], offset)
        data, offset = data[written:], offset + written


def write_whole(path: Path, data: bytes, *, aside: Path | None = None) -> None:
    """Write a small file so that it is either the old one or whole, after a power failure too.

    A link stays, and what it names is written. Devices, pipes and the standard streams are written into.
    aside: a folder of the same disk for what a kill leaves behind, default that of the file; the next write removes it
    """
    if stream := _stream(path):
        with stream:
            stream.write(data)
        return
    if path.is_symlink():
        path, aside = path.resolve(), None
    folder = aside or path.parent
    for left in folder.glob(f".{glob.escape(path.name)}.????????.tmp"):
        with suppress(OSError), left.open("rb") as file:
            if _held(file):  # else somebody writes it now
                left.unlink()
    temporary = folder / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with temporary.open("xb") as file:
            _held(file)
            if os.fstat(file.fileno()).st_nlink:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
                return
    finally:
        temporary.unlink(missing_ok=True)
    write_whole(path, data, aside=aside)  # another run took it for a dead one's before it was held


def _held(file: IO[bytes]) -> bool:
    """Whether this process has a file for itself now; no where another one has, or where there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ImportError):
        return False
    return True


def _stream(path: Path) -> IO[bytes] | None:
    """What cannot be replaced: no regular file, or the one that is standard output or standard error already."""
    if not path.exists():
        return None
    found = path.stat()
    for number in (1, 2):
        with suppress(OSError):  # closed
            if os.path.samestat(found, os.fstat(number)):
                return os.fdopen(os.dup(number), "wb")
    return None if stat.S_ISREG(found.st_mode) else path.open("wb")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, for as long as this process lives; raises DestinationError while one is in."""
    import fcntl  # Windows lacks it, and can read what needs no lock

    with (folder / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise DestinationError(
                f"{folder}: another run is writing here; wait for it to end, or stop it"
            ) from e
        except OSError:
            pass  # a file system without locks
        yield


@contextmanager
def explained(dst: Path) -> Iterator[None]:
    """Turn errors of the operating system into one line that says what survives."""
    try:
        yield
    except TrilobiteError:
        raise
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DestinationError(
                f"{dst}: the disk is full; nothing is lost: free some space and run the same command again"
            ) from e
        raise DestinationError(f"{dst}: cannot write: {e.strerror or e}; choose another destination") from e
