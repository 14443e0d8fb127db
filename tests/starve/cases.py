"""One task that lacks something, then does not any more: it says so in one line, and ends as if nothing had been."""

import os
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kills.tasks import Task
from support.children import command, end, results, start

from starve.faults import Fault
from starve.shortages import Shortage


@dataclass
class Starver:
    """Runs cases on what `kills.tasks.prepare` made, in a folder of its own."""

    made: Path
    work: Path
    _expected: dict[str, dict[str, str]] = field(init=False, default_factory=dict)

    def calls(self, task: Task, error: int, *, reads: bool = False) -> int:
        """How many calls of a run could fail."""
        out, count = task.place(self.made, self.work), self.work / "count.txt"
        fault = Fault(self.made if reads else out, 0, error, reads)

        def counted(*arguments: str) -> None:
            fault.install()
            try:
                command(*arguments)
            finally:
                count.write_text(str(fault.seen))

        assert end(start(counted, task.command_line(self.made, out), self.work / "said.txt")) == 0
        return int(count.read_text())

    def run(self, task: Task, shortage: Shortage) -> str:
        """What is wrong with how a case ended, empty where nothing is; `enough` where it lacked nothing after all."""
        expected = self.expected(task)
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return _enclosed(lambda: self._case(task, shortage, out, expected), self.work / "verdict.txt")

    def expected(self, task: Task) -> dict[str, str]:
        """What an undisturbed run leaves."""
        if task.name not in self._expected:
            out = task.place(self.made, self.work)
            status = end(start(command, task.command_line(self.made, out), self.work / "said.txt"))
            assert status == 0, (self.work / "said.txt").read_text()
            self._expected[task.name] = results(out)
        return self._expected[task.name]

    def _case(self, task: Task, shortage: Shortage, out: Path, expected: dict[str, str]) -> str:
        shortage.around(out, lambda: task.fill(self.made, out))
        said, line = self.work / "said.txt", task.command_line(self.made, out)
        status = end(start(command, line, said, lambda: shortage.strike(out)))
        if status == 0:
            return "enough" if results(out) == expected else "another result"
        if wrong := how_it_failed(status, said.read_text(errors="replace")):
            return wrong
        if task.looks_whole(out) and task.of_result(results(out)) != task.of_result(expected):
            return "it looks whole and differs"
        shortage.relieve(out)
        if status := end(start(command, line, said)):
            return f"again: status {status}: {said.read_text()[-1000:]}"
        found = results(out)
        names = [n for n in {*found, *expected} if found.get(n) != expected.get(n)]
        return f"again, other files: {', '.join(sorted(names))}" if names else ""


def how_it_failed(status: int, said: str) -> str:
    """What is wrong with a failure, empty for one line of an error and status 1."""
    lines = said.strip().splitlines()
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}: {said[-1000:]}"
    if os.waitstatus_to_exitcode(status) != 1 or "Traceback" in said:
        return f"status {os.waitstatus_to_exitcode(status)}: {said[-3000:]}"
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) != 1 or lines[-1] != errors[0]:
        return f"not one line: {said[-1000:]}"
    return ""


def _enclosed(call: Callable[[], str], verdict: Path) -> str:
    """Call in a process of its own, which may mount what nobody else sees."""
    if child := os.fork():
        end(child)
        return verdict.read_text()
    found = ""
    try:
        found = call()
    except BaseException:
        found = traceback.format_exc()
    finally:
        verdict.write_text(found)
        os._exit(0)
