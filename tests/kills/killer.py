"""Starts a task in a process of its own, kills it, starts it again, until it ends; compares what it wrote."""

import json
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.runs import digests

from kills.tasks import Task
from trilobite import cli
from trilobite.checkpoint.evaluation import EVALUATION
from trilobite.checkpoint.packed import PARTIAL

LATEST = 1.2
"""Moments are drawn from the time that an undisturbed run takes, and a little more: it may take longer now."""
LONGEST = 900.0
"""Seconds, on a machine with much else to do."""


@dataclass
class Toll:
    """Of one task. seconds: of a run that was let be    wrong: what was found, in words"""

    task: str
    seconds: float
    kills: int = 0
    finished: int = 0
    wrong: list[str] = field(default_factory=list)


def command(*arguments: str) -> None:
    """A command line in this process; raises SystemExit."""
    sys.argv = ["trilobite", *arguments]
    cli.main()


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
        out = self._place(task)
        began = time.monotonic()
        status, said = self._end(self._start(task, out), out)
        seconds = time.monotonic() - began
        assert status == 0, f"{task.name}, let be: status {status}: {said}"
        assert (out / task.result).exists(), f"{task.name}, let be: no {task.result}: {said}"
        return _digests(out), seconds

    def _one_result(self, task: Task, toll: Toll, kills: int, expected: dict[str, str]) -> None:
        """Killed again and again, until a run ends by itself, or all kills are spent."""
        out = self._place(task)
        while True:
            child = self._start(task, out)
            if toll.kills < kills:
                time.sleep(self.chance.uniform(0, toll.seconds * LATEST))
                os.kill(child, signal.SIGKILL)
            status, said = self._end(child, out)
            if os.WIFSIGNALED(status):
                toll.kills += 1
                if _looks_whole(task, out) and _of_result(task, _digests(out)) != _of_result(task, expected):
                    toll.wrong.append(f"kill {toll.kills}: it looks whole and differs")
                    return
                continue
            if status:
                toll.wrong.append(
                    f"after kill {toll.kills}: status {os.waitstatus_to_exitcode(status)}: {said}"
                )
            elif _digests(out) != expected:
                found = _digests(out)
                names = [n for n in {*found, *expected} if found.get(n) != expected.get(n)]
                toll.wrong.append(f"after kill {toll.kills}: {', '.join(sorted(names))}")
            toll.finished += 1
            return

    def _place(self, task: Task) -> Path:
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        if task.starts_from:
            shutil.copytree(self.made / task.starts_from, out / task.result)
        return out

    def _start(self, task: Task, out: Path) -> int:
        if child := os.fork():
            return child
        status = 99
        try:
            said = os.open(out.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            null = os.open(os.devnull, os.O_RDWR)
            for number, to in enumerate((null, null, said)):
                os.dup2(to, number)
            command(*task.command_line(self.made, out))
            status = 0
        except SystemExit as e:
            status = int(e.code or 0)
        finally:
            os._exit(status)

    def _end(self, child: int, out: Path) -> tuple[int, str]:
        """Its wait status, and the last line that it said."""
        until = time.monotonic() + LONGEST
        while True:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                break
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                raise TimeoutError(f"a run that was let be takes more than {LONGEST} s")
            time.sleep(0.002)
        lines = (out.parent / "said.txt").read_text(errors="replace").strip().splitlines()
        return status, lines[-1] if lines else ""


def _digests(out: Path) -> dict[str, str]:
    """sha256 of every file, of what `eval` measured without the time that it took."""
    found = digests(out)
    for name in [n for n in found if Path(n).name == EVALUATION]:
        measured = json.loads((out / name).read_bytes())["measured"]
        found[name] = str([{k: v for k, v in entry.items() if k != "seconds"} for entry in measured])
    return found


def _looks_whole(task: Task, out: Path) -> bool:
    """Whether somebody who looks at it takes the result for a finished one."""
    path = out / task.result
    if task.starts_from:
        return (path / EVALUATION).exists()
    if path.suffix:
        return path.exists()
    return (path / "config.json").exists() and not (path / PARTIAL).exists()


def _of_result(task: Task, found: dict[str, str]) -> dict[str, str]:
    """The files of the result that somebody sees, without what an interrupted run keeps beside them."""
    return {
        name: digest
        for name, digest in found.items()
        if name.partition("/")[0] == task.result and not Path(name).name.startswith(".")
    }
