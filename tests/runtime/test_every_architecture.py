"""Some of the types of docs/architectures.md, each for a reason; `make architectures` tries them all."""

from pathlib import Path

import pytest
from support.every_architecture import beside_transformers, build, counts_experts, model_types, try_type
from transformers import MistralConfig, MixtralConfig


@pytest.mark.parametrize(
    ("model_type", "recipe"),
    [
        ("deepseek_v32", "int8"),  # computes directly with its indexer's weights_proj
        ("mistral4", "int8"),  # loads through its image-text class
        ("qwen3_omni_moe_thinker", "int8"),  # initialises a layer's weights from the experts in it
        ("lfm2_moe", "int8"),  # does not name its activation
        ("deepseek_v4", "milo-s1"),  # clamped gates; routes by hash
        ("minimax_m3_vl_text", "search3"),  # gpt-oss's gate without its alternation
        ("step3p7", "search3"),  # clamped behind the activation; the block is called otherwise on disk
        ("inkling2_text", "int8"),  # soft caps; gate and up alternate on disk
        ("muse_spark", "search3"),  # a norm behind every expert
        ("llama4_text", "milo-s1"),  # scores multiply what enters the experts
        ("longcat_flash", "search3"),  # experts that give what they are given
        ("nemotron_h", "milo-s1"),  # squared ReLU, no gates
        ("dbrx", "search3"),  # experts in two dimensions
        ("jetmoe", "int8"),  # keeps its experts under other names
        ("aria", "int8"),  # image-text, transposed experts
        ("ernie4_5_vl_moe", "int8"),  # experts for text and for images, numbered through on disk
        ("qwen4_exp_text", "int8"),  # an embedding in pieces, put together on the CPU
        ("mistral_large4", "int8"),  # turns weights of its images round by names that end before `weight`
        ("gemma4", "int8"),  # image-text; its configuration has no experts by default
    ],
)
def test_it_runs_right(model_type: str, recipe: str, tmp_path: Path) -> None:
    build(model_type, tmp_path / "original")
    try_type(tmp_path, recipe)


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v32",  # an index of keys chooses what latents are read
        "hy_v4",  # and beside sinks
        "minimax_m3_vl_text",  # blocks of keys, for each head its own
        "llama4_text",
        "qwen3_next",
    ],
)
def test_it_attends_as_transformers_does(model_type: str, tmp_path: Path) -> None:
    """Also to what a model gives its own attention in other ways than the engine's."""
    build(model_type, tmp_path)
    beside_transformers(tmp_path)


def test_types_are_found_by_their_configurations() -> None:
    assert counts_experts(MixtralConfig())
    assert not counts_experts(MistralConfig())
    assert {"mixtral", "gemma4", "dots1", "switch_transformers"} <= set(model_types())
