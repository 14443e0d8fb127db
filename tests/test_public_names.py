"""The public surface is what docs/api.md says, no more and no less."""

import re
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from support.calibrating import add_tokenizer, words
from support.paths import ROOT
from transformers import AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import trilobite
from trilobite.errors import CheckpointError
from trilobite.quantize.calibrate.windows import Calibration

API = ROOT / "docs" / "api.md"


def test_public_names_are_those_documented() -> None:
    documented = re.findall(r"^\| `trilobite\.(\w+)", API.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(trilobite.__all__)
    assert dir(trilobite) == sorted(trilobite.__all__)


@pytest.mark.parametrize("name", trilobite.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(trilobite, name)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'decompress'"):
        trilobite.decompress  # noqa: B018


def test_strings_for_paths_and_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_checkpoint("mixtral", Path("original"))
    add_tokenizer(Path("original"))
    Path("text").write_text(words(200))
    ground = Calibration(text="text", save="h", samples=2, context=32, propagate="original")  # type: ignore[arg-type]
    trilobite.compress("original", "packed", "gptq3", calibration=ground)
    trilobite.compress(Path("original"), Path("again"), trilobite.load_recipe("gptq3"), calibration=ground)
    (one,), (other,) = (sorted(Path(folder).glob("*.safetensors")) for folder in ("packed", "again"))
    assert one.read_bytes() == other.read_bytes()
    assert trilobite.load(Path("packed")).name_or_path == trilobite.load("packed").name_or_path
    with pytest.raises(CheckpointError, match="no such folder"):
        trilobite.load(Path("a/b/c"))


@pytest.mark.parametrize(
    ("device", "message"), [("cuda", "torch sees 0 GPUs"), ("gpu", "expected cpu, cuda")]
)
def test_a_device_that_is_not_there(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(trilobite.TrilobiteError, match=message):
        trilobite.load("no checkpoint", device=device)


def test_import_registers_the_plugin() -> None:
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["trilobite"] is trilobite.TrilobiteConfig
    assert "trilobite" in AUTO_QUANTIZER_MAPPING
    assert AutoConfig.for_model("deepseek").model_type == "deepseek"
