"""Huge pages are asked for: where weights are mapped from a file, where slots hold them, and where a probe reads."""

from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from transformers import AutoModelForCausalLM

from trilobite.huge_pages import ones
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.offload.memory import ALIGN, Arena

MAPS = Path("/proc/self/smaps")
ADVISED = "hg"
pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or not MAPS.exists(),
    reason="no transparent huge pages here",
)


def flags(address: int) -> list[str]:
    """Of the mapping that holds an address, as the kernel tells them."""
    holds = False
    for line in MAPS.read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, last = (int(part, 16) for part in words[0].split("-"))
            holds = first <= address < last
        elif holds and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"{address:x} is nowhere")


def test_mapped_weights(tmp_path: Path) -> None:
    build_checkpoint("mixtral", tmp_path / "original")
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    packed, original = (load(str(tmp_path / name)) for name in ("packed", "original"))
    for weight in (_experts(packed), next(original.parameters())):
        assert ADVISED in flags(weight.data_ptr())
    copied = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert ADVISED in flags(_slab(copied).data_ptr())


def _experts(model: torch.nn.Module) -> torch.Tensor:
    return next(b for m in model.modules() if isinstance(m, PackedExperts) for b in m.buffers())


def _slab(model: torch.nn.Module) -> torch.Tensor:
    return next(m.residence.slab for m in model.modules() if isinstance(m, PackedExperts))


def test_slots_and_what_probes_read() -> None:
    assert ADVISED in flags(Arena(2, ALIGN).tensor.data_ptr())
    probed = ones(3)
    assert probed.tolist() == [1, 1, 1]
    assert ADVISED in flags(probed.data_ptr())
    assert ADVISED not in flags(torch.ones(1).data_ptr())
