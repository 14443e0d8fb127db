"""Packed models with an encoder for tests of their steps: with experts, and dense ones of random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    EncoderDecoderCache,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from support.architectures import build_checkpoint
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.step.conditions import new_cache

SIZES: dict[str, Any] = {"vocab_size": 256, "d_model": 64, "pad_token_id": 0, "eos_token_id": 1}
T5 = SIZES | {"d_kv": 16, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
BART = SIZES | {"max_position_embeddings": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 2, f"{side}_ffn_dim": 96}
DENSE: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "m2m100": lambda: M2M100ForConditionalGeneration(
        M2M100Config(**BART | {"max_position_embeddings": 20}, scale_embedding=True)
    ),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART)),
    "marian": lambda: MarianMTModel(MarianConfig(**BART)),
}
KINDS = ("switch_transformers", "nllb-moe", *DENSE)


def pack(kind: str, folder: Path) -> Path:
    """A tiny model of a kind, in `rtn3`."""
    torch.manual_seed(0)
    if kind in DENSE:
        DENSE[kind]().to(torch.bfloat16).eval().save_pretrained(folder / "original")
    else:
        build_checkpoint(kind, folder / "original", dtype=torch.bfloat16)
    compress(str(folder / "original"), folder / "packed", load_recipe("rtn3"))
    return folder / "packed"


def encoded(model: PreTrainedModel, source: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """What a model's forward gets beside tokens of translations. source, mask: [texts, S]."""
    mask = torch.ones_like(source) if mask is None else mask
    with torch.inference_mode():
        outputs = model.get_encoder()(input_ids=source, attention_mask=mask)
    return {"encoder_outputs": outputs, "attention_mask": mask, CACHE: new_cache(model.config)}


@torch.inference_mode()
def read(model: PreTrainedModel, given: dict[str, Any], ids: Tensor) -> list[Tensor]:
    """Logits of tokens [steps], or [texts, steps], one at a time."""
    return [model(decoder_input_ids=i.view(-1, 1), use_cache=True, **given).logits for i in ids.unbind(-1)]


def held(cache: EncoderDecoderCache) -> list[Tensor]:
    """All that a cache holds."""
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return [t for x in layers if x.is_initialized for t in (x.keys, x.values)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether they have the same bits, each."""
    return all(map(torch.equal, a, b))
