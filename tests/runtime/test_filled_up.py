"""Models with sides that are no multiple of 32: packed with zeros after the last columns, and of experts rows."""

from pathlib import Path
from typing import Any

import pytest
from support.every_architecture import build, difference

from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe

SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"hidden_size": 72, "moe_intermediate_size": 88, "shared_expert_intermediate_size": 104},
    "gpt_oss": {"hidden_size": 72, "intermediate_size": 40},  # biases; gate and up alternate
    "nllb-moe": {"d_model": 72, "encoder_ffn_dim": 88, "decoder_ffn_dim": 104, "encoder_attention_heads": 2},
    "nemotron_h": {"moe_intermediate_size": 88, "intermediate_size": 104, "moe_latent_size": 40},
}


@pytest.mark.parametrize("recipe", ["int8-experts", "search3", "milo-s1"])
@pytest.mark.parametrize("model_type", SIZES)
def test_logits_are_those_of_the_dequantized_weights(model_type: str, recipe: str, tmp_path: Path) -> None:
    build(model_type, tmp_path / "a", SIZES[model_type])
    compress(str(tmp_path / "a"), tmp_path / "b", load_recipe(recipe), options=Options(jobs=1, device="cpu"))
    assert difference(tmp_path / "a", tmp_path / "b") < 1e-5
