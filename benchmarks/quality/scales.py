"""What do column scales, and importance without a text of one's own, save each method and format?

    python -m benchmarks.quality.scales MODEL... [--tokens 12288] [--page docs/results.md]

Compresses every model with each recipe of `RECIPES`, plain, with column scales, with importance from the text that
comes with Trilobite, and with both; prints the KL divergence from 16 bit of each. Neither costs bytes. The last line
is JSON.
"""

from dataclasses import replace

from benchmarks.lib.divergence_table import run
from benchmarks.lib.recipes import named, with_bits
from trilobite.recipe import PRESETS, Recipe

RECIPES: dict[str, Recipe] = {
    "search2": with_bits(PRESETS["search3"], 2),
    "search3": PRESETS["search3"],
    "int4": PRESETS["int4"],
    "milo-s1": PRESETS["milo-s1"],
    "super2": PRESETS["super2"],
    "super3": PRESETS["super3"],
    "super4": PRESETS["super4"],
}
VARIANTS = (
    ("", "none", "none"),
    (" columns", "sinkhorn", "none"),
    (" importance", "none", "builtin"),
    (" both", "sinkhorn", "builtin"),
)
"""How a name in the table ends, columns, importance."""


def variants() -> dict[str, Recipe]:
    """All recipes, by their name in the table."""
    return named(
        {
            name + ending: replace(recipe, columns=columns, importance=importance)
            for name, recipe in RECIPES.items()
            for ending, columns, importance in VARIANTS
        }
    )


def main() -> None:
    """Measure, print."""
    run("scales", __doc__, variants())


if __name__ == "__main__":
    main()
