"""A checkpoint with the column scales that a recipe asks for."""

from dataclasses import replace
from functools import partial

from trilobite.checkpoint.roles import identify, text_config
from trilobite.checkpoint.source import Source
from trilobite.errors import RecipeError
from trilobite.quantize.columns.find import column_scales
from trilobite.quantize.columns.rescaling import RescaledWeights
from trilobite.quantize.columns.streams import KNOWN, find_streams
from trilobite.recipe import Recipe

REMEDY = "choose `columns: none` (--columns none)"


def with_column_scales(source: Source, recipe: Recipe, *, keep_unmatched: bool = False) -> Source:
    """The source, rescaled where the recipe asks for it. Reads no weights yet.

    Raises RecipeError for an architecture of which it is not known what reads what.
    """
    if recipe.columns == "none":
        return source
    matrices = identify(source, extra_rules=recipe.roles, keep_unmatched=keep_unmatched)
    streams = find_streams(source, matrices)
    if not streams:
        kind = text_config(source).get("model_type")
        raise RecipeError(
            f"recipe {recipe.name}: column scales move into norms and other matrices, which is known for "
            f"{', '.join(KNOWN)}, and this is {kind!r}; {REMEDY}"
        )
    find = partial(column_scales, source)
    return replace(
        source, rescaling=RescaledWeights(source, matrices, streams, find, f"columns {recipe.columns}")
    )
