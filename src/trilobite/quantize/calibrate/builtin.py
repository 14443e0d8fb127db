"""The text that comes with us, for importance alone: prose, a few thousand tokens."""

from pathlib import Path

from trilobite.checkpoint.roles import text_config
from trilobite.checkpoint.source import Source
from trilobite.errors import RecipeError
from trilobite.quantize.calibrate.windows import CONTEXT, Calibration

TEXT = Path(__file__).with_name("builtin.txt")
LENGTH = 512
"""Tokens of a window: importance asks for little context, and attention costs less."""


def builtin_calibration(source: Source) -> Calibration:
    """All windows of the text, through the original blocks: each is run once.

    Raises RecipeError for an encoder-decoder, which reads pairs.
    """
    check_decoder(source, "builtin")
    longest = int(text_config(source).get("max_position_embeddings") or CONTEXT)
    return Calibration(text=TEXT, context=min(LENGTH, longest), propagate="original")


def check_decoder(source: Source, importance: str) -> None:
    """Raise RecipeError for an encoder-decoder."""
    if text_config(source).get("is_encoder_decoder"):
        raise RecipeError(
            f"{source}: importance {importance} is for decoder-only models; choose importance text with "
            "--calibration and --target-text, or importance none"
        )
