"""Encoder-decoders without experts: compressed, loaded, dequantized, generating."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.packing import relative_error
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import Role, load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.modules.linear import PackedLinear

T5: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
}
T5 |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
BART: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
BART |= {
    f"{side}_{key}": size for side in ("encoder", "decoder") for key, size in [("layers", 2), ("ffn_dim", 96)]
}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Any] = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "t5 gated, with a head": lambda: T5ForConditionalGeneration(
        T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "m2m100": lambda: M2M100ForConditionalGeneration(M2M100Config(**BART)),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["int8", "milo-s1"])
def test_a_dense_model_runs_packed(name: str, recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = MODELS[name]().to(torch.bfloat16).eval()
    original.save_pretrained(tmp_path / "m")
    options = Options(device="cpu")
    result = compress(str(tmp_path / "m"), tmp_path / "p", load_recipe(recipe), options=options)
    packed = [line.matrix for line in result.plan.lines if line.format]
    assert {m.role for m in packed} >= {Role.ATTENTION, Role.DENSE_MLP}
    assert {m.layer_key for m in packed} >= {"encoder.0", "encoder.1", "decoder.0", "decoder.1"}
    model = load(str(tmp_path / "p"))
    assert type(model) is type(original)
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == len(packed)
    source, target = torch.arange(3, 21).view(2, 9), torch.arange(40, 50).view(2, 5)
    with torch.no_grad():
        found = model(input_ids=source, decoder_input_ids=target).logits
        assert model.generate(source, max_new_tokens=6, num_beams=2).shape[0] == 2
        close = original(input_ids=source, decoder_input_ids=target).logits
        plain = load(str(tmp_path / "p")).dequantize()
        same = plain(input_ids=source, decoder_input_ids=target).logits
    assert relative_error(found, same) < 0.02
    assert relative_error(found, close) < (0.05 if recipe == "int8" else 0.5)
