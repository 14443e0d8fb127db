"""Calibrated runs of small models: their tokenizer, their text, their settings."""

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from support.architectures import SEQ2SEQ, TINY_CONFIGS
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.run.compress import Result, compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import Recipe, load_recipe

DECODERS = [name for name in TINY_CONFIGS if name not in SEQ2SEQ]
SERIAL = Options(jobs=1, device="cpu")
CONTEXT, SAMPLES = 32, 9
"""Nine windows: a batch that is not full comes last when a forward pass takes four windows."""


def words(count: int, seed: int = 0, vocabulary: int = 256) -> str:
    chance = random.Random(seed)
    return " ".join(f"w{chance.randrange(2, vocabulary)}" for _ in range(count))


def add_tokenizer(path: Path, vocabulary: int = 256, *, begins: bool = False) -> None:
    """A token a word, `w17` is 17; begins: with token 1."""
    known = {"<unk>": 0, "<s>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>").save_pretrained(path)


def calibration(text: Path | None, **settings: Any) -> Calibration:
    return Calibration(**{"text": text, "samples": SAMPLES, "context": CONTEXT, **settings})


def run(
    source: Path, dst: Path, ground: Calibration, recipe: str | Recipe = "gptq3", options: Options = SERIAL
) -> Result:
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return compress(str(source), dst, chosen, calibration=ground, options=options)
