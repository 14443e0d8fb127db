"""Scripts that print one table: a row for each recipe, a column of KL divergences for each model."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.divergence import Found, divergences, packed_variant
from benchmarks.lib.markdown import table
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import add_page, add_text, add_work, parser, publish
from trilobite.quantize.budget.goal import Budget
from trilobite.recipe import Recipe


def run(marker: str, description: str | None, recipes: Mapping[str, Recipe | Budget]) -> None:
    """Measure what the command line asks for, and publish it under the name of a marker. recipes: by row"""
    args = _arguments(marker, description)
    chosen = {n: r for n, r in recipes.items() if not args.recipes or n in args.recipes}
    found, tokens = {}, 0
    for model in args.models:
        bench = open_bench(model, args.text, context=args.context, tokens=args.tokens)
        tokens = len(bench.ids) // bench.context * (bench.context - 1)
        variants = {name: packed_variant(bench, r, args.work) for name, r in chosen.items()}
        kept = args.work / model.name / f"{marker}.json"
        found[model.name] = divergences(bench, variants, kept, fresh=args.fresh)
    report = (
        f"KL in nats, {args.text.name}, {tokens:,} tokens predicted in windows of {args.context}; bits of the body are "
        f"those on {next(iter(found))}:\n\n{divergence_table(found, list(chosen))}"
    )
    summary: dict[str, Any] = {
        "benchmark": marker,
        "tokens": tokens,
        "kl": {name: {model: rows[name].kl for model, rows in found.items()} for name in chosen},
        "bits": {name: {model: rows[name].bits for model, rows in found.items()} for name in chosen},
    }
    publish(report, summary, page=args.page, marker=marker)


def divergence_table(found: Mapping[str, Mapping[str, Found]], names: Sequence[str]) -> str:
    """Bits are those on the first model. found: by model, by recipe"""
    first = next(iter(found.values()))
    rows = [
        (name, f"{first[name].bits:.2f}", *(f"{rows[name].kl:.4f}" for rows in found.values()))
        for name in names
    ]
    return table(("recipe", "bits", *found), rows)


def _arguments(marker: str, description: str | None) -> argparse.Namespace:
    options = parser(description)
    options.add_argument("models", type=Path, nargs="+", help="folders of original checkpoints")
    add_text(options, tokens=12288)
    options.add_argument("--recipes", nargs="*", help="only these, by their name in the table")
    options.add_argument("--fresh", action="store_true", help="measure anew what earlier runs found")
    add_work(options, "what is found stays here")
    add_page(options, marker)
    return options.parse_args()
