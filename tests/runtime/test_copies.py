"""Pickles, copies and state dicts of a loaded model have the bytes of what is in them, not those of the mapped file."""

import copy
import io
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import PackedExperts

RECIPE = replace(
    load_recipe("milo-s1"), name="fp16", rank="sparse-2", compensator="fp16", iterations=1, cap=False
)
IDS = torch.arange(3, 27)[None]
OVERHEAD = 0.25
"""Of a pickle: names, shapes, the classes of a few hundred small tensors."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    build_checkpoint("mixtral", folder / "original", dtype=torch.bfloat16)
    compress(str(folder / "original"), folder / "packed", RECIPE, options=Options(jobs=1, device="cpu"))
    return folder / "packed"


@pytest.fixture(params=["load", "from_pretrained"])
def model(packed: Path, request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "load":
        return load(str(packed))
    return AutoModelForCausalLM.from_pretrained(packed)


def nbytes(module: nn.Module) -> int:
    return sum(t.nbytes for t in module.state_dict().values())


def parts(model: PreTrainedModel) -> dict[str, nn.Module]:
    layer = model.model.layers[0]
    (experts,) = (m for m in layer.modules() if isinstance(m, PackedExperts))
    norm, linear = layer.input_layernorm, layer.self_attn.q_proj
    return {
        "layer": layer,
        "experts": experts,
        "expert": experts.get_submodule("1"),
        "linear": linear,
        "norm": norm,
    }


def saved(value: object) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


@pytest.mark.parametrize("part", ["layer", "experts", "expert", "linear", "norm"])
def test_a_pickle_holds_what_belongs_to_the_module(model: PreTrainedModel, part: str) -> None:
    module = parts(model)[part]
    names = 1000 * len(module.state_dict()) + 20_000
    assert len(pickle.dumps(module)) < nbytes(module) + names
    assert saved(module.state_dict()) < nbytes(module) + names


def test_models_are_saved_whole_once(model: PreTrainedModel) -> None:
    names = 1000 * len(model.state_dict()) + 20_000
    assert saved(model.state_dict()) < nbytes(model) + names
    assert saved(model) < nbytes(model) + names


@pytest.mark.parametrize("way", ["pickle", "torch.save", "deepcopy", "deepcopy of a copy"])
def test_copies_compute_the_same_and_share_nothing(model: PreTrainedModel, way: str) -> None:
    expected = model(IDS).logits
    if way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(model)
        other = copy.deepcopy(other) if way == "deepcopy of a copy" else other
    assert torch.equal(other(IDS).logits, expected)
    for tensor in other.state_dict().values():
        tensor.zero_()
    assert torch.equal(model(IDS).logits, expected)
    assert not torch.equal(other(IDS).logits, expected)
