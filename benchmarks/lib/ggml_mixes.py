"""Which type `llama-quantize` gives to which matrix: the mixes that its names stand for (llama_tensor_get_type)."""

from dataclasses import dataclass

MIXES = {
    "Q2_K_S": "Q2_K",
    "Q2_K": "Q2_K",
    "IQ3_XXS": "IQ3_XXS",
    "Q3_K_S": "Q3_K",
    "IQ3_M": "IQ3_S",
    "Q3_K_M": "Q3_K",
    "IQ4_XS": "IQ4_XS",
    "Q4_K_S": "Q4_K",
}
"""The type that most matrices of a mix have."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What mixes depend on. sharing: query heads to a value head"""

    layers: int
    experts: int
    sharing: int


def type_in_mix(mix: str, part: str | None, layer: int, of: Shape, *, importance: bool) -> str:
    """The type of one matrix. part: its projection, as a checkpoint's roles call it"""
    own = MIXES[mix]
    early = layer < of.layers // 8
    eight = of.experts == 8
    if part == "v":
        if eight:
            return "Q8_0"
        shared = {"Q2_K": "Q4_K", "Q2_K_S": "Q4_K", "IQ3_XXS": "Q4_K", "IQ4_XS": "Q5_K"}
        apart = {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_XXS" if importance else "IQ3_S"}
        always = {
            "IQ3_M": "Q4_K",
            "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K",
            "Q4_K_S": "Q5_K" if layer < 4 else own,
        }
        return (always | (shared if of.sharing >= 4 else apart)).get(mix, own)
    if part in ("q", "k"):
        return "Q8_0" if eight and part == "k" else "IQ2_S" if mix == "IQ3_XXS" else own
    if part == "o":
        if eight:
            return "Q5_K" if mix != "Q2_K_S" else own
        return {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "IQ3_M": "Q4_K"}.get(mix, own)
    if part == "down":
        return _down(mix, layer, of, early=early, importance=importance)
    return own


def _down(mix: str, layer: int, of: Shape, *, early: bool, importance: bool) -> str:
    own = MIXES[mix]
    if mix == "Q2_K":
        return "Q3_K"
    if mix == "Q2_K_S":
        return "Q4_K" if early else own
    if mix == "IQ3_XXS" and not importance:
        return "Q4_K" if early else "Q3_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < of.layers // 16 else "Q4_K"
    if mix == "IQ3_M":
        more = early or layer >= 7 * of.layers // 8 or (layer - of.layers // 8) % 3 == 2
        return "Q4_K" if early or (of.experts == 8 and more) else own
    if mix == "IQ4_XS" and not importance:
        return "Q5_K" if early else own
    return "Q5_K" if mix == "Q4_K_S" and early else own
