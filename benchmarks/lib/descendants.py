"""What the processes that this one has started take of the machine, all their threads together."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Taken:
    """Until a moment. at: its time    seconds: of cores    forced: switches of threads that had not finished"""

    at: float
    seconds: float
    forced: int

    def since(self, before: "Taken") -> tuple[float, float]:
        """Cores that worked, and forced switches per second, between two moments."""
        time_between = self.at - before.at
        return (self.seconds - before.seconds) / time_between, (self.forced - before.forced) / time_between


def taken() -> Taken:
    """By all threads that live now, those of children's children included. Linux alone tells."""
    seconds, forced = 0.0, 0
    for process in _descendants():
        for task in (PROC / str(process) / "task").glob("*"):
            try:
                times = (task / "stat").read_text().rpartition(")")[2].split()
                status = (task / "status").read_text()
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            seconds += (int(times[11]) + int(times[12])) / TICKS
            forced += int(status.rpartition("nonvoluntary_ctxt_switches:")[2])
    return Taken(time.perf_counter(), seconds, forced)


def _descendants() -> Iterator[int]:
    wanted, parents = [os.getpid()], {}
    for folder in PROC.glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    while wanted:
        parent = wanted.pop()
        for process, its_parent in parents.items():
            if its_parent == parent:
                wanted.append(process)
                yield process
