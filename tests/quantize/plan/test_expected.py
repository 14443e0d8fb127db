"""A checkpoint that is not the model of its config.json is refused before anything is read or written."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import TINY_CONFIGS, build_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from trilobite import TrilobiteConfig
from trilobite.checkpoint.source import open_source
from trilobite.errors import ArchitectureError, CheckpointError, TrilobiteError
from trilobite.quantize.plan.plan import Plan
from trilobite.quantize.run.compress import compress, prepare
from trilobite.recipe import Role, load_recipe

Change = Callable[[dict[str, Tensor]], object]
MOE = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("expected") / "whole"
    build_checkpoint("qwen3_moe", path, dtype=torch.bfloat16)
    return path


def changed(whole: Path, path: Path, change: Change | None = None, **config: Any) -> Path:
    """A copy of a checkpoint with other tensors and another configuration."""
    path.mkdir()
    tensors = load_file(whole / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    written = json.loads((whole / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(written))
    return path


def plan(path: Path, *, keep_unmatched: bool = False) -> Plan:
    return prepare(open_source(str(path)), load_recipe("rtn3"), keep_unmatched=keep_unmatched)


def drop(pattern: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        names = [n for n in tensors if re.search(pattern, n)]
        assert names
        for name in names:
            del tensors[name]

    return change


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


def add(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(r"layers\.1\..*experts\.3\."), r"layers\.1\.mlp\.experts\.\w+ is \[3, .*has \[4, "),
        (drop(r"layers\.1\..*experts\.2\.gate_proj"), r"experts\.gate_up_proj does not come together"),
        (drop(r"layers\.0\..*q_proj"), r"1 tensors of the Qwen3MoeForCausalLM .* missing, first .*q_proj"),
        (drop(r"layers\.0\.input_layernorm"), "missing, first .*input_layernorm"),
        (drop(r"layers\.1\.mlp\.gate\."), r"missing, first .*mlp\.gate"),
        (drop("lm_head"), "missing, first lm_head"),
        (drop(r"^model\.norm"), "missing, first model.norm"),
        (drop(r"layers\.1\."), r"missing, first model\.layers\.1\."),
        (put("lm_head.weight", lambda w: w[:250]), r"lm_head\.weight is \[250, 64\], .* has \[256, 64\] there"),
        (put(f"{MOE}.2.up_proj.weight", lambda w: w[:-7]), "does not come together"),
        (put("model.norm.weight", lambda w: w[:-1]), r"norm\.weight is \[63\]"),
        (put("lm_head.weight", lambda w: (w * 100).to(torch.int16)), "lm_head.weight is I16; expected weights"),
        (put("model.norm.weight", lambda w: w.to(torch.int32)), "norm.weight is I32; expected weights"),
        (add("model.layers.2.input_layernorm.weight", 64), "1 tensors are in no Qwen3MoeForCausalLM"),
        (add("value_head.weight", 1), "value_head.weight; .*or pass --keep-unmatched"),
    ],
)  # fmt: skip
def test_a_tensor_too_few_too_many_or_another(whole: Path, tmp_path: Path, change: Change, said: str) -> None:
    path = changed(whole, tmp_path / "other", change)
    with pytest.raises(CheckpointError, match=said) as caught:
        plan(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=said):
        compress(str(path), tmp_path / "out", load_recipe("rtn3"))
    assert not (tmp_path / "out").exists()


def test_all_experts_short_of_the_same_rows(whole: Path, tmp_path: Path) -> None:
    """505 rows fill as many tiles as 512: the files agree with each other, and not with config.json."""

    def shorten(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            w = tensors[name]
            tensors[name] = (w[:, :-7] if "down_proj" in name else w[:-7]).contiguous()

    with pytest.raises(CheckpointError, match=r"is \[4, 64, 89\], .* has \[4, 64, 96\] there"):
        plan(changed(whole, tmp_path / "other", shorten))


@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_layers(whole: Path, tmp_path: Path, layers: int) -> None:
    path = changed(whole, tmp_path / "other", num_hidden_layers=layers)
    with pytest.raises(CheckpointError, match=r"model\.layers\.[12]\."):
        plan(path, keep_unmatched=True)


def test_quantize_on_load_asks_too(whole: Path, tmp_path: Path) -> None:
    path = changed(whole, tmp_path / "other", drop(r"layers\.1\..*experts\.3\."))
    with pytest.raises(CheckpointError, match=r"experts\.\w+ is \[3, "):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=TrilobiteConfig("rtn3"))


def test_unmatched_tensors_may_be_left_out(whole: Path, tmp_path: Path) -> None:
    path = changed(whole, tmp_path / "other", add("value_head.weight", 1))
    assert len(plan(path, keep_unmatched=True).lines) == len(plan(whole).lines) + 1


def test_extra_prediction_layers_are_legal(tmp_path: Path) -> None:
    build_checkpoint("deepseek_v3", tmp_path / "whole", dtype=torch.bfloat16)

    def more(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".layers.2." in n]:
            tensors[name.replace(".layers.2.", ".layers.3.")] = tensors[name].clone()
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)

    legal = changed(tmp_path / "whole", tmp_path / "legal", more, num_nextn_predict_layers=1)
    assert sum(line.format is not None for line in plan(legal).lines if line.matrix.layer == 3) > 12
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\."):
        plan(changed(tmp_path / "whole", tmp_path / "other", more, num_nextn_predict_layers=0))


def test_tied_heads_may_be_there_or_not(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path / "whole", dtype=torch.bfloat16)
    tied = changed(tmp_path / "whole", tmp_path / "both", tie_word_embeddings=True)
    assert any(line.note == "tied to the embedding" for line in plan(tied).lines)
    assert plan(changed(tmp_path / "whole", tmp_path / "one", drop("lm_head"), tie_word_embeddings=True))


@pytest.mark.parametrize("keep_unmatched", [False, True])
def test_a_model_that_nobody_can_load(whole: Path, tmp_path: Path, keep_unmatched: bool) -> None:
    with pytest.raises(ArchitectureError, match="model_type 'mixture9' is unknown"):
        plan(changed(whole, tmp_path / "other", model_type="mixture9"), keep_unmatched=keep_unmatched)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "sillu"},
        {"hidden_act": 3},
        {"dtype": "bfloat17"},
        {"dtype": 16},
        {"sliding_window": True, "use_sliding_window": True},
        {"num_key_value_heads": 0},
        {"num_attention_heads": 0, "head_dim": None},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": "2"},
        {"hidden_size": -64},
        {"vocab_size": None},
        {"num_experts": 10**9, "num_local_experts": 10**9},
        {"rope_parameters": {"rope_type": "spiral"}},
    ],
    ids=str,
)
def test_odd_values_are_one_line(whole: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    path = changed(whole, tmp_path / "other", **config)
    with pytest.raises(TrilobiteError) as caught:
        plan(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_every_architecture_is_what_it_should_be(model_type: str, tmp_path: Path) -> None:
    build_checkpoint(model_type, tmp_path, dtype=torch.bfloat16)
    notes = {line.note for line in plan(tmp_path).lines if line.matrix.role is not Role.ROUTER}
    assert not {n for n in notes if "runs in 16 bit only" in n or "no linear layer" in n}
