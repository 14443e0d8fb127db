"""What a run can lack. `around`: of the processes of a case; `strike`: of the first; `relieve`: before the second."""

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starve.faults import Fault

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
READ_ONLY, REMOUNT, PRIVATE = 1, 32, 0x44000
"""Of <sched.h> and <sys/mount.h>; PRIVATE is MS_REC | MS_PRIVATE."""
PLENTY = "size=2g,nr_inodes=100000"


class Shortage(Protocol):
    """One way of lacking something. out: the folder that the command writes into."""

    def around(self, out: Path, fill: Callable[[], None]) -> None:
        """Prepare the place. fill: puts there what the command starts from."""

    def strike(self, out: Path) -> None:
        """Called in the command's process."""

    def relieve(self, out: Path) -> None:
        """There is enough now."""


@dataclass(frozen=True)
class FailingCall:
    """The n-th call fails; see `faults.Fault`. made: reads of what lies there fail, not of what is written."""

    number: int
    error: int = errno.ENOSPC
    made: Path | None = None

    def around(self, out: Path, fill: Callable[[], None]) -> None:
        fill()

    def strike(self, out: Path) -> None:
        Fault(self.made or out, self.number, self.error, reads=self.made is not None).install()

    def relieve(self, out: Path) -> None:
        pass


@dataclass(frozen=True)
class Disk:
    """A disk in memory, for the processes of the case alone, with room for so much more than what they begin with."""

    more: int = 2**30
    inodes: int = 10_000
    read_only: bool = False

    def around(self, out: Path, fill: Callable[[], None]) -> None:
        own_mounts()
        _mount(out, PLENTY)
        fill()
        now = os.statvfs(out)
        size = (now.f_blocks - now.f_bfree) * now.f_frsize + self.more
        inodes = now.f_files - now.f_ffree + self.inodes
        _mount(out, f"size={max(1, size)},nr_inodes={inodes}", REMOUNT | (READ_ONLY if self.read_only else 0))

    def strike(self, out: Path) -> None:
        pass

    def relieve(self, out: Path) -> None:
        _mount(out, PLENTY, REMOUNT)


@dataclass(frozen=True)
class Memory:
    """So many bytes of addresses more than the process has when it begins."""

    more: int

    def around(self, out: Path, fill: Callable[[], None]) -> None:
        fill()

    def strike(self, out: Path) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + self.more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def relieve(self, out: Path) -> None:
        pass


@dataclass(frozen=True)
class Threads:
    """No thread can be started any more."""

    def around(self, out: Path, fill: Callable[[], None]) -> None:
        fill()

    def strike(self, out: Path) -> None:
        import _thread
        import threading

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")  # as Python says it

        _thread.start_new_thread = refuse  # type: ignore[assignment]
        threading._start_new_thread = refuse  # type: ignore[attr-defined]

    def relieve(self, out: Path) -> None:
        pass


def own_mounts() -> None:
    """Let mounts of this process be seen by itself and its children alone. Raises OSError where that is forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_MOUNTS | (NEW_USER if user else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(b"none", b"/", None, PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mount")


def _mount(where: Path, options: str, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(where), b"tmpfs", flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {options}")
