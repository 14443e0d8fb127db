"""Freed memory stays with a process that runs models on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint

from trilobite.runtime import load as loading
from trilobite.runtime.heap import keep_freed_memory

FAULTS = """
import resource, sys, torch
from trilobite.runtime.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def use():
    tensors = [torch.zeros(8 << 20, dtype=torch.uint8) for _ in range(6)]
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(way: str) -> int:
    """Pages asked for, where the C library gives back all that it can: its own bounds move with what a process does."""
    generous = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, way],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | generous,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_pages_are_not_asked_for_again() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    kept, given_back = _faults("keep"), _faults("give back")
    assert kept * 10 < given_back


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_left_alone(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert not keep_freed_memory()


def test_a_model_on_the_cpu_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(loading, "keep_freed_memory", lambda: asked.append(True))
    build_checkpoint("mixtral", tmp_path / "tiny")
    loading.load(str(tmp_path / "tiny"), dtype=torch.float32)
    assert asked == [True]
