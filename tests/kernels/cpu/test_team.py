"""Threads of the library under ThreadSanitizer, more of them than processors; the long form is `make sanitize`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[3] / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or ""
THREADS, JOBS = "5", "1000"

pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")


def build(program: Path, pool: Path) -> bool:
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", "-fsanitize=thread", f"-I{CSRC}"]
    made = subprocess.run(
        [COMPILER, *flags, CSRC / "fuzz_pool.cpp", pool, "-o", program], capture_output=True
    )
    return made.returncode == 0


def run(program: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRILOBITE_THREADS": THREADS, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([program, JOBS], capture_output=True, text=True, env=environment, timeout=300)


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    """And where one does not, that is seen."""
    pool = CSRC / "pool.cpp"
    if not build(tmp_path / "whole", pool):
        pytest.skip("the compiler has no ThreadSanitizer")
    whole = run(tmp_path / "whole")
    if "unexpected memory mapping" in whole.stderr:
        pytest.skip("ThreadSanitizer does not know how this kernel lays memory out")
    assert (whole.returncode, whole.stdout) == (0, f"{JOBS} jobs of up to {THREADS} threads\n"), whole.stderr
    waiting = "passed_.load() >= shares"
    text = pool.read_text()
    assert text.count(waiting) == 1
    (tmp_path / "pool.cpp").write_text(text.replace(waiting, "true"))
    assert build(tmp_path / "broken", tmp_path / "pool.cpp")
    assert run(tmp_path / "broken").returncode != 0
