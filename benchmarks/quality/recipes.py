"""What does each recipe cost a model? Bytes, bits per weight, perplexity, KL divergence, agreement, seconds.

    python -m benchmarks.quality.recipes MODEL [--tokens 8192] [-o FILE.md]
    python -m benchmarks.quality.recipes MODEL --calibration ../shared/data/train/wikipedia.txt

Compresses the model with every recipe of `data_free()` into the work folder (finished ones are used again,
`--fresh` makes all anew), then measures all of them in one pass over the text, so that the original runs once
per batch. With `--calibration` it is those of `calibrated()`: the original is run on that text once, its Hessians
are kept in the work folder, and all recipes take them from there.

Everything runs in float32: bf16 activations alone would cost as much as int8 does.

Prints a markdown table, whether the orderings hold that the methods promise, and one line of JSON.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.packed import Packed, bytes_on_disk, frequencies, hessians, pack, parameters
from benchmarks.lib.recipes import BEHIND, HEAD16, calibrated, data_free
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import add_model, add_output, add_page, add_text, add_work, parser, publish
from trilobite.evaluate.perplexity import REFERENCE, Score
from trilobite.quantize.calibrate.windows import SAMPLES, Calibration


def rows_of(
    packed: Mapping[str, Packed], scores: Mapping[str, Score], original: Path
) -> list[dict[str, Any]]:
    """One row of plain data for every recipe, the original first."""
    first, some = next(iter(scores.values())), next(iter(packed.values()))
    size = bytes_on_disk(original)
    row: dict[str, Any] = {
        "name": "16 bit",
        "bytes": size,
        "bits": 8 * size / parameters(some.plan),
        "body": 16.0,
    }
    rows = [row | {"perplexity": first.reference_perplexity, "kl": 0.0, "top1": 1.0, "seconds": 0.0}]
    for name, p in packed.items():
        s = scores[name]
        row = {"name": name, "bytes": p.bytes, "bits": p.bits, "body": p.body, "seconds": p.seconds}
        rows.append(row | {"perplexity": s.perplexity, "kl": s.kl, "top1": s.top1})
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of one model."""
    base = rows[0]["perplexity"]
    header = ("recipe", "MB", "bits/weight", "body", "perplexity", "loss", "KL", "top-1", "seconds")
    cells = [
        (
            r["name"],
            f"{r['bytes'] / 1e6:.2f}",
            f"{r['bits']:.2f}",
            f"{r['body']:.2f}",
            f"{r['perplexity']:.2f}",
            f"{r['perplexity'] / base - 1:+.2%}",
            f"{r['kl']:.5f}",
            f"{r['top1']:.3f}",
            f"{r['seconds']:.1f}",
        )
        for r in rows
    ]
    return table(header, cells)


def checks(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """What the methods promise of the recipes that were measured, and whether it came out."""
    kl = {r["name"]: r["kl"] for r in rows}
    perplexity = {r["name"]: r["perplexity"] for r in rows}
    orders = (
        ("INT3", ("16 bit", "milo-s2 (search)", "milo-s1 (search)", "search3", "hqq3", "rtn3")),
        ("INT3, HQQ inside", ("milo-s2 (hqq)", "milo-s1 (hqq)", "hqq3")),
        ("INT2", ("milo-s2 (search) int2", "milo-s1 (search) int2", "search2", "hqq2", "rtn2")),
        ("2 bits, calibrated", ("quip2", "quip2 (no E8)", "gptq2", "search2", "rtn2")),
        ("2 to 2.13 bits", ("quip2", "quip2 (no E8)", "gptq int2-g128-sym", "search int2-g128-sym")),
        ("3 bits, calibrated", ("quip3", "quip3 (no E8)", "gptq3", "search3", "rtn3")),
        ("4 bits, calibrated", ("quip4", "quip4 (no E8)", "gptq4", "search4", "rtn4")),
        *((f"{b} bits, Hadamard and Fourier", (f"quip{b}", f"quip{b} (fourier)")) for b in (2, 3)),
        *((f"{b} bits, ranks", (f"milo-s1 (gptq) int{b}", f"gptq{b}")) for b in (2, 3)),
        ("propagation", ("gptq3" + BEHIND, "gptq3")),
        ("8, 4 and 3 bit", ("int8", "int4", "mixed-4-3", "search3")),
    )
    found = []
    for title, order in orders:
        names = [name for name in order if name in kl]
        values = [kl[name] for name in names]
        chain = " < ".join(f"{name} {value:.5f}" for name, value in zip(names, values, strict=True))
        if len(names) > 1:
            found.append((f"KL at {title}: {chain}", values == sorted(values)))
    if {"hqq2", "search2"} <= kl.keys():
        ratio = kl["hqq2"] / kl["search2"]
        found.append((f"KL at INT2: HQQ is {ratio:.2f} times search (wanted: above 1.2)", ratio > 1.2))
    if {"search3", HEAD16} <= kl.keys():
        moved = perplexity["search3"] / perplexity[HEAD16] - 1
        found.append((f"8-bit head: perplexity moves by {moved:+.3%} (limit 0.1 %)", abs(moved) < 1e-3))
    return found


def main() -> None:
    args = _arguments()
    bench = open_bench(args.model, args.text, context=args.context, tokens=args.tokens, memory=args.memory)
    recipes = calibrated() if args.calibration else data_free()
    chosen = {n: r for n, r in recipes.items() if not args.recipes or n in args.recipes}
    frequency = frequencies(args.model, args.work)
    text = shared = None
    notes = []
    if args.calibration:
        text = Calibration(text=args.calibration, samples=args.samples, context=args.context)
        shared, seconds = hessians(args.model, args.work, text)
        notes = [
            f"Calibrated on {args.samples} windows of {args.context} tokens of {args.calibration.name}; the Hessians of "
            f"the original blocks took {seconds:.1f} s once, which no row counts but those behind quantized blocks."
        ]
    packed: dict[str, Packed] = {}
    for name, recipe in chosen.items():
        calibration = text if name.endswith(BEHIND) else shared
        packed[name] = pack(
            args.model, recipe, args.work, frequency=frequency, calibration=calibration, fresh=args.fresh
        )
        print(f"{name}: {packed[name].bytes / 1e6:.2f} MB, {packed[name].seconds:.1f} s", flush=True)
    scores = bench.scores({name: p.path for name, p in packed.items()})
    rows = rows_of(packed, scores, args.model)
    first = next(iter(scores.values()))
    count = parameters(next(iter(packed.values())).plan)
    lines = [
        f"`{args.model.name}`, {count:,} parameters, {args.text.name}, "
        f"{first.tokens:,} tokens predicted in windows of {args.context}:",
        "",
        *(line for note in notes for line in (note, "")),
        markdown(rows),
    ]
    verdicts = checks(rows)
    lines += ["", *(f"- {text}: **{'yes' if good else 'NO'}**" for text, good in verdicts)]
    report = "\n".join(lines).strip()
    summary: dict[str, Any] = {
        "benchmark": "quality",
        "model": args.model.name,
        "context": args.context,
        "tokens": first.tokens,
    }
    names = {REFERENCE: asdict(first)["reference_perplexity"]}
    summary |= names | {"rows": rows, "checks": dict(verdicts)}
    marker = f"{'calibrated' if args.calibration else 'quality'}-{args.model.name}"
    publish(report, summary, page=args.page, marker=marker, output=args.output)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    add_model(options)
    add_text(options, tokens=0)
    options.add_argument("--calibration", type=Path, help="measure the calibrated recipes, on this text")
    options.add_argument(
        "--samples", type=int, default=SAMPLES, help="calibration windows of --context tokens"
    )
    options.add_argument("--recipes", nargs="*", help="only these, by their name in the table")
    add_work(options)
    options.add_argument("--fresh", action="store_true", help="compress everything anew")
    options.add_argument(
        "--memory", type=float, default=8.0, help="GB for the models that are measured together"
    )
    add_output(options)
    add_page(options, "quality-MODEL")
    return options.parse_args()


if __name__ == "__main__":
    main()
