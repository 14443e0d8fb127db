"""`model.dequantize()`: an ordinary model of transformers, of which packed models are the same function."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from support.every_architecture import build
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trilobite.checkpoint.source import open_source
from trilobite.integrations.config import TrilobiteConfig
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.modules.matrix import PackedMatrix

RECIPE = replace(load_recipe("milo-s1"), name="ranks", rank="uniform-2", iterations=1, cap=False)
IDS = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))
TOLERANCE = 2e-5
"""Relative, of logits and of gradients: both sides compute in float32 and sum in another order."""
KINDS = {
    "mixtral": "stacked [E, 2I, H]",
    "gpt_oss": "transposed, gate and up alternate, biases",
    "deepseek": "shared experts, dense layers, a class of our own",
    "nemotron_h": "no gates",
    "qwen2_moe": "biases of linear layers",
}
STOCK = """
import sys
import torch
from transformers import AutoModelForCausalLM
folder, *kinds = sys.argv[1:]
ids = torch.load(folder + "/ids")
for kind in kinds:
    path = folder + "/" + kind
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        torch.save(model(input_ids=ids, use_cache=False).logits, path + ".logits")
assert not any(name.startswith("trilobite") for name in sys.modules)
"""


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def names(folder: Path) -> list[str]:
    return sorted(open_source(str(folder)).tensors)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed checkpoints by kind, beside the originals."""
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "nemotron_h":
            build(kind, folder / "original")
        else:
            build_checkpoint(kind, folder / "original", dtype=torch.bfloat16)
        options = Options(jobs=1, device="cpu")
        compress(str(folder / "original"), folder / "packed", RECIPE, keep_unmatched=True, options=options)
        made[kind] = folder / "packed"
    return made


@pytest.fixture(params=KINDS)
def packed(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def test_it_is_the_original_class_with_the_same_logits(packed: Path) -> None:
    model = load(str(packed), dtype=torch.float32)
    expected = logits(model)
    assert model.dequantize() is model
    original = load(str(packed.parent / "original"), dtype=torch.float32)
    shapes = {name: p.shape for name, p in original.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert all(
        name not in vars(model) for name in vars(model).keys() - vars(original).keys() - {"is_quantized"}
    )
    assert not hasattr(model.config, "quantization_config")
    assert not model.is_quantized
    assert distance(logits(model), expected) < TOLERANCE
    with pytest.raises(ValueError, match="first quantize"):
        model.dequantize()


def test_gradients_are_those_of_the_dequantized_model(packed: Path) -> None:
    model, plain = (load(str(packed), dtype=torch.float32) for _ in range(2))
    plain.dequantize()
    for each in (model, plain):
        each(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    compared = set()
    for name, parameter in model.named_parameters():
        expected = gradients[name]
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            assert expected.norm() > 0, name
            assert distance(parameter.grad, expected) < TOLERANCE, name
            compared.add(name.rpartition(".")[0].rpartition(".")[2])
    assert any("norm" in name for name in compared)
    assert any("embed" in name for name in compared)


def test_stock_transformers_loads_what_it_saves(folders: dict[str, Path], tmp_path: Path) -> None:
    torch.save(IDS, tmp_path / "ids")
    expected = {}
    for kind in KINDS.keys() - {"deepseek"}:  # which transformers lacks
        model = load(str(folders[kind]), dtype=torch.float32).dequantize()
        model.save_pretrained(tmp_path / kind)
        assert names(tmp_path / kind) == names(folders[kind].parent / "original")
        expected[kind] = logits(model)
    run = [sys.executable, "-c", STOCK, str(tmp_path), *expected]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind in expected:
        assert distance(torch.load(tmp_path / f"{kind}.logits"), expected[kind]) < TOLERANCE, kind


@pytest.mark.parametrize("packed", ["mixtral"], indirect=True)
def test_another_dtype(packed: Path) -> None:
    model = load(str(packed), dtype=torch.float32)
    expected = logits(model)
    model.dequantize(dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert distance(logits(model).float(), expected) < 0.03  # bf16 has 8 bits


@pytest.mark.parametrize("packed", ["mixtral"], indirect=True)
def test_the_dtype_is_the_one_it_computes_in(packed: Path) -> None:
    model = load(str(packed)).to(torch.float32)
    assert {p.dtype for p in model.dequantize().parameters()} == {torch.float32}


@pytest.mark.parametrize("packed", ["gpt_oss"], indirect=True)
def test_a_copy_is_dequantized_alone(packed: Path) -> None:
    model = load(str(packed), dtype=torch.float32)
    expected = logits(model)
    other = pickle.loads(pickle.dumps(model)).dequantize()
    assert distance(logits(other), expected) < TOLERANCE
    assert any(isinstance(m, PackedMatrix) for m in model.modules())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("packed", ["mixtral"], indirect=True)
def test_adapters_merge_after_it(packed: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(load(str(packed), dtype=torch.float32), config).eval()
    expected = logits(adapted)
    adapted.dequantize()
    merged = adapted.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert distance(logits(merged), expected) < TOLERANCE


def test_a_model_quantized_while_loading(folders: dict[str, Path]) -> None:
    original = folders["gpt_oss"].parent / "original"
    model = AutoModelForCausalLM.from_pretrained(
        original, dtype=torch.float32, quantization_config=TrilobiteConfig("rtn3")
    )
    expected = logits(model)
    assert distance(logits(model.dequantize()), expected) < TOLERANCE
