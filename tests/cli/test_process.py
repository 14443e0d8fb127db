"""The process of the command itself: signals at any moment, streams that are closed, what it imports."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from support.runs import digests

from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe

COMMAND = [sys.executable, "-m", "trilobite"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def finished(*args: object, **streams: object) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *map(str, args)]
    return subprocess.run(command, text=True, timeout=300, env=ENVIRONMENT, check=False, **streams)  # type: ignore[call-overload, no-any-return]


def started(*args: object) -> "subprocess.Popen[str]":
    """A process that answers signals already."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    status = Path(f"/proc/{process.pid}/status")
    while not (caught(status) >> (signal.SIGTERM - 1)) & 1:
        time.sleep(0.001)
    return process


def caught(status: Path) -> int:
    """The mask of signals that a process catches."""
    return int(
        next(line for line in status.read_text().splitlines() if line.startswith("SigCgt")).split()[1], 16
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("process") / "original"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    return path


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is caught")


@needs_proc
def test_signals_are_answered_before_anything_slow_is_imported() -> None:
    process = started("recipes")
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    process.kill()
    process.communicate()
    assert "libpython" in maps or "python" in maps
    assert "libtorch" not in maps
    assert "yaml" not in maps


WATCHED = """
import os, sys

class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            print("torch", *(os.environ.get(n) for n in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")), file=sys.stderr)

sys.meta_path.insert(0, Watch())
from trilobite.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("generate nowhere hello", "torch passive None"),
        pytest.param("translate nowhere", "torch passive 10000", marks=pytest.mark.long),
        ("eval nowhere --translation a.en a.de", "torch passive 10000"),
    ],
)
def test_how_threads_wait_is_said_before_torch_is_there(command: str, said: str) -> None:
    """A translation is mostly torch's small operators, whose threads stay awake between them."""
    there = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *command.split()],
        input="",
        capture_output=True,
        text=True,
        env=there,
        check=False,
    )
    assert said in done.stderr
    assert done.returncode == 1


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_is_one_line(number: signal.Signals, original: Path, tmp_path: Path) -> None:
    """In the first milliseconds, in the imports and in the work; what was written is continued, byte for byte."""
    out, moments = tmp_path / "out", (0, 0.01, 0.1, 0.3, 0.5, 0.8, 1.1, 1.5)
    for moment in moments:
        process = started("compress", original, out, "-r", "rtn3", "--jobs", 1, "--device", "cpu")
        time.sleep(moment)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=60)
        if process.returncode != 0:  # else it was faster
            assert process.returncode == 128 + number, (moment, errors)
            assert printed == ""
            assert errors.startswith(WORDS[number])
            assert errors.count("\n") == 1, (moment, errors)
    assert finished("compress", original, out, "-r", "rtn3", "--device", "cpu", stdout=-3).returncode == 0
    compress(str(original), tmp_path / "whole", load_recipe("rtn3"))
    assert digests(out) == digests(tmp_path / "whole")


SIGNAL_IN_THE_TENTH_MATRIX = """
import os, signal, threading
from trilobite.quantize.run import lines
quantize_line, calls = lines.quantize_line, []

def interrupt(*args):
    calls.append(args)
    if len(calls) == 10:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(600)  # a matrix that takes its time is not waited for
    return quantize_line(*args)

lines.quantize_line = interrupt
from trilobite.__main__ import main
main()
"""


def test_a_signal_says_how_far_it_came(original: Path, tmp_path: Path) -> None:
    arguments = ["compress", str(original), str(tmp_path / "out"), "-r", "rtn3", "--jobs", "1"]
    stopped = subprocess.run(
        [sys.executable, "-c", SIGNAL_IN_THE_TENTH_MATRIX, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert stopped.returncode == 128 + signal.SIGTERM
    done = int(stopped.stderr.split()[1])
    assert 8 <= done < 30
    assert stopped.stderr == f"terminated: {done} of 41 tensors are done; run the same command to continue\n"


@needs_proc
def test_an_ignored_signal_stays_ignored() -> None:
    """As `nohup` and the background of a script want it."""
    asked = "import trilobite.signals as s, signal; s.answer_signals(); print(signal.getsignal(2) is signal.SIG_IGN)"
    shell = f"trap '' INT; exec {sys.executable} -c '{asked}'"
    assert subprocess.check_output(["bash", "-c", shell], text=True) == "True\n"


# Streams.


@pytest.mark.parametrize(
    "command", [["recipes"], ["recipes", "milo-s1"], ["--version"], ["recipes", "--json"]]
)
def test_a_reader_that_goes_away_is_one_line(command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = finished(*command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output was closed")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["recipes", "recipes milo-s1", "doctor"])
def test_a_closed_output_is_one_line_before_the_work(command: str) -> None:
    shell = f"exec {sys.executable} -m trilobite {command} >&-"
    done = subprocess.run(
        ["bash", "-c", shell], text=True, stderr=subprocess.PIPE, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 1
    assert done.stderr == "error: standard output is closed; send it to a file, or to /dev/null\n"


def test_other_streams_may_be_closed() -> None:
    shell = f"exec {sys.executable} -m trilobite recipes <&- 2>&-"
    assert "milo-s1" in subprocess.check_output(["bash", "-c", shell], text=True, env=ENVIRONMENT)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = finished("recipes", "--json", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device")
    assert done.stderr.count("\n") == 1


# What a process may lack, or have too much of.

BARE = {
    "HOME": "/proc/nowhere",
    "LC_ALL": "C",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONUTF8": "0",
    "OMP_NUM_THREADS": "64",
    "TRILOBITE_THREADS": "64",
}


def test_neither_home_nor_locale_nor_a_core_a_thread(original: Path, tmp_path: Path) -> None:
    """The bytes are those of any other run."""

    def one_core() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    out, kept = tmp_path / "größe", {k: os.environ[k] for k in ("PYTHONPATH",) if k in os.environ}
    done = subprocess.run(
        [*COMMAND, "compress", str(original), str(out), "-r", "milo-s1", "--jobs", "64", "--device", "cpu"],
        env=kept | BARE,
        cwd="/",
        capture_output=True,
        timeout=300,
        check=False,
        preexec_fn=one_core,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"milo-s1" in done.stdout
    compress(str(original), tmp_path / "whole", load_recipe("milo-s1"))
    assert digests(out) == digests(tmp_path / "whole")
