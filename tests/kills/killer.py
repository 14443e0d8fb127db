"""Starts a task in a process of its own, kills it, starts it again, until it ends; compares what it wrote."""

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.children import command, end, last_line, results, start

from kills.tasks import Task

LATEST = 1.2
"""Moments are drawn from the time that an undisturbed run takes, and a little more: it may take longer now."""


@dataclass
class Toll:
    """Of one task. seconds: of a run that was let be    wrong: what was found, in words"""

    task: str
    seconds: float
    kills: int = 0
    finished: int = 0
    wrong: list[str] = field(default_factory=list)


class Killer:
    """Works on what `prepare` made, in a folder of its own."""

    def __init__(self, made: Path, work: Path, seed: int = 0) -> None:
        """Nothing is run yet."""
        self.made, self.work, self.chance = made, work, random.Random(seed)

    def run(self, task: Task, kills: int) -> Toll:
        """Kill a task so many times; every run that comes to its end is compared with one that was let be."""
        expected, seconds = self._undisturbed(task)
        toll = Toll(task.name, round(seconds, 2))
        while toll.kills < kills and not toll.wrong:
            self._one_result(task, toll, kills, expected)
        return toll

    def _undisturbed(self, task: Task) -> tuple[dict[str, str], float]:
        out = task.place(self.made, self.work)
        began = time.monotonic()
        status, said = self._end(self._start(task, out), out)
        seconds = time.monotonic() - began
        assert status == 0, f"{task.name}, let be: status {status}: {said}"
        assert (out / task.result).exists(), f"{task.name}, let be: no {task.result}: {said}"
        return results(out), seconds

    def _one_result(self, task: Task, toll: Toll, kills: int, expected: dict[str, str]) -> None:
        """Killed again and again, until a run ends by itself, or all kills are spent."""
        out = task.place(self.made, self.work)
        while True:
            child = self._start(task, out)
            if toll.kills < kills:
                time.sleep(self.chance.uniform(0, toll.seconds * LATEST))
                os.kill(child, signal.SIGKILL)
            status, said = self._end(child, out)
            if os.WIFSIGNALED(status):
                toll.kills += 1
                if task.looks_whole(out) and task.of_result(results(out)) != task.of_result(expected):
                    toll.wrong.append(f"kill {toll.kills}: it looks whole and differs")
                    return
                continue
            if status:
                toll.wrong.append(
                    f"after kill {toll.kills}: status {os.waitstatus_to_exitcode(status)}: {said}"
                )
            elif results(out) != expected:
                found = results(out)
                names = [n for n in {*found, *expected} if found.get(n) != expected.get(n)]
                toll.wrong.append(f"after kill {toll.kills}: {', '.join(sorted(names))}")
            toll.finished += 1
            return

    def _start(self, task: Task, out: Path) -> int:
        return start(command, task.command_line(self.made, out), out.parent / "said.txt")

    def _end(self, child: int, out: Path) -> tuple[int, str]:
        """Its wait status, and the last line that it said."""
        return end(child), last_line(out.parent / "said.txt")
