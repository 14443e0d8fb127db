"""Tiny random checkpoints of every architecture that the tests cover: `build_checkpoint("mixtral", path)`.

All are hidden 64, experts of 96 (a multiple of 32, and not the hidden size, so that a transposition
shows), four experts, two or three layers, 256 tokens. The weights are seeded and saved by
`save_pretrained`, so the names on disk are those of real checkpoints.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

import trilobite  # noqa: F401 - makes transformers know `deepseek`

VOCAB, HIDDEN, INTERMEDIATE, EXPERTS = 256, 64, 96, 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    # Ids beyond the tiny vocabulary would index outside the embedding.
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}


def _config(model_type: str, **overrides: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model(model_type, **{**COMMON, **overrides})


def _exactly(model_type: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model(model_type, **settings)


TINY_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": _config("mixtral", num_local_experts=EXPERTS),
    "qwen2_moe": _config(
        "qwen2_moe",
        num_experts=EXPERTS,
        moe_intermediate_size=INTERMEDIATE,
        shared_expert_intermediate_size=128,
        mlp_only_layers=[0],
    ),
    "qwen3_moe": _config("qwen3_moe", num_experts=EXPERTS, moe_intermediate_size=INTERMEDIATE),
    "olmoe": _config("olmoe", num_experts=EXPERTS),
    "deepseek_v2": _config("deepseek_v2", **DEEPSEEK, **MLA),
    "deepseek_v3": _config("deepseek_v3", **DEEPSEEK, **MLA),
    "glm4_moe": _config("glm4_moe", **DEEPSEEK, n_group=1, topk_group=1),
    "phimoe": _config("phimoe", num_local_experts=EXPERTS),
    "gpt_oss": _config(
        "gpt_oss",
        num_local_experts=EXPERTS,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    ),
    "granitemoe": _config("granitemoe", num_local_experts=EXPERTS),
    "minimax_m2": _config("minimax_m2", num_local_experts=EXPERTS, rotary_dim=16),
    "jamba": _config(
        "jamba",
        num_hidden_layers=3,
        num_experts=EXPERTS,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_expand=2,
        mamba_dt_rank=32,
    ),
    "deepseek": _config("deepseek", **DEEPSEEK),
    "llama": _config("llama"),
    "qwen3": _config("qwen3"),
    "nllb-moe": _exactly(
        "nllb-moe",
        vocab_size=VOCAB,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=INTERMEDIATE,
        decoder_ffn_dim=INTERMEDIATE,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_experts=EXPERTS,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        max_position_embeddings=64,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    ),
    "switch_transformers": _exactly(
        "switch_transformers",
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=INTERMEDIATE,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=EXPERTS,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
    ),
}
"""model_type -> its tiny configuration. Called, not stored: a configuration can be changed by its model."""

SEQ2SEQ = ("nllb-moe", "switch_transformers")


def build_model(
    model_type: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A tiny random model in eval mode, the same for the same seed. Every parameter is random, biases too.

    changes: to its configuration
    """
    config = TINY_CONFIGS[model_type]()
    config.update(changes or {})
    auto = AutoModelForSeq2SeqLM if model_type in SEQ2SEQ else AutoModelForCausalLM
    # As from_pretrained does it. Not model.to(): that would round the rotary frequencies too.
    model: PreTrainedModel = auto.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights stay near one; all else gets values that differ everywhere, so that a swap of two
            # tensors or a transposition cannot go unnoticed.
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(noise + 1 if _is_norm(parameter) else noise)
    return model


def build_checkpoint(
    model_type: str,
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard_size: str = "5GB",
    changes: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Save a tiny random checkpoint in the folder `path`; returns the model that it was made from."""
    model = build_model(model_type, dtype=dtype, seed=seed, changes=changes)
    model.save_pretrained(path, max_shard_size=shard_size)
    return model


def _is_norm(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1 and bool((parameter == 1).all())


def moe_layers(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, module) of every `experts` module in memory."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            yield name, module
