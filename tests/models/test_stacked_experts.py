"""Layers that we put into transformers' models compute what transformers' own do, and save what they load."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from support.every_architecture import build
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from trilobite.checkpoint.source import open_source

TYPES = ("llama4_text", "jetmoe", "dbrx", "longcat_flash")
MODELS = {"llama4_text": "llama4"}


def theirs(model_type: str) -> Any:
    """transformers' own module of a model, as it is in its file."""
    name = f"transformers.models.{MODELS.get(model_type, model_type)}.modeling_{MODELS.get(model_type, model_type)}"
    origin = import_module(name).__file__
    assert origin is not None
    spec = spec_from_file_location(f"{name.rpartition('.')[0]}.untouched", origin)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def logits(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def from_tensors(kind: Any, path: Path, change: Callable[[dict[str, Tensor]], None]) -> Tensor:
    """The logits of transformers' own class with the tensors of a checkpoint."""
    config = AutoConfig.from_pretrained(path)
    source = open_source(str(path))
    tensors = {name: source.read(name).float() for name in source.tensors}
    change(tensors)
    model = kind._from_config(config, dtype=torch.float32).eval()
    state = model.state_dict()
    assert {name for name in state if name not in tensors} <= {"lm_head.weight"}
    model.load_state_dict({name: tensors.get(name, t) for name, t in state.items()})
    model.tie_weights()
    return logits(model)


def stacked_longcat(tensors: dict[str, Tensor]) -> None:
    """As transformers stacks them, with weights of the expert that has none."""
    for layer in range(3):
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            p: [tensors.pop(f"{path}.{e}.{p}_proj.weight") for e in range(4)] for p in ("gate", "up", "down")
        }
        rows = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{path}.gate_up_proj"] = torch.stack([*rows, torch.full_like(rows[0], torch.nan)])
        tensors[f"{path}.down_proj"] = torch.stack(parts["down"])


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_those_of_transformers_own_layer(model_type: str, tmp_path: Path) -> None:
    build(model_type, tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    ours = {type(m).__module__ for m in model.modules() if type(m).__module__.startswith("trilobite.")}
    assert ours == {f"trilobite.models.{MODELS.get(model_type, model_type)}"}
    kind = getattr(theirs(model_type), type(model).__name__)
    assert not any(
        type(m).__module__.startswith("trilobite.") for m in kind._from_config(model.config).modules()
    )
    change = stacked_longcat if model_type == "longcat_flash" else lambda tensors: None
    torch.testing.assert_close(
        logits(model), from_tensors(kind, tmp_path / "a", change), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("model_type", TYPES)
def test_names_on_disk_stay(model_type: str, tmp_path: Path) -> None:
    build(model_type, tmp_path / "a")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    a, b = (open_source(str(tmp_path / name)) for name in "ab")
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        assert torch.equal(a.read(name), b.read(name)), name
