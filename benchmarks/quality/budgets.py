"""What is a planned recipe worth beside a preset of as many bits?

    python -m benchmarks.quality.budgets MODEL... [--tokens 12288] [--page docs/results.md]

Packs every model with the presets fine2, fine3 and fine4, and with the planner's answers to `--bits` of as many bits and
to `--bits 3.5`; prints the KL divergence from 16 bit of each. Bits are those of all matrices in attention, MLPs and
experts, scales included. The last line is JSON.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.packed import Packed, numel, pack
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import add_page, add_text, add_work, parser, publish
from trilobite.checkpoint.source import open_source
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.run.planned import plan_within
from trilobite.recipe import BODY_ROLES, PRESETS

RECIPES: dict[str, float] = {
    "fine2": 0,
    "--bits 2.5625": 2.5625,
    "--bits 3.5": 3.5,
    "fine3": 0,
    "--bits 3.5625": 3.5625,
    "fine4": 0,
    "--bits 4.3125": 4.3125,
}
"""Rows, and the bits of those that are planned."""


def made(model: Path, name: str, work: Path) -> Packed:
    """A model packed as a row says."""
    if not (bits := RECIPES[name]):
        return pack(model, PRESETS[name], work, frequency=None, fresh=True)
    planned = plan_within(open_source(str(model)), Budget(bits=bits))
    return pack(model, replace(planned.recipe, name=f"bits-{bits}"), work, frequency=None, fresh=True)


def body(packed: Packed) -> float:
    """Bits of a quantized weight of the body."""
    lines = [line for line in packed.plan.lines if line.format and line.matrix.role in BODY_ROLES]
    return 8 * sum(line.nbytes for line in lines) / sum(numel(line.matrix.shape) for line in lines)


def main() -> None:
    args = _arguments()
    names = [name for name in RECIPES if not args.recipes or name in args.recipes]
    kl: dict[str, dict[str, float]] = {name: {} for name in names}
    bits: dict[str, float] = {}
    tokens = 0
    for model in args.models:
        packed = {name: made(model, name, args.work) for name in names}
        bench = open_bench(model, args.text, context=args.context, tokens=args.tokens, memory=args.memory)
        scores = bench.scores({name: p.path for name, p in packed.items()})
        for name, p in packed.items():
            kl[name][model.name] = scores[name].kl or 0.0
            bits.setdefault(name, body(p))
            tokens = scores[name].tokens
    models = [model.name for model in args.models]
    rows = [(name, f"{bits[name]:.2f}", *(f"{kl[name][m]:.4f}" for m in models)) for name in names]
    report = "\n".join(
        [
            f"KL in nats, {args.text.name}, {tokens:,} tokens predicted in windows of {args.context}; bits on "
            f"{models[0]}:",
            "",
            table(("recipe", "bits", *models), rows),
        ]
    )
    summary: dict[str, Any] = {"benchmark": "budgets", "tokens": tokens, "kl": kl, "bits": bits}
    publish(report, summary, page=args.page, marker="budgets")


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", help="folders of original checkpoints")
    add_text(options, tokens=12288)
    options.add_argument("--recipes", nargs="*", help="only these, by their name in the table")
    options.add_argument(
        "--memory", type=float, default=6.0, help="GB for the models that are measured together"
    )
    add_work(options)
    add_page(options, "budgets")
    return options.parse_args()


if __name__ == "__main__":
    main()
