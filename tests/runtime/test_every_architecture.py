"""Some of the types of docs/architectures.md, each for a reason; the page's command tries them all."""

from pathlib import Path

import pytest
from support.every_architecture import build, try_type


@pytest.mark.parametrize(
    ("model_type", "flag"),
    [
        ("deepseek_v32", ""),  # computes directly with its indexer's weights_proj
        ("mistral4", ""),  # loads through its image-text class
        ("qwen3_omni_moe_thinker", ""),  # initialises a layer's weights from the experts in it
        ("lfm2_moe", "--keep expert"),  # its experts compute in a way of their own: refused first
    ],
)
def test_it_runs_right_or_is_refused_first(model_type: str, flag: str, tmp_path: Path) -> None:
    build(model_type, tmp_path / "original")
    found = try_type(model_type, model_type, tmp_path)
    assert (found.error, found.flag) == ("", flag)
