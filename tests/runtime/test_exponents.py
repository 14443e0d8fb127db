"""Matrices whose weights are below what fp16 scales hold: quantized times a power of two, which loading takes back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import build_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import trilobite
from trilobite.checkpoint.packed import read_report
from trilobite.checkpoint.roles import Matrix, View
from trilobite.checkpoint.source import open_source
from trilobite.checkpoint.verify import check_intact
from trilobite.errors import CheckpointError, FormatVersionError, ShapeError
from trilobite.formats.weight import dequantize
from trilobite.integrations.config import TrilobiteConfig
from trilobite.kernels import ops, reference
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.lines import quantize_line
from trilobite.quantize.run.options import Options
from trilobite.recipe import Recipe, Role, load_recipe, parse_format
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear

LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.block_sparse_moe.experts"
FACTORS = {
    f"{LAYER}.self_attn.q_proj.weight": 1e-8,
    f"{LAYER}.self_attn.o_proj.weight": 1e4,
    f"{EXPERTS}.1.w1.weight": 1e-8,
    f"{EXPERTS}.1.w2.weight": 1e-12,
    f"{EXPERTS}.2.w3.weight": 1e4,
}
SCALED = [name for name, factor in FACTORS.items() if factor < 1]
IDS = torch.arange(3, 40)[None]


def relative(w: Tensor, found: Tensor) -> float:
    return float((found.double() - w.double()).norm() / w.double().norm())


@pytest.mark.parametrize("factor", [1e-8, 1e-12, 1e4])
@pytest.mark.parametrize(
    ("text", "rank", "kind"),
    [
        ("int3-g64", 0, "int3"),
        ("int2-g16", 0, "int3"),
        ("int3-g64-dq", 0, "int3"),
        ("int8-channel-sym", 0, "int3"),
        ("int3-g16-super", 0, "int3"),
        ("int3-g64", 4, "int3"),
        ("int4-g32", 4, "int8"),
        ("int4-g32", 4, "fp16"),
        ("e8p-2", 0, "int3"),
        ("e8p-3", 4, "int8"),
    ],
)
def test_the_error_is_that_of_weights_of_usual_size(text: str, rank: int, kind: str, factor: float) -> None:
    name = f"{LAYER}.self_attn.q_proj.weight"
    matrix = Matrix(name, Role.ATTENTION, 0, None, None, (64, 128), "", View())
    line = PlanLine(matrix=matrix, format=parse_format(text), method="search", rank=rank, stored=())
    recipe = Recipe(name="test", rules=(), compensator=kind, iterations=2)
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    usual, record = quantize_line(w, line, recipe)
    assert "exponent" not in record
    found, scaled = quantize_line(w * factor, line, recipe)
    assert relative(w * factor, dequantize(found)) == pytest.approx(relative(w, dequantize(usual)), rel=0.05)
    assert scaled["error"] == pytest.approx(record["error"], rel=0.05)
    assert scaled["kurtosis"] == pytest.approx(record["kurtosis"], rel=0.01)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    assert relative(x @ dequantize(found).T, reference.linear(x, found)) < 1e-5
    if found.exponent:
        with pytest.raises(ShapeError, match="kernels run none"):
            ops.linear(x, found)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faint") / "source"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    tensors = load_file(path / "model.safetensors")
    for name, factor in FACTORS.items():
        tensors[name] = (tensors[name].float() * factor).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def packed(source: Path, dst: Path, recipe: str) -> dict[str, Any]:
    compress(str(source), dst, load_recipe(recipe), options=Options(jobs=1, device="cpu"))
    found: dict[str, Any] = json.loads((dst / "config.json").read_bytes())["quantization_config"]
    return found


def check_weights(model: Any, source: Path) -> None:
    """Against those of the source; what is scaled has become plain, all else stays packed."""
    tensors = load_file(source / "model.safetensors")
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj) is nn.Linear
    assert isinstance(layer.self_attn.o_proj, PackedLinear)
    assert not isinstance(layer.mlp.experts, PackedExperts)
    assert isinstance(model.model.layers[1].mlp.experts, PackedExperts)
    half = len(layer.mlp.experts.gate_up_proj[1]) // 2
    found = {
        f"{LAYER}.self_attn.q_proj.weight": layer.self_attn.q_proj.weight,
        f"{LAYER}.self_attn.o_proj.weight": dequantize(layer.self_attn.o_proj.packed()),
        f"{EXPERTS}.1.w1.weight": layer.mlp.experts.gate_up_proj[1][:half],
        f"{EXPERTS}.1.w2.weight": layer.mlp.experts.down_proj[1],
        f"{EXPERTS}.2.w3.weight": layer.mlp.experts.gate_up_proj[2][half:],
    }
    for name in FACTORS:
        assert relative(tensors[name], found[name].detach()) < 0.25, name


@pytest.mark.parametrize("recipe", ["search3", "milo-s1"])
def test_a_checkpoint_with_faint_weights(recipe: str, source: Path, tmp_path: Path) -> None:
    config = packed(source, tmp_path / "a", recipe)
    assert sorted(config["exponents"]) == sorted(SCALED)
    assert config["format_version"] == 2
    rows = {row["name"]: row for row in read_report(tmp_path / "a")["tensors"]}
    assert {name for name, row in rows.items() if "exponent" in row} == set(SCALED)
    assert all(rows[name]["error"] < 0.25 for name in FACTORS)
    check_intact(open_source(tmp_path / "a"))
    model = trilobite.load(tmp_path / "a")
    check_weights(model, source)
    logits = model(input_ids=IDS).logits
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(stock(input_ids=IDS).logits, logits)
    stock.save_pretrained(tmp_path / "b")
    again = json.loads((tmp_path / "b" / "config.json").read_bytes())["quantization_config"]
    assert again["format_version"] == 1
    assert "exponents" not in again
    assert torch.equal(trilobite.load(tmp_path / "b")(input_ids=IDS).logits, logits)


def test_usual_weights_have_none(tmp_path: Path) -> None:
    build_checkpoint("mixtral", tmp_path / "a", dtype=torch.bfloat16)
    config = packed(tmp_path / "a", tmp_path / "b", "search3")
    assert config == {"quant_method": "trilobite", "format_version": 1, "recipe": "search3"}


def test_quantized_while_it_loads(source: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=TrilobiteConfig("search3"))
    check_weights(model, source)


def test_experts_that_stream(source: Path, tmp_path: Path) -> None:
    """Those of the layers without such matrices."""
    packed(source, tmp_path / "a", "search3")
    whole = trilobite.load(tmp_path / "a")(input_ids=IDS).logits
    model = trilobite.load(tmp_path / "a", memory="1GiB")
    assert torch.equal(model(input_ids=IDS).logits, whole)


@pytest.mark.parametrize("exponents", [[1], {"a": "b"}, {"a": 1e9}, {"a": 10**9}, {"a": True}, {}, None])
def test_damaged_exponents(exponents: object, source: Path, tmp_path: Path) -> None:
    packed(source, tmp_path / "a", "rtn3")
    config = json.loads((tmp_path / "a" / "config.json").read_bytes())
    config["quantization_config"]["exponents"] = exponents
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="exponents"):
        trilobite.load(tmp_path / "a")


def test_later_versions_are_not_read(source: Path, tmp_path: Path) -> None:
    packed(source, tmp_path / "a", "rtn3")
    config = json.loads((tmp_path / "a" / "config.json").read_bytes())
    config["quantization_config"]["format_version"] = 3
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatVersionError, match="reads version 1 and 2"):
        trilobite.load(tmp_path / "a")
