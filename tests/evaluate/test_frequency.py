"""Run: python -m pytest tests/test_frequency.py"""

import json
import os

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from trilobite.errors import DestinationError, EvaluationError
from trilobite.evaluate.frequency import _count, expert_frequency, load_frequency, save_frequency

WINDOWS, CONTEXT, EXPERTS, ACTIVE = 5, 9, 6, 2
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": ACTIVE,
    "max_position_embeddings": 64,
}


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS))


def qwen() -> PreTrainedModel:
    """Layer 0 is dense, as `mlp_only_layers` says."""
    shapes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "mlp_only_layers": [0]}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **shapes, num_experts=EXPERTS, decoder_sparse_step=1))


def gpt_oss() -> PreTrainedModel:
    """The one whose experts call their second argument otherwise."""
    return GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=EXPERTS, head_dim=8))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(50, (WINDOWS, CONTEXT), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def expected(model: PreTrainedModel, ids: Tensor) -> dict[str, list[int]]:
    """From the routers' own weights and inputs, one window at a time."""
    counts: dict[str, list[int]] = {}

    def look(layer: str, router: nn.Module, hidden: Tensor) -> None:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T + getattr(router, "bias", 0)
        for expert in logits.topk(ACTIVE).indices.flatten().tolist():
            counts.setdefault(layer, [0] * EXPERTS)[expert] += 1

    hooks = []
    for number, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if router is not None:
            hooks.append(router.register_forward_pre_hook(lambda m, a, n=str(number): look(n, m, a[0])))
    for window in ids:
        model(window[None])
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize(
    ("build", "layers"), [(mixtral, ["0", "1", "2"]), (qwen, ["1", "2"]), (gpt_oss, ["0", "1", "2"])]
)
@pytest.mark.parametrize("batch", [1, 2, 100])
def test_counts_are_the_routers_choices(build, layers, batch, ids):
    torch.manual_seed(1)
    model = build().eval()
    steps = []
    counts = expert_frequency(model, ids, batch=batch, progress=lambda *s: steps.append(s))
    assert list(counts) == layers
    assert counts == expected(model, ids)
    for layer in layers:
        assert sum(counts[layer]) == WINDOWS * CONTEXT * ACTIVE
        assert len(set(counts[layer])) > 1, "uniform counts would hide a permutation"
    assert steps[-1] == (WINDOWS, WINDOWS)


def test_a_router_that_loves_one_expert(ids):
    torch.manual_seed(1)
    model = mixtral()
    before = expert_frequency(model, ids, batch=5)
    with torch.no_grad():
        model.model.layers[
            1
        ].post_attention_layernorm.weight.zero_()  # equal logits: top-k keeps its own order
    after = expert_frequency(model, ids, batch=5)
    assert after["0"] == before["0"]
    assert sorted(after["1"]) == [0] * (EXPERTS - ACTIVE) + [WINDOWS * CONTEXT] * ACTIVE


def test_no_expert_is_not_counted():
    counts = torch.zeros(3, dtype=torch.int64)
    index = torch.tensor([[0, 3], [2, 3], [0, 1]], dtype=torch.int32)
    _count(counts, {}, "3", nn.Identity(), (torch.zeros(3, 4), index), {})
    _count(counts, {}, "3", nn.Identity(), (torch.zeros(3, 4),), {"top_k_index": index})
    assert counts.tolist() == [4, 2, 2]
    _count(
        counts, {"encoder": torch.tensor([True, False, True])}, "encoder", nn.Identity(), (None, index), {}
    )
    assert counts.tolist() == [6, 3, 2]


def test_hooks_go_away_even_after_a_failure(ids):
    model = mixtral()
    with pytest.raises(IndexError):
        expert_frequency(model, torch.full((1, 4), 50), batch=1)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_dense_model_is_refused(ids):
    sizes = {k: v for k, v in SIZES.items() if k != "num_experts_per_tok"}
    with pytest.raises(EvaluationError, match=r"LlamaForCausalLM: .*Mixture-of-Experts"):
        expert_frequency(LlamaForCausalLM(LlamaConfig(**sizes)), ids, batch=1)


def test_a_file_comes_back(tmp_path):
    path = tmp_path / "frequency.json"
    counts = {"1": [3, 0, 5], "12": [8, 0, 0], "decoder.1": [0, 1, 2]}
    save_frequency(path, counts, model_name="tiny", text="wiki.txt", tokens=4)
    assert load_frequency(path) == counts
    document = json.loads(path.read_text())
    assert (document["model"], document["text"], document["tokens"]) == ("tiny", "wiki.txt", 4)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "frequency.json"
    save_frequency(path, {"0": [1]}, model_name="a", text="t", tokens=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DestinationError, match=r"No space left"):
        save_frequency(path, {"0": [2]}, model_name="b", text="t", tokens=1)
    assert load_frequency(path) == {"0": [1]}
    assert os.listdir(tmp_path) == ["frequency.json"]
    with pytest.raises(DestinationError, match=r"cannot be written"):
        save_frequency(tmp_path / "no" / "f.json", {"0": [2]}, model_name="b", text="t", tokens=1)


GOOD = {"kind": "trilobite expert frequency", "version": 1, "layers": {"0": [1, 2]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("\udcff", "not JSON"),
        ([1], "not a file of expert frequencies"),
        ({"layers": {"0": [1]}}, "not a file of expert frequencies"),
        ({**GOOD, "version": 2}, "version 2"),
        ({**GOOD, "layers": {}}, "'layers'"),
        ({**GOOD, "layers": {"x": [1]}}, "layer 'x'"),
        ({**GOOD, "layers": {"0": []}}, "layer 0"),
        ({**GOOD, "layers": {"0": [1, -2]}}, "layer 0"),
        ({**GOOD, "layers": {"0": [1, 2.5]}}, "layer 0"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "frequency.json"
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(EvaluationError, match=message) as e:
        load_frequency(path)
    assert str(path) in str(e.value)
