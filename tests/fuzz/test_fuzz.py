"""The short form of `python -m fuzz`, and that it sees every way in which a case can go wrong."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import cases
from fuzz.cases import ACTIONS, Fuzzer, prepare

CASES = 100
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork"),  # the threads beside which it forks are idle
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    prepare(folder)
    return folder


def test_damaged_checkpoints_end_in_a_right_result_or_one_line(made: Path, tmp_path: Path) -> None:
    fuzzer = Fuzzer(made, tmp_path)
    failed = [verdict for verdict in map(fuzzer.run, range(CASES)) if verdict.failure]
    assert not failed


def crash(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def spin(_: Path) -> None:
    while True:
        pass


def hoard(_: Path) -> None:
    bytearray(8 * 2**30)


def litter(path: Path) -> None:
    (path.parent / "strange").touch()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (crash, "crash: SIGSEGV"),
        (spin, "hang"),
        (hoard, "traceback"),
        (litter, "left ['strange']"),
        (lambda path: 1 // 0, "traceback"),
        (lambda path: 3, "silently another result"),
    ],
)
def test_faults_are_seen(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], object], said: str
) -> None:
    monkeypatch.setattr(cases, "CPU_SECONDS", 1)
    monkeypatch.setattr(cases, "ACTIONS", {"packed": {"load": ACTIONS["packed"]["load"]}})
    fuzzer = Fuzzer(made, tmp_path)
    cases.ACTIONS["packed"]["load"] = fault
    assert fuzzer.run(0).failure == said
