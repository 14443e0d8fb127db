"""Scripts that print one table: a row for each recipe, a column of KL divergences for each model.

With --recipes, rows that a page has of other recipes stay there, if it has the same models and tokens.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.divergence import Found, divergences, packed_variant
from benchmarks.lib.markdown import cells, fragment, table
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import add_page, add_text, add_work, parser, publish
from trilobite.quantize.budget.goal import Budget
from trilobite.recipe import Recipe

Rows = list[tuple[str, ...]]
"""Cells of a table, its header first."""


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
    head = (
        f"KL in nats, {args.text.name}, {tokens:,} tokens predicted in windows of {args.context}; bits of the body are "
        f"those on {next(iter(found))}:"
    )
    rows = divergence_rows(found, list(chosen))
    earlier = fragment(args.page.read_text(encoding="utf-8"), marker) if args.page else ""
    if head in earlier:
        rows = merged(rows, cells(earlier), list(recipes))
    report = f"{head}\n\n{table(rows[0], rows[1:])}"
    summary: dict[str, Any] = {
        "benchmark": marker,
        "tokens": tokens,
        "kl": {name: {model: rows[name].kl for model, rows in found.items()} for name in chosen},
        "bits": {name: {model: rows[name].bits for model, rows in found.items()} for name in chosen},
    }
    publish(report, summary, page=args.page, marker=marker)


def divergence_rows(found: Mapping[str, Mapping[str, Found]], names: Sequence[str]) -> Rows:
    """A header and a row for each name. Bits are those on the first model. found: by model, by recipe"""
    first = next(iter(found.values()))
    rows = [
        (name, f"{first[name].bits:.2f}", *(f"{rows[name].kl:.4f}" for rows in found.values()))
        for name in names
    ]
    return [("recipe", "bits", *found), *rows]


def merged(rows: Rows, earlier: Rows, order: Sequence[str]) -> Rows:
    """Rows, and those of an earlier table of the same columns whose recipes have none, in an order of recipes."""
    if not earlier or earlier[0] != rows[0]:
        return rows
    of = {row[0]: row for row in (*earlier[1:], *rows[1:])}
    return [rows[0], *(of[name] for name in order if name in of)]


def _arguments(marker: str, description: str | None) -> argparse.Namespace:
    options = parser(description)
    options.add_argument("models", type=Path, nargs="+", help="folders of original checkpoints")
    add_text(options, tokens=12288)
    options.add_argument("--recipes", nargs="*", help="only these, by their name in the table")
    options.add_argument("--fresh", action="store_true", help="measure anew what earlier runs found")
    add_work(options, "what is found stays here")
    add_page(options, marker)
    return options.parse_args()
