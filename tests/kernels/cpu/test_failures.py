"""A system that gives no threads or no memory: one error, no abort, and the next call works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.cpu import native

SHIM = Path(__file__).parents[2] / "support" / "failing.c"
PROGRAM = """
import ctypes, sys, torch
from support.packing import lattice_weight, packed_weight, relative_error
from trilobite.errors import ResourceError
from trilobite.kernels import ops, reference
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.expert_table import build
from trilobite.kernels.layer import ExpertsLayer

shim = ctypes.CDLL(None)
threads = 3
torch.set_num_threads(threads)
torch.manual_seed(0)
w, lattice = packed_weight(512, 1024, "int3-g64", rank=4), lattice_weight(512, 1024, rank=4)
x = torch.randn(40, 1024)
sides = ((512, 256), (512, 256), (256, 512))
layers = {
    "experts": build([tuple(packed_weight(*s, "int3-g64", rank=4) for s in sides)] * 3),
    "lattice experts": build([tuple(lattice_weight(*s) for s in sides)] * 3),
}
index, weights, h = torch.randint(0, 3, (40, 2)), torch.rand(40, 2), torch.randn(40, 256)

def experts(name, module):
    slab, table = layers[name]
    layer = ExpertsLayer(slab=slab, table=table, hidden=256, intermediate=512, activation="silu")
    return module.experts(h, index, weights, layer)

CALLS = {
    "linear": lambda module: module.linear(x, w),
    "lattice linear": lambda module: module.linear(x, lattice),
    **{name: lambda module, name=name: experts(name, module) for name in layers},
}

def refused(call):
    try:
        call(ops)
    except ResourceError as e:
        message = str(e)
        assert "\\n" not in message
        return message
    return None

def works(call):
    assert relative_error(call(ops), call(reference)) < 1e-4
"""
THREADS = """
call = CALLS["linear"]
for left in (0, 1):  # none of two starts, one does
    shim.failing_threads(left)
    assert "cannot start" in (message := refused(call)) and "TRILOBITE_THREADS=1" in message, message
    assert "cannot start" in refused(CALLS["experts"])
try:
    cpu.measure_read_bandwidth(torch.ones(1 << 20, dtype=torch.uint8), 1, 3)
    raise SystemExit("a probe without threads")
except ResourceError as e:
    assert "cannot start" in str(e)
shim.failing_threads(-1)
works(call)
"""
MEMORY = """
import os, threading

def attempt(call, of_caller, of_workers, answers):
    shim.failing_memory(of_caller, of_workers)
    message = refused(call)
    shim.failing_memory(-1, -1)
    works(call)
    assert message is None or "too little memory" in message, message
    answers.append(message)

def is_refused(call, of_caller, of_workers):
    # Memory is kept for the next call: only a new thread in a new process, with new workers, asks for all of it.
    child = os.fork()
    if child == 0:
        answers = []
        thread = threading.Thread(target=attempt, args=(call, of_caller, of_workers, answers))
        thread.start()
        thread.join()
        os._exit((2 if answers[0] else 3) if answers else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (2, 3), (call, of_caller, of_workers, status)
    return status == 2

for name, call in CALLS.items():
    works(call)
    assert is_refused(call, -1, 0), name  # a worker, the caller works
    assert is_refused(call, 0, 0), name  # before there is a job
    needed = 0
    while is_refused(call, needed, -1):
        needed += 1
    assert needed >= 2, name  # at last the caller, while the others work
    assert is_refused(call, needed - 1, 0), name  # everybody
    print(name, needed)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not cpu.available() or compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs the native library and a C compiler")
    out = tmp_path_factory.mktemp("shim") / "failing.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SHIM), "-o", str(out), "-ldl"], check=True)
    return out


def _run(shim: Path, program: str) -> str:
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
    environment["TRILOBITE_THREADS"] = "3"
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def test_threads_that_cannot_start(shim: Path) -> None:
    _run(shim, THREADS)


def test_memory_that_ends_on_any_thread(shim: Path) -> None:
    """Of the calling thread before and while others work, of one of the others, of all."""
    assert len(_run(shim, MEMORY).splitlines()) == 4


@pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")
@pytest.mark.parametrize("fault", ["of another version", "no library"])
def test_a_library_that_does_not_suit_is_named(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line: without it models would only be slow."""
    if fault == "no library":
        (tmp_path / native.NAME).write_bytes(b"\x7fELF")
        monkeypatch.setenv(native.VARIABLE, str(tmp_path / native.NAME))
    else:
        monkeypatch.setattr(native, "ABI", native.ABI + 1)
    library, why = native.load()
    assert library is None
    assert "does not load" in why
    (record,) = caplog.records
    assert record.getMessage() == f"packed models run without the CPU engine, many times slower: {why}"
    assert "\n" not in why
