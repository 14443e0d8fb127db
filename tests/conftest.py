import gc
import os
import signal

# Before torch is imported, here and in the processes that tests start: several of them share a few cores, and a thread
# that waits by spinning keeps the one that it waits for from running.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from pathlib import Path

import pytest
import torch
from support.paths import SHARED

# Before anything imports Triton: its kernels are tested on the CPU, in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")


# A script's background job ignores Ctrl-C, and so would all programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage, here or in a fork, looks at it again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and test machines share their cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of trained checkpoints and evaluation text; tests that need it skip where it is absent."""
    if not (SHARED / "models").is_dir():
        pytest.skip(f"{SHARED}: no trained checkpoints here")
    return SHARED
