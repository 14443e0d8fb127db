"""The recipes that quality.py compares, by their name in its table, and how to vary one."""

from collections.abc import Mapping
from dataclasses import replace

from trilobite.recipe import PRESETS, AnyFormat, Recipe, parse_format

HEAD16 = "search3, 16-bit head"
BEHIND = " (behind quantized)"
"""Ends the names of rows whose blocks are calibrated on what the quantized blocks before them make."""


def data_free() -> dict[str, Recipe]:
    """What is measured without a calibration text, by the name in the table."""
    found = {name: PRESETS[name] for name in ("rtn3", "hqq3", "search3")}
    for size in ("s1", "s2"):
        for method in ("hqq", "search"):
            found[f"milo-{size} ({method})"] = with_method(PRESETS[f"milo-{size}"], method)
    two = {
        name.replace("3", "2", 1) if name[-1] == "3" else f"{name} int2": with_bits(r, 2)
        for name, r in found.items()
    }
    found |= two
    found |= {name: PRESETS[name] for name in ("milo-s1-paper", "milo-s2-paper")}
    found["mixed-4-3"], found["mixed-4-2"] = PRESETS["mixed-4-3"], PRESETS["mixed-4-2"]
    found["int8"], found["int4"] = PRESETS["int8"], PRESETS["int4"]
    found[HEAD16] = without_head(PRESETS["search3"])
    return named(found)


def calibrated() -> dict[str, Recipe]:
    """What is measured with a calibration text, beside the data-free methods of as many bits."""
    found: dict[str, Recipe] = {}
    for bits in (2, 3, 4):
        for method in ("rtn", "hqq", "search"):
            found[f"{method}{bits}"] = with_bits(PRESETS[f"{method}3"], bits)
        found[f"gptq{bits}"] = PRESETS[f"gptq{bits}"]
        found[f"gptq{bits} (order)"] = with_method(PRESETS[f"gptq{bits}"], "gptq-order")
        found[f"milo-s1 (search) int{bits}"] = with_bits(PRESETS["milo-s1"], bits)
        if bits < 4:
            found[f"milo-s1 (gptq) int{bits}"] = with_method(found[f"milo-s1 (search) int{bits}"], "gptq")
        if bits == 2:  # near the bits of QuIP#
            for fmt in ("int2-g128-sym", "int2-g64-dq"):
                found[f"search {fmt}"] = with_format(PRESETS["search3"], fmt)
                found[f"gptq {fmt}"] = with_format(PRESETS["gptq2"], fmt)
        found[f"quip{bits}-free"] = PRESETS[f"quip{bits}-free"]
        found[f"quip{bits} (no E8)"] = with_format(PRESETS[f"quip{bits}"], f"grid-{bits}")
        found[f"quip{bits}"] = PRESETS[f"quip{bits}"]
        if bits < 4:
            found[f"quip{bits} (fourier)"] = with_format(PRESETS[f"quip{bits}"], f"e8p-{bits}-fourier")
    found["gptq3" + BEHIND] = PRESETS["gptq3"]
    return named(found)


def named(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Each recipe is called as its row is."""
    return {name: replace(r, name=slug(name)) for name, r in recipes.items()}


def slug(name: str) -> str:
    """A name for a folder and a recipe: `milo-s1 (hqq) int2` -> `milo-s1-hqq-int2`."""
    return "-".join(name.replace("(", "").replace(")", "").replace(",", "").split())


def with_method(recipe: Recipe, method: str) -> Recipe:
    """The same recipe with another method in every rule of the body; the head stays as it is."""
    rules = tuple(r if _is_head(r.format) else replace(r, method=method) for r in recipe.rules)
    return replace(recipe, rules=rules)


def with_bits(recipe: Recipe, bits: int) -> Recipe:
    """The same recipe with other codes in every rule of the body; the head stays as it is."""
    rules = tuple(
        r if r.format is None or _is_head(r.format) else replace(r, format=replace(r.format, bits=bits))
        for r in recipe.rules
    )
    return replace(recipe, rules=rules)


def with_format(recipe: Recipe, fmt: str) -> Recipe:
    """The same recipe with another format in every rule of the body; the head stays as it is."""
    rules = tuple(r if _is_head(r.format) else replace(r, format=parse_format(fmt)) for r in recipe.rules)
    return replace(recipe, rules=rules)


def without_head(recipe: Recipe) -> Recipe:
    """The same recipe with the output head in 16 bit."""
    return replace(recipe, rules=tuple(r for r in recipe.rules if not _is_head(r.format)))


def _is_head(fmt: AnyFormat | None) -> bool:
    return fmt is not None and fmt.bits == 8
