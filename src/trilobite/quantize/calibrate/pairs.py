"""What to calibrate an encoder-decoder on: pairs of sentences, drawn by a seed."""

import hashlib
import json
import random

from trilobite.checkpoint.source import Source
from trilobite.errors import CalibrationError
from trilobite.models.auto import read_config
from trilobite.models.pairs import Pair, check_pairs, encode_pairs, pad, read_pairs
from trilobite.quantize.calibrate.windows import (
    Calibration,
    Windows,
    calibration_tokenizer,
    draw_windows,
    window_length,
)

PAIRS = 8192
"""About as many tokens as 128 windows of 2048."""


def draw(source: Source, calibration: Calibration) -> Windows:
    """Windows of a text, or for an encoder-decoder pairs of two. Raises CalibrationError where it is the other one."""
    assert calibration.text is not None
    config = read_config(source)
    if not config.is_encoder_decoder:
        if calibration.target is not None:
            raise CalibrationError(f"{source}: a decoder-only model has no use for --target-text; drop it")
        return draw_windows(source, calibration)
    if calibration.target is None:
        raise CalibrationError(
            f"{source}: an encoder-decoder model; give the translation of the text too: --target-text FILE"
        )
    longest = window_length(source, calibration)
    tokenizer = calibration_tokenizer(source)
    pairs = encode_pairs(tokenizer, *read_pairs(calibration.text, calibration.target, CalibrationError))
    short = [pair for pair in pairs if max(map(len, pair)) <= longest]
    if not short:
        raise CalibrationError(
            f"{calibration.text}: all sentences have more than {longest} tokens; split them"
        )
    count = min(PAIRS if calibration.samples is None else calibration.samples, len(short))
    chosen = random.Random(calibration.seed).sample(short, count)
    check_pairs(chosen, config, None, str(source.path), CalibrationError)
    chosen.sort(key=lambda pair: (len(pair[1]), len(pair[0])))  # batches of about one length: little padding
    return _windows(chosen, calibration)


def _windows(pairs: list[Pair], calibration: Calibration) -> Windows:
    ids = pad([a for a, _ in pairs], 0)
    identity = {
        "digest": hashlib.sha256(json.dumps(pairs).encode()).hexdigest(),
        "samples": len(pairs),
        "context": max(len(side) for pair in pairs for side in pair),
        "seed": calibration.seed,
        "propagate": calibration.propagate,
    }
    return Windows(ids=ids, identity=identity, pairs=pairs)
