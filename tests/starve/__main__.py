"""Let every command lack room, a disk that works, memory, threads: the last line is JSON.

PYTHONPATH=tests python -m starve            # every 7th call, in all tasks
PYTHONPATH=tests python -m starve --every 1 --only rtn3
"""

import argparse
import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from kills.tasks import TASKS, Task, prepare

from starve.cases import Starver
from starve.shortages import Disk, FailingCall, Memory, Shortage, Threads

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("--every", type=int, default=7, help="of the calls that may fail, each n-th alone")
parser.add_argument("--only", choices=[task.name for task in TASKS], help="this task alone")

KB = 1024
SIZES = [0, 4 * KB, 16 * KB, 40 * KB, 64 * KB, *(n * KB for n in range(96, 1280, 64))]
INODES = range(14)
MEMORY = [0, *(4**n * 64 * KB for n in range(1, 8))]


def shortages(starver: Starver, task: Task, every: int) -> Iterator[Shortage]:
    """All that a task is to lack."""
    for error in (errno.ENOSPC, errno.EIO):
        for number in range(1, starver.calls(task, error) + 1, every):
            yield FailingCall(number, error)
    for number in range(1, starver.calls(task, errno.EIO, reads=True) + 1, every):
        yield FailingCall(number, errno.EIO, starver.made)
    for size in SIZES:
        yield Disk(size)
    for inodes in INODES:
        yield Disk(inodes=inodes)
    yield Disk(read_only=True)
    for more in MEMORY:
        yield Memory(more)
    yield Threads()


def main() -> None:
    """Exit status 1 where a case ended otherwise than it should."""
    args = parser.parse_args()
    tolls = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder) / "made")
        starver = Starver(Path(folder) / "made", Path(folder) / "work")
        for task in [task for task in TASKS if args.only in (None, task.name)]:
            began, cases, wrong, enough = time.monotonic(), 0, 0, 0
            for shortage in shortages(starver, task, args.every):
                found = starver.run(task, shortage)
                cases, enough = cases + 1, enough + (found == "enough")
                if found not in ("", "enough"):
                    wrong += 1
                    print(f"{task.name}, {shortage}: {found}\n", flush=True)
            toll = {"task": task.name, "cases": cases, "enough": enough, "wrong": wrong}
            tolls.append(toll)
            print(toll, f"{time.monotonic() - began:.0f} s", flush=True)
    wrong = sum(toll["wrong"] for toll in tolls)
    print(json.dumps({"cases": sum(toll["cases"] for toll in tolls), "wrong": wrong, "tasks": tolls}))
    sys.exit(1 if wrong else 0)


main()
