"""Speed of CTranslate2 on a dense T5 of the size that a token meets in a translator with one expert a token.

    echo '{"batches": [[["▁a", "</s>"]]], "lengths": [4], "beams": [1, 5], ...}' | \
      python -m benchmarks.lib.dense_ctranslate2 CONVERTED int8

The weights are random and would end nowhere: a batch decodes as many tokens as its references have on average, which is
the best case, since no sentence waits for a longer one. Prints a last line of JSON, as plain_translation does.
"""

import importlib.util
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

DTYPES = {"fp32": "float32", "int8": "int8"}
"""What CTranslate2 computes in, by the name in the table."""
COPIED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads")


def installed() -> bool:
    """Whether there is a CTranslate2 here."""
    return importlib.util.find_spec("ctranslate2") is not None


def write_dense(model: Path, folder: Path) -> Path:
    """A T5 of a Switch model's sizes, one feed-forward layer in the place of its experts, converted."""
    import torch
    from ctranslate2.converters import TransformersConverter
    from transformers import AutoConfig, AutoTokenizer, T5Config, T5ForConditionalGeneration

    converted = folder / "converted"
    if not converted.exists():
        original = AutoConfig.from_pretrained(model)
        torch.manual_seed(0)
        config = T5Config(
            **{name: getattr(original, name) for name in COPIED},
            feed_forward_proj=original.dense_act_fn,
            decoder_start_token_id=original.decoder_start_token_id,
            pad_token_id=original.pad_token_id,
            eos_token_id=original.eos_token_id,
        )
        T5ForConditionalGeneration(config).save_pretrained(folder / "dense")
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / "dense")
        TransformersConverter(str(folder / "dense")).convert(str(converted), force=True)
    return converted


def run(translator: Any, batch: list[list[str]], beams: int, length: int) -> int:
    """Translate one batch; returns the tokens made."""
    found = translator.translate_batch(
        batch, beam_size=beams, min_decoding_length=length, max_decoding_length=length
    )
    return sum(len(one.hypotheses[0]) for one in found)


def main() -> None:
    import ctranslate2

    job = json.loads(sys.stdin.read())
    translator = ctranslate2.Translator(
        sys.argv[1], compute_type=DTYPES[sys.argv[2]], inter_threads=1, intra_threads=job["threads"]
    )
    found = []
    for beams in job["beams"]:
        for batches, lengths in zip(job["batches"], job["lengths"], strict=True):
            run(translator, batches[0][:2], beams, 4)
            best = (float("inf"), 0)
            for _ in range(job["rounds"]):
                started = time.perf_counter()
                both = zip(batches, lengths, strict=True)
                tokens = sum(run(translator, batch, beams, length) for batch, length in both)
                best = min(best, (time.perf_counter() - started, tokens))
            found.append(best)
    size = (Path(sys.argv[1]) / "model.bin").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cells": found, "bytes": size, "peak": peak}))


if __name__ == "__main__":
    main()
