"""A whole model whose experts stream, while something happens to its file or its process: right results, or one line."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.kernels.cpu import engine
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.offload.plan import Offload
from trilobite.runtime.offload.streaming import streaming
from trilobite.runtime.routing import moe_layers

pytestmark = pytest.mark.skipif(not engine.available(), reason="no native CPU engine")

TIMEOUT = 120.0


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    build_checkpoint("mixtral", tmp_path / "original")
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    return tmp_path / "packed"


def streamed(path: Path) -> Any:
    """With two slots of four a layer."""
    layers = len(moe_layers(load(str(path))))
    return load(str(path), memory=Offload(memory=2**40, slots=2 * layers))


def logits(model: Any, count: int = 20) -> Tensor:
    """Of a prompt that needs all experts, and of single tokens."""
    with torch.inference_mode():
        prompt = model(input_ids=torch.arange(3, 43)[None], use_cache=False).logits.flatten()
        tokens = [model(input_ids=torch.tensor([[5 + t]]), use_cache=False).logits for t in range(count)]
    return torch.cat([prompt, *(t.flatten() for t in tokens)])


PROCESS = """
import hashlib, os, sys
import torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[3:]
from runtime.offload.test_faults import logits, streamed
from trilobite.errors import OffloadError

model = streamed(__import__("pathlib").Path(sys.argv[1]))
open(sys.argv[2] + "." + str(os.getpid()), "w").close()
for _ in range(3):
    print(hashlib.sha256(logits(model).numpy().tobytes()).hexdigest(), flush=True)
child = os.fork()
if not child:
    try:
        logits(model)
    except OffloadError as e:
        os._exit(0 if "fork" in str(e) else 3)
    os._exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(hashlib.sha256(logits(model).numpy().tobytes()).hexdigest())
"""


def test_two_processes_on_one_file_and_a_fork_of_each(packed: Path, tmp_path: Path) -> None:
    """Both say the same all the time; the child of a fork is refused in one line, and its parent goes on."""
    import hashlib

    expected = hashlib.sha256(logits(load(str(packed))).numpy().tobytes()).hexdigest()
    command = [sys.executable, "-c", PROCESS, str(packed), str(tmp_path / "here"), *sys.path]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=TIMEOUT)
        assert out.split() == [expected, expected, expected, "0", expected]


def test_a_file_that_vanishes(packed: Path) -> None:
    """It is open and mapped: the model runs on; a new one is not loaded."""
    expected, model = logits(load(str(packed))), streamed(packed)
    for file in packed.glob("*.safetensors"):
        file.unlink()
    assert torch.equal(logits(model), expected)


def test_a_file_that_shrinks(packed: Path) -> None:
    """The experts that are gone are missed in one line, time and again; nothing hangs."""
    model = streamed(packed)
    file = next(packed.glob("*.safetensors"))
    size = file.stat().st_size
    found = streaming(model)
    assert found is not None
    assert found.cache is not None
    experts = moe_layers(model)[0].experts
    x, weights = torch.randn(1, 64), torch.ones(1, 2)
    last = found.cache.store.stretches[0][3]  # type: ignore[attr-defined]
    os.truncate(file, last.offset + 10)
    try:
        for _ in range(3):
            with pytest.raises(OffloadError, match=r"shrunk since the model was loaded; copy it again"):
                experts(x, torch.tensor([[0, 3]]), weights)
        assert experts(x, torch.tensor([[0, 1]]), weights).isfinite().all()
    finally:
        os.truncate(file, size)


def test_a_disk_that_fails_now_and_then(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth read: calls that meet one end in one line, and what comes out otherwise is right."""
    expected, model = logits(load(str(packed)), 0), streamed(packed)
    preadv, calls, refused = os.preadv, [0], list[str]()

    def read(*args: Any) -> int:
        calls[0] += 1
        if calls[0] % 10 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", read)
    for _ in range(30):
        try:
            assert torch.equal(logits(model, 0), expected)
        except OffloadError as e:
            refused.append(str(e))
    assert refused
    assert all("Input/output error" in line and "\n" not in line for line in refused)
    monkeypatch.undo()
    assert torch.equal(logits(model, 0), expected)


def test_a_file_system_without_direct_reads(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more, **named)

    expected = logits(load(str(packed)))
    monkeypatch.setattr(os, "open", refuse)
    model = streamed(packed)
    assert torch.equal(logits(model), expected)
    found = streaming(model)
    assert found is not None
    assert sum("no O_DIRECT" in note for note in found.notes) == 1


def test_what_fits_is_not_slowed_down(packed: Path) -> None:
    """Where memory holds all, the bounded model is the resident one: no slots, no threads, the same bits."""
    model = load(str(packed), memory=2**40)
    found = streaming(model)
    assert found is not None
    assert found.cache is None
    assert torch.equal(logits(model), logits(load(str(packed))))
    resident = type(moe_layers(load(str(packed)))[0].experts.residence)
    assert all(type(layer.experts.residence) is resident for layer in moe_layers(model))
