"""Calls to the operating system that fail: the n-th that touches files below a folder, and on a full disk all after it.

Python's own files are replaced by those of `_pyio`, which is Python too, so that what they do is seen.
"""

import _pyio
import builtins
import errno
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEEDS_ROOM = (
    "open",
    "mkdir",
    "write",
    "pwrite",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
    "replace",
)
"""Calls that a full disk refuses; files are opened to be made."""
CHANGES = (*NEEDS_ROOM, "truncate", "unlink", "rmdir")
READS = ("open", "read", "pread")
CREATES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Fault:
    """The `number`-th call that touches a file below `folder` fails; 0 = none does, they are counted only.

    error: errno.ENOSPC, EIO    reads: of the calls that read, not of those that change something
    """

    folder: Path
    number: int
    error: int = errno.ENOSPC
    reads: bool = False
    seen: int = field(init=False, default=0)

    def install(self) -> None:
        """In this process, for good."""
        builtins.open = io.open = _pyio.open  # type: ignore[assignment]
        full = self.error == errno.ENOSPC
        for name in READS if self.reads else NEEDS_ROOM if full else CHANGES:
            setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._counts(name, args, kwargs):
                self.seen += 1
                if self.seen == self.number or (0 < self.number < self.seen and self.error == errno.ENOSPC):
                    raise OSError(self.error, os.strerror(self.error), *args[:1])
            return call(*args, **kwargs)

        return wrapped

    def _counts(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "open" and bool(args[1] & CREATES) == self.reads:
            return False
        where = args[0] if kwargs.get("dir_fd") is None else kwargs["dir_fd"]
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.path.abspath(where)
        return path.startswith(str(self.folder))
