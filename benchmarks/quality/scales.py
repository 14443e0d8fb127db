"""What do column scales, and importance without a text of one's own, save each method and format?

    python -m benchmarks.quality.scales MODEL... [--tokens 12288] [--page docs/results.md]

Compresses every model with each recipe of `RECIPES`, plain, with column scales, with importance from the text that
comes with Trilobite, and with both; prints the KL divergence from 16 bit of each. Neither costs bytes. The last line
is JSON.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.packed import pack
from benchmarks.lib.recipes import named, with_bits
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import add_page, add_text, add_work, parser, publish
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
    args = _arguments()
    chosen = {n: r for n, r in variants().items() if not args.recipes or n in args.recipes}
    kl: dict[str, dict[str, float]] = {name: {} for name in chosen}
    body: dict[str, float] = {}
    tokens = 0
    for model in args.models:
        bench = open_bench(model, args.text, context=args.context, tokens=args.tokens, memory=args.memory)
        packed = {
            name: pack(model, recipe, args.work, frequency=None, fresh=args.fresh)
            for name, recipe in chosen.items()
        }
        scores = bench.scores({name: p.path for name, p in packed.items()})
        for name, p in packed.items():
            found = scores[name].kl
            assert found is not None
            kl[name][model.name] = found
            body.setdefault(name, p.body)
            tokens = scores[name].tokens
    models = [model.name for model in args.models]
    rows = [(name, f"{body[name]:.2f}", *(f"{kl[name][m]:.4f}" for m in models)) for name in chosen]
    report = "\n".join(
        [
            f"KL in nats, {args.text.name}, {tokens:,} tokens predicted in windows of {args.context}; bits of the body "
            f"are those on {models[0]}:",
            "",
            table(("recipe", "bits", *models), rows),
        ]
    )
    summary: dict[str, Any] = {"benchmark": "scales", "tokens": tokens, "kl": kl, "body": body}
    publish(report, summary, page=args.page, marker="scales")


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", help="folders of original checkpoints")
    add_text(options, tokens=12288)
    options.add_argument("--recipes", nargs="*", help="only these, by their name in the table")
    add_work(options)
    options.add_argument("--fresh", action="store_true", help="compress everything anew")
    options.add_argument(
        "--memory", type=float, default=8.0, help="GB for the models that are measured together"
    )
    add_page(options, "scales")
    return options.parse_args()


if __name__ == "__main__":
    main()
