"""Small random packed checkpoints with heads of sizes that vLLM's CPU attention takes."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import trilobite
from trilobite.recipe import recipe_from_dict

HIDDEN, INTERMEDIATE, EXPERTS = 128, 192, 4
COMMON: dict[str, Any] = {
    "vocab_size": 250,  # no multiple of what heads are padded to
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": 64,  # of rotary embeddings
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen2_moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": INTERMEDIATE,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE},
    "olmoe": {"num_experts": EXPERTS, "num_key_value_heads": 4},
    "deepseek_v2": DEEPSEEK,
    # The last two as in the published config.json; transformers always does so, vLLM only where it reads it.
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 96, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}


PROMPTS = [[5, 9, 77, 123, 42, 200, 17], [31, 8, 8, 240, 99]]
NEW = 12


def packed_model(model_type: str, folder: Path, recipe: dict[str, Any]) -> Path:
    """Compress a random model with values that differ everywhere; returns the packed checkpoint."""
    config = AutoConfig.for_model(model_type, **{**COMMON, **SETTINGS[model_type]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(1 + noise / 10 if is_norm else noise * (0.3 if "gate.weight" in name else 0.08))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(torch.randn(bias.shape, generator=generator) / 5)
    model.save_pretrained(folder / "original")
    trilobite.compress(folder / "original", folder / "packed", recipe_from_dict(recipe, "test"))
    return folder / "packed"


def expected_tokens(packed: Path, prompts: list[list[int]] = PROMPTS, new: int = NEW) -> list[list[int]]:
    """What `trilobite.load` continues the prompts with."""
    model = trilobite.load(packed, dtype=torch.float32)
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        made.append(out[0, len(prompt) :].tolist())
    return made
