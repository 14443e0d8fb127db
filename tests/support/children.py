"""Commands in forked processes: no time is lost on imports, and whatever becomes of one, the next is unhurt."""

import faulthandler
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from support.runs import digests
from trilobite import cli
from trilobite.checkpoint.evaluation import EVALUATION

LONGEST = 120.0
"""Seconds, on a machine with much else to do."""


def command(*arguments: str) -> None:
    """A command line in this process; raises SystemExit."""
    sys.argv = ["trilobite", *arguments]
    cli.main()


def start(
    run: Callable[..., object],
    arguments: Sequence[str],
    said: Path,
    before: Callable[[], object] | None = None,
) -> int:
    """Fork a process that runs a command, its standard error in a file; `before` is called there first."""
    if child := os.fork():
        return child
    status = 99
    faulthandler.disable()  # pytest's: a crash is told by its status
    try:
        errors = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDWR)
        for number, to in enumerate((null, null, errors)):
            os.dup2(to, number)
        sys.stdout, sys.stderr = (  # not pytest's
            io.TextIOWrapper(io.FileIO(n, "w", closefd=False), line_buffering=True) for n in (1, 2)
        )
        if before is not None:
            before()
        run(*arguments)
        status = 0
    except SystemExit as e:
        status = int(e.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def end(child: int) -> int:
    """Its wait status."""
    until = time.monotonic() + LONGEST
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            raise TimeoutError(f"a run that was let be takes more than {LONGEST} s")
        time.sleep(0.002)


def last_line(said: Path) -> str:
    """What a process said last."""
    lines = said.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def results(out: Path) -> dict[str, str]:
    """sha256 of every file, of what `eval` measured without the time that it took."""
    found = digests(out)
    for name in [n for n in found if Path(n).name == EVALUATION]:
        measured = json.loads((out / name).read_bytes())["measured"]
        found[name] = str([{k: v for k, v in entry.items() if k != "seconds"} for entry in measured])
    return found
