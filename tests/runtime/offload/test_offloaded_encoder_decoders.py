"""Experts of encoder and decoder stream, bit for bit; keys and values take what is planned for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import SEQ2SEQ, TINY_CONFIGS, build_checkpoint
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from trilobite.errors import OffloadError
from trilobite.kernels.cpu import engine
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.offload.plan import Offload, key_value_bytes
from trilobite.runtime.offload.streaming import streaming

pytestmark = pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
SOURCE, TARGET = torch.arange(7, 27).view(2, 10), torch.arange(90, 110).view(2, 10)
SIZES: dict[str, dict[str, int]] = {
    "nllb-moe": {"decoder_layers": 4, "decoder_attention_heads": 8},
    "switch_transformers": {"num_decoder_layers": 4, "num_sparse_decoder_layers": 2, "d_kv": 8},
}


@pytest.fixture(scope="module", params=SEQ2SEQ)
def packed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With another decoder than encoder."""
    config = TINY_CONFIGS[request.param]

    def longer() -> Any:
        return type(config())(**{**config().to_diff_dict(), **SIZES[request.param]})

    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TINY_CONFIGS, request.param, longer)
        build_checkpoint(request.param, folder / "m", dtype=torch.bfloat16)
    compress(str(folder / "m"), folder / "p", load_recipe("rtn3"))
    return folder / "p"


def answers(model: Any) -> Tensor:
    with torch.inference_mode():
        logits = model(input_ids=SOURCE, decoder_input_ids=TARGET, use_cache=False).logits
        made = model.generate(
            SOURCE,
            max_new_tokens=8,
            num_beams=2,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            # transformers' own has as many layers as the encoder
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
        )
    return torch.cat([logits.flatten(), *(step.flatten() for step in made.scores)])


@pytest.mark.parametrize("guesses", [0, 2])
@pytest.mark.parametrize("pool", [False, True])
def test_streaming_changes_no_bit(packed: Path, guesses: int, pool: bool) -> None:
    whole = load(str(packed))
    model = load(str(packed), memory=Offload(memory=2**40, slots=6, staging=3, guesses=guesses, pool=pool))
    found = streaming(model)
    assert found is not None
    assert found.cache is not None
    assert found.plan.experts.count == 3 * 4
    assert torch.equal(answers(model), answers(whole))


def test_too_little_memory_is_one_line(packed: Path) -> None:
    with pytest.raises(OffloadError, match="smallest that works") as e:
        load(str(packed), memory="1MB")
    assert "\n" not in str(e.value)


def test_keys_and_values_are_what_transformers_keeps(packed: Path) -> None:
    model = load(str(packed))
    with torch.inference_mode():
        encoded = model.get_encoder()(SOURCE[:1])
        kept = model(encoder_outputs=encoded, decoder_input_ids=TARGET[:1], use_cache=True).past_key_values
    caches = (kept.self_attention_cache, kept.cross_attention_cache)
    found = sum(t.nbytes for cache in caches for layer in cache.layers for t in (layer.keys, layer.values))
    assert found == key_value_bytes(model, 10)
