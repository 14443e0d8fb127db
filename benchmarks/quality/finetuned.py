"""What is training worth that moves no code: block by block, then the whole model, in our order and as published?

    python -m benchmarks.quality.finetuned MODEL [--tokens 16384] [--page docs/results.md]

`quip2` with the Hessians of the original blocks, which all rows share, and each of `--finetune`. `paper-` is Algorithm 5
of QuIP# as printed: after each linear of a block is quantized, what is left of the block is trained. Seconds are
those of compressing, with finished Hessians. The last line is JSON.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.packed import hessians, pack
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import TRAINING_TEXT, add_model, add_page, add_text, add_work, parser, publish
from trilobite.quantize.calibrate.windows import FINETUNES, Calibration
from trilobite.recipe import PRESETS

NONE = "no"


def main() -> None:
    args = _arguments()
    bench = open_bench(args.model, args.text, context=args.context, tokens=args.tokens)
    text = Calibration(text=args.calibration, samples=args.samples, context=args.context)
    shared, _ = hessians(args.model, args.work, text)
    ground = replace(text, propagate="original", hessians=shared.hessians)
    packed = {}
    for name in args.finetune:
        calibration = ground if name == NONE else replace(ground, finetune=name)
        packed[name] = pack(
            args.model,
            PRESETS[args.recipe],
            args.work,
            frequency=None,
            calibration=calibration,
            fresh=args.fresh,
            name=f"{args.recipe}-{name}",
        )
        print(f"{name}: {packed[name].seconds:.1f} s", flush=True)
    scores = bench.scores({name: p.path for name, p in packed.items()})
    rows: list[dict[str, Any]] = [
        {
            "finetune": name,
            "bits": packed[name].bits,
            "perplexity": s.perplexity,
            "kl": s.kl,
            "top1": s.top1,
            "seconds": packed[name].seconds,
        }
        for name, s in scores.items()
    ]
    first = next(iter(scores.values()))
    cells = [
        (
            r["finetune"],
            f"{r['bits']:.2f}",
            f"{r['perplexity']:.2f}",
            f"{r['kl']:.4f}",
            f"{r['top1']:.3f}",
            f"{r['seconds']:.0f}",
        )
        for r in rows
    ]
    head = ("--finetune", "bits/weight, all files", "perplexity", "KL", "top-1", "seconds")
    report = (
        f"`{args.model.name}`, {args.recipe}, {args.samples} windows of {args.context} tokens of "
        f"{args.calibration.name}; {args.text.name}, {first.tokens:,} tokens predicted, perplexity in 16 bit "
        f"{first.reference_perplexity:.2f}:\n\n{table(head, cells)}"
    )
    summary = {"benchmark": "finetuned", "model": args.model.name, "recipe": args.recipe, "rows": rows}
    publish(report, summary, page=args.page, marker=f"finetuned-{args.model.name}")


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    add_model(options)
    add_text(options, tokens=16384)
    options.add_argument("--recipe", choices=[n for n in PRESETS if n.startswith("quip")], default="quip2")
    options.add_argument("--calibration", type=Path, default=TRAINING_TEXT, help="what is trained on")
    options.add_argument("--samples", type=int, default=96, help="calibration windows of --context tokens")
    options.add_argument("--finetune", nargs="+", choices=(NONE, *FINETUNES), default=[NONE, *FINETUNES])
    options.add_argument("--fresh", action="store_true", help="compress everything anew")
    add_work(options)
    add_page(options, "finetuned-MODEL")
    return options.parse_args()


if __name__ == "__main__":
    main()
