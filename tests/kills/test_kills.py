"""The short form of `python -m kills`, and that it sees what may go wrong."""

import os
import time
from pathlib import Path

import pytest

from kills.killer import Killer
from kills.tasks import TASKS, Task, prepare

KILLS = 1
SHORT = [task for task in TASKS if task.name not in ("quip3-free", "rtn3")]
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork"),  # the threads beside which it forks are idle
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    prepare(folder)
    return folder


@pytest.mark.parametrize("task", SHORT, ids=[task.name for task in SHORT])
def test_killed_commands_end_as_if_nobody_had_killed_them(task: Task, made: Path, tmp_path: Path) -> None:
    toll = Killer(made, tmp_path, seed=len(task.name)).run(task, KILLS)
    assert not toll.wrong
    assert toll.kills == KILLS


@pytest.mark.parametrize("fault", ["forgets", "litters", "half a file"])
def test_faults_are_seen(fault: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"

    def broken(*arguments: str) -> None:
        """From its second start on: writes other bytes, leaves a file, or half of one for long."""
        first = not calls.exists()
        calls.touch()
        out = Path(arguments[-1])
        if fault == "litters" and not first:
            (out.parent / f".left-{os.getpid()}").touch()
        if fault == "half a file" and not first:
            out.write_bytes(b"hal")
            time.sleep(60)
        out.write_bytes(b"else" if fault == "forgets" and not first else b"half")

    monkeypatch.setattr("kills.killer.command", broken)
    task = Task("broken", "{out}/result.txt", "result.txt")
    toll = Killer(made, tmp_path / "work").run(task, 3)
    assert toll.wrong
