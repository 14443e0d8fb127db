"""What transformers does with a packed checkpoint when nobody imports Trilobite, and what save_pretrained leaves."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import trilobite
from trilobite.checkpoint.guard import FIELD, GUARD, guarded, lift
from trilobite.checkpoint.packed import read_report
from trilobite.errors import DestinationError
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe

IDS = torch.arange(3, 27)[None]
STOCK = """
import sys
import transformers

for name in {classes}:
    try:
        getattr(transformers, name).from_pretrained({path!r})
    except ValueError as e:
        print(name, "refused:", e)
    else:
        print(name, "loaded")
assert not any(name.startswith("trilobite") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    build_checkpoint("mixtral", folder / "original", dtype=torch.bfloat16)
    options = Options(jobs=1, device="cpu")
    compress(str(folder / "original"), folder / "packed", load_recipe("rtn3"), options=options)
    return folder / "packed"


def of_tensors_only(packed: Path) -> dict[str, Any]:
    """A report without the checksums of files, which transformers writes anew."""
    report = read_report(packed)
    del report["checksums"]
    return report


def stock(path: Path, *classes: str) -> list[str]:
    """One line for each class of transformers: what it does with a folder in a process without Trilobite."""
    code = STOCK.format(classes=classes, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_transformers_alone_refuses_and_says_what_to_import(packed: Path) -> None:
    classes = ("AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification", "MixtralModel")
    rows = stock(packed, *classes)
    assert [row.split(" refused: ")[0] for row in rows] == list(classes)
    assert all("import trilobite" in row and "pip install trilobite" in row for row in rows)


def test_the_text_part_of_a_model_with_images_is_refused_too(tmp_path: Path) -> None:
    """AutoModelForCausalLM loads it with the text part's configuration alone."""
    config = AutoConfig.for_model("qwen3_5_moe").to_dict()
    assert FIELD not in config
    (tmp_path / "config.json").write_text(json.dumps(guarded(config)))
    (row,) = stock(tmp_path, "AutoModelForCausalLM")
    assert GUARD in row
    loaded = AutoConfig.from_pretrained(tmp_path)
    lift(loaded)
    assert not hasattr(loaded, FIELD)
    assert not hasattr(loaded.text_config, FIELD)


def test_a_guard_of_somebody_else_stays(packed: Path) -> None:
    config = AutoConfig.from_pretrained(packed)
    config.transformers_weights = "weights.safetensors"
    lift(config)
    assert config.transformers_weights == "weights.safetensors"


def test_checkpoints_without_a_guard_still_load(packed: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for file in packed.iterdir():
        (old / file.name).write_bytes(file.read_bytes())
    config = json.loads((old / "config.json").read_text())
    assert config.pop(FIELD) == GUARD
    (old / "config.json").write_text(json.dumps(config))
    expected = trilobite.load(str(packed))(IDS).logits
    assert torch.equal(trilobite.load(str(old))(IDS).logits, expected)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(old)(IDS).logits, expected)


@pytest.mark.parametrize("way", ["load", "from_pretrained", "deepcopy"])
def test_save_pretrained_keeps_the_report_the_card_and_the_guard(
    packed: Path, tmp_path: Path, way: str
) -> None:
    model = trilobite.load(str(packed)) if way == "load" else AutoModelForCausalLM.from_pretrained(packed)
    model = copy.deepcopy(model) if way == "deepcopy" else model
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == (packed / "README.md").read_bytes()
    assert read_report(tmp_path) == of_tensors_only(packed)
    assert json.loads((tmp_path / "config.json").read_text())[FIELD] == GUARD
    assert torch.equal(trilobite.load(str(tmp_path))(IDS).logits, model(IDS).logits)


def test_quantized_on_load_is_saved_with_what_compress_writes(packed: Path, tmp_path: Path) -> None:
    original = packed.parent / "original"
    config = trilobite.TrilobiteConfig("rtn3")
    AutoModelForCausalLM.from_pretrained(original, quantization_config=config).save_pretrained(tmp_path)
    assert read_report(tmp_path) == of_tensors_only(packed)
    assert (tmp_path / "README.md").read_bytes() == (packed / "README.md").read_bytes()
    assert json.loads((tmp_path / "config.json").read_text())[FIELD] == GUARD


def test_pushing_while_saving_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="push_to_hub"):
        trilobite.load(str(packed)).save_pretrained(tmp_path / "pushed", push_to_hub=True)
    assert not (tmp_path / "pushed").exists()
