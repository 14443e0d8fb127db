"""The short form of `python -m starve`, and that it sees what may go wrong."""

import errno
import os
import sys
from pathlib import Path

import pytest
from kills.tasks import TASKS, Task, prepare

from starve import cases
from starve.cases import Starver, how_it_failed
from starve.shortages import Disk, FailingCall, Threads, own_mounts

BY_NAME = {task.name: task for task in TASKS}
RTN = BY_NAME["rtn3"]
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and /proc"),
    pytest.mark.filterwarnings("ignore:.*fork"),  # the threads beside which it forks are idle
]


@pytest.fixture(scope="module")
def starver(tmp_path_factory: pytest.TempPathFactory) -> Starver:
    folder = tmp_path_factory.mktemp("starve")
    prepare(folder / "made")
    return Starver(folder / "made", folder / "work")


@pytest.fixture(scope="module")
def mounts() -> None:
    """Skips where nobody may mount anything."""
    if child := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            pytest.skip("this system lets nobody mount a disk in memory")
        return
    status = 1
    try:
        own_mounts()
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_disk_that_fails_at_any_call(starver: Starver, error: int) -> None:
    """Here at some of them, spread over the run."""
    calls = starver.calls(RTN, error)
    assert calls > 30
    found = [starver.run(RTN, FailingCall(number, error)) for number in (2, calls // 3, calls - 2)]
    assert found[:2] == ["", ""]
    assert found[2] in ("", "enough")  # what is left to be removed may be left


def test_an_original_that_cannot_be_read(starver: Starver) -> None:
    calls = starver.calls(RTN, errno.EIO, reads=True)
    for number in (1, calls // 2):
        assert starver.run(RTN, FailingCall(number, errno.EIO, starver.made)) == "", number


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize("name", ["rtn3", "gptq3", "stats", "eval --save"])
def test_a_full_disk(starver: Starver, name: str) -> None:
    task, size = BY_NAME[name], sum(f.stat().st_size for f in starver.made.rglob("packed/*"))
    full = Disk(size // 2) if task.result == "packed" and not task.starts_from else Disk(0, inodes=0)
    assert starver.run(task, full) == ""
    assert starver.run(task, Disk(read_only=True)) == ""


@pytest.mark.usefixtures("mounts")
def test_no_more_inodes(starver: Starver) -> None:
    for inodes in (0, 3, 7):
        assert starver.run(RTN, Disk(inodes=inodes)) == "", inodes


@pytest.mark.usefixtures("mounts")
def test_what_says_that_all_is_there_is_written_last(starver: Starver) -> None:
    for pages in (1, 2):
        assert starver.run(BY_NAME["eval --save"], Disk(pages * 4096)) in ("", "enough"), pages


def test_no_more_threads(starver: Starver) -> None:
    assert starver.run(BY_NAME["milo-s1"], Threads()) == ""


@pytest.mark.parametrize("fault", ["forgets", "shouts", "crashes", "lies"])
def test_faults_are_seen(fault: str, starver: Starver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: str) -> None:
        """Writes 20 files, one after the other."""
        out, last = Path(arguments[-1]), 0
        try:
            for last in range(20):
                (out / str(last)).write_text("x")
        except OSError as e:
            if fault == "shouts":
                raise
            if fault == "crashes":
                os.abort()
            if fault == "forgets":  # to tidy up
                (out / "left").touch()
            if fault == "lies":
                return
            print("error: no room", file=sys.stderr)
            raise SystemExit(1) from e

    monkeypatch.setattr(cases, "command", broken)
    task = Task(f"broken, {fault}", "{out}", ".")
    assert starver.run(task, FailingCall(5, errno.EIO)) not in ("", "enough")


def test_lines() -> None:
    assert how_it_failed(256, "a note\nerror: no room\n") == ""
    for said in ("", "error: a\nerror: b\n", "error: a\nTraceback (most recent call last)\n", "a\n"):
        assert how_it_failed(256, said)
    assert how_it_failed(512, "error: a\n")
    assert how_it_failed(9, "error: a\n")
