"""The rows of a packed matrix are stored, because its tiles tell them only in multiples of 16."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trilobite.checkpoint.source import open_source
from trilobite.errors import CheckpointError
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load

FILE = "model-00001-of-00001.safetensors"
Way = Callable[[Path], PreTrainedModel]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Two layers whose keys and values have 20 rows, and whose head has 250."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=20,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "original")
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    return tmp_path / "packed"


def change(packed: Path, old: bytes, new: bytes) -> None:
    """Other bytes in the header, as many."""
    assert len(old) == len(new)
    data = (packed / FILE).read_bytes()
    assert data.count(old) == 1
    (packed / FILE).write_bytes(data.replace(old, new))


def mapped(path: Path) -> PreTrainedModel:
    return load(str(path))


def copied(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path)


WAYS = pytest.mark.parametrize("way", [mapped, copied], ids=lambda w: w.__name__)


def test_only_partial_tiles_are_listed(packed: Path) -> None:
    keys = {f"model.layers.{i}.self_attn.{p}_proj.weight": 20 for i in range(2) for p in "kv"}
    assert open_source(str(packed)).rows == keys | {"lm_head.weight": 250}


@WAYS
def test_another_number_of_rows_is_refused(packed: Path, way: Way) -> None:
    assert way(packed)
    change(packed, b'layers.1.self_attn.v_proj.weight\\": 20', b'layers.1.self_attn.v_proj.weight\\": 21')
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.self_attn\.v_proj: packed with 21 rows, .* has 20"
    ):
        way(packed)


@WAYS
def test_a_matrix_that_is_not_listed_has_full_tiles(packed: Path, way: Way) -> None:
    change(packed, b"layers.0.self_attn.k_proj.weight\\", b"layers.0.self_attn.K_proj.weight\\")
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.self_attn\.k_proj: packed with 32 rows, .* has 20"
    ):
        way(packed)


@WAYS
def test_older_files_do_not_say(packed: Path, way: Way) -> None:
    change(packed, b'"rows":', b'"sowr":')
    assert open_source(str(packed)).rows is None
    assert way(packed)


def test_garbage_is_one_line(packed: Path) -> None:
    change(packed, b'lm_head.weight\\": 250', b'lm_head.weight\\": -50')
    with pytest.raises(CheckpointError, match="the header is garbage"):
        open_source(str(packed))
