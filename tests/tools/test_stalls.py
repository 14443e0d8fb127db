"""The watchdog of tools/stalls.py: a run that only waits is seen, and its stacks are printed."""

import sys
from pathlib import Path

import pytest

from tools import stalls

WAITS = (
    "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); "
    "nobody_returns_this_lock = time.sleep; nobody_returns_this_lock(9)"
)
WORKS = "while __import__('time').process_time() < 1: pass"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_run_that_waits_for_nothing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stalls, "CHILD", WAITS)
    monkeypatch.setattr(stalls.shutil, "which", lambda name: None)  # gdb takes seconds
    run = stalls.start("rtn3", tmp_path, tmp_path, limit=3.0)
    assert run.status == 0
    assert run.quiet > 2
    assert run.reports >= 1
    out = capfd.readouterr().out
    assert 'File "<string>", line 1' in out
    assert "waited for a core" in out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_run_that_works_is_not_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "CHILD", WORKS)
    run = stalls.start("rtn3", tmp_path, tmp_path, limit=600.0)
    assert run.quiet < 1
    assert run.cpu > 0.9
    assert stalls.summary([run])["reported"] == 0
