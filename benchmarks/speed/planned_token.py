"""Is one token in the formats of a planned recipe as fast as in INT3 g64, at equal bytes?

    python -m benchmarks.speed.planned_token [--bits 3.5] [--page docs/results.md]

Experts of Mixtral-8x7B's shapes with random codes, in the pairs of formats (gate and up, down) that the planner gives
the layers of a trained model, and in INT3 g64: milliseconds a layer in calls of `experts` as models make them, in turn,
round after round, as machines have moods. `of INT3 g64` is the time a byte over that of INT3 g64 in the same round,
median. The last line is JSON.
"""

import statistics
from collections import Counter
from pathlib import Path

from benchmarks.lib.layers import MIXTRAL, make_layer
from benchmarks.lib.markdown import table
from benchmarks.lib.script import SHARED, add_machine, add_page, of_machine, parser, publish
from benchmarks.speed.cpu import Result, measure
from trilobite.checkpoint.source import open_source
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.run.planned import plan_within
from trilobite.recipe import Format, parse_format

Pair = tuple[Format, Format]
PLAIN = Format(bits=3, group=64)


def planned_pairs(model: Path, bits: float) -> Counter[Pair]:
    """What gate and up, and down, get, with the number of layers."""
    found: dict[str, dict[str, Format]] = {}
    for row in plan_within(open_source(str(model)), Budget(bits=bits)).account["choices"]:
        if row["role"] == "expert":
            fmt = parse_format(row["format"])
            assert isinstance(fmt, Format), "choose a budget that formats of integers meet"
            found.setdefault(row["layer"], {})[row["part"]] = fmt
    return Counter((parts["gate, up"], parts["down"]) for parts in found.values())


def race(pairs: list[Pair], mode: str, rounds: int) -> dict[Pair, list[Result]]:
    """By pair: what each round measured."""
    layers = {pair: make_layer(MIXTRAL, pair[0], down=pair[1]) for pair in pairs}
    found: dict[Pair, list[Result]] = {pair: [] for pair in pairs}
    for _ in range(rounds):
        for pair, (experts, per_expert) in layers.items():
            found[pair].append(measure(MIXTRAL, experts, per_expert, 1, 9, mode))
    return found


def main() -> None:
    """A row for each pair, and one for the mean layer of the model."""
    options = parser(__doc__)
    options.add_argument("--model", type=Path, default=SHARED / "models" / "tiny-mixtral")
    options.add_argument("--bits", type=float, default=3.5)
    options.add_argument("--rounds", type=int, default=5)
    add_page(options, "planned-token")
    add_machine(options)
    args = options.parse_args()
    counts = planned_pairs(args.model, args.bits)
    plain = PLAIN, PLAIN
    rows, summary = [], {}
    for mode in ("exact", "int8"):
        found = race([plain, *counts], mode, args.rounds)
        against = {
            pair: statistics.median(p.gigabytes / r.gigabytes for r, p in zip(of, found[plain], strict=True))
            for pair, of in found.items()
        }
        for pair, of in found.items():
            figures = [
                statistics.median(getattr(r, name) for r in of) for name in ("milliseconds", "gigabytes")
            ]
            name = "INT3 g64" if pair == plain else ", ".join(map(str, pair))
            layers = str(counts[pair]) if counts[pair] else ""
            rows.append((name, mode, layers, *(f"{f:.2f}" for f in figures), f"{against[pair]:.2f}"))
            print("  ".join(rows[-1]), flush=True)
        mean = sum(n * against[pair] for pair, n in counts.items()) / counts.total()
        rows.append((f"mean layer of --bits {args.bits:g}", mode, str(counts.total()), "", "", f"{mean:.2f}"))
        summary[mode] = mean
    head = ("gate and up, down", "activations", "layers", "ms", "GB/s", "of INT3 g64")
    publish(
        table(head, rows),
        {"benchmark": "planned-token", "mean": summary},
        page=args.page,
        marker=of_machine("planned-token", args.machine),
    )


if __name__ == "__main__":
    main()
