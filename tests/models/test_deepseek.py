import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from support.architectures import EXPERTS, HIDDEN, INTERMEDIATE, TINY_CONFIGS, build_checkpoint, build_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trilobite.errors import ArchitectureError
from trilobite.models.deepseek import DeepseekConfig, DeepseekForCausalLM, DeepseekMoE, register

# config.json of deepseek-ai/deepseek-moe-16b-base, key by key.
REAL_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModel": "modeling_deepseek.DeepseekModel",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 4096,
    "model_type": "deepseek",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 102400,
}
IDS = torch.arange(3, 20).unsqueeze(0)


def tiny(**overrides: Any) -> DeepseekConfig:
    config = TINY_CONFIGS["deepseek"]().to_dict()
    return DeepseekConfig(**{**config, **overrides})


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def real_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIG))
    # If transformers ran the repository's code, these would say so.
    for module in ("configuration_deepseek", "modeling_deepseek"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('code of the checkpoint was executed')\n")
    return tmp_path


@pytest.mark.parametrize("trust", [None, False, True])
def test_real_config_takes_our_class_and_runs_no_code(real_folder: Path, trust: bool | None) -> None:
    config = AutoConfig.from_pretrained(real_folder, trust_remote_code=trust)
    assert type(config) is DeepseekConfig
    assert config.rope_parameters == {"rope_theta": 10000, "rope_type": "default"}
    assert (config.num_experts, config.num_experts_per_tok, config.head_dim) == (64, 6, 128)
    assert (config.norm_topk_prob, config.scoring_func, config.attention_bias) == (False, "softmax", False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    assert type(model) is DeepseekForCausalLM


def test_real_model_has_16_4_billion_parameters(real_folder: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(real_folder))
    attention, norms = 4 * 2048 * 2048, 2 * 2048
    dense = 3 * 2048 * 10944
    sparse = (64 + 2) * 3 * 2048 * 1408 + 64 * 2048
    expected = 2 * 102400 * 2048 + 28 * (attention + norms) + dense + 27 * sparse + 2048
    assert sum(p.numel() for p in model.parameters()) == expected
    assert round(expected / 1e9, 1) == 16.4


def test_defaults_are_those_of_the_real_model() -> None:
    config = DeepseekConfig()
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(config, key) == REAL_CONFIG[key]
    for key in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace"):
        assert getattr(config, key) == REAL_CONFIG[key]


def test_names_on_disk(tmp_path: Path) -> None:
    build_checkpoint("deepseek", tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        names = set(f.keys())
        w = f.get_tensor("model.layers.1.mlp.experts.3.gate_proj.weight")
    assert w.shape == (INTERMEDIATE, HIDDEN)
    experts = {n for n in names if ".experts." in n}
    assert experts == {
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj.weight"
        for i in (1, 2)
        for e in range(EXPERTS)
        for p in ("gate", "up", "down")
    }
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"} <= names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_give_the_same_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_checkpoint("deepseek", tmp_path, dtype=dtype)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is DeepseekForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert loaded.dtype is dtype
    before, after = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    # The experts implementation may differ between the two, so compare under the same one.
    model.set_experts_implementation("eager")
    loaded.set_experts_implementation("eager")
    assert torch.equal(logits(model), logits(loaded))


def moe_reference(x: Tensor, moe: DeepseekMoE, config: DeepseekConfig) -> Tensor:
    """The equations 9 to 11 of the paper (arXiv 2401.06066), token by token. x: [T, H]"""

    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return down @ (F.silu(gate @ x) * (up @ x))

    out = []
    for token in x:
        scores = (moe.gate.weight @ token).softmax(0)
        chosen = sorted(range(EXPERTS), key=lambda e: -float(scores[e]))[: config.num_experts_per_tok]
        weights = scores[chosen] / (scores[chosen].sum() if config.norm_topk_prob else 1)
        y = torch.zeros_like(token)
        for e, weight in zip(chosen, weights, strict=True):
            gate, up = moe.experts.gate_up_proj[e].chunk(2)
            y += weight * mlp(token, gate, up, moe.experts.down_proj[e])
        if moe.shared_experts is not None:
            shared = moe.shared_experts
            y += mlp(token, shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("shared", [2, None])
@torch.no_grad()
def test_mixture_equals_the_paper(norm_topk_prob: bool, shared: int | None) -> None:
    config = tiny(norm_topk_prob=norm_topk_prob, n_shared_experts=shared)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    moe = DeepseekMoE(config)
    for p in moe.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    x = torch.randn(3, 5, HIDDEN, generator=generator)
    expected = moe_reference(x.reshape(-1, HIDDEN), moe, config).reshape(x.shape)
    # Both are float32 sums over at most 96 terms in another order.
    torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-4)
    config.norm_topk_prob = not norm_topk_prob
    other = moe_reference(x.reshape(-1, HIDDEN), moe, config).reshape(x.shape)
    assert (moe(x) - other).abs().max() > 0.01, (
        "normalisation must make a difference, or the test shows nothing"
    )


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_implementations_agree(implementation: str) -> None:
    model = build_model("deepseek")
    model.set_experts_implementation("eager")
    expected = logits(model)
    model.set_experts_implementation(implementation)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_which_layers_are_sparse() -> None:
    config = tiny(num_hidden_layers=6, first_k_dense_replace=2, moe_layer_freq=2)
    with torch.device("meta"):
        model = DeepseekForCausalLM(config)
    assert [isinstance(layer.mlp, DeepseekMoE) for layer in model.model.layers] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert not any(tiny(n_routed_experts=None).is_sparse(i) for i in range(6))


def test_attention_bias() -> None:
    with torch.device("meta"):
        model = DeepseekForCausalLM(tiny(attention_bias=True))
    assert model.model.layers[1].self_attn.q_proj.bias is not None


def test_generation_and_recorded_outputs() -> None:
    model = build_model("deepseek")
    tokens = model.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, IDS.shape[1] + 3)
    with torch.no_grad():
        without_cache = model(tokens[:, :-1]).logits.argmax(-1)
    assert torch.equal(without_cache[0, -3:], tokens[0, -3:]), "the cache changes nothing"
    assert len(model(IDS, output_hidden_states=True).hidden_states) == 4


def test_new_weights_are_not_left_empty() -> None:
    model = DeepseekForCausalLM(tiny())
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        if "norm" not in name:
            assert 0.01 < float(p.detach().std()) < 0.03, name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'.*deepseek_v3"),
        ({"moe_layer_freq": 0}, "moe_layer_freq 0; expected at least 1"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok 5; expected 1 to n_routed_experts \(4\)"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok None"),
    ],
)
def test_impossible_configs(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        tiny(**overrides)


def test_register_is_idempotent_and_changes_no_environment() -> None:
    environment, names = dict(os.environ), set(dir(transformers))
    register()
    register()
    assert CONFIG_MAPPING["deepseek"] is DeepseekConfig
    assert dict(os.environ) == environment
    assert set(dir(transformers)) == names


def test_register_leaves_a_type_that_transformers_knows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    native = type("NativeConfig", (DeepseekConfig,), {})
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "deepseek", native)
    register()
    assert CONFIG_MAPPING["deepseek"] is native
