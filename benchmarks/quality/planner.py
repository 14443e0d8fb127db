"""Does the planner know what a plan will cost? Predicted loss against measured KL divergence.

    python -m benchmarks.quality.planner MODEL... [--plans 24] [--tokens 4096] [--page docs/results.md]

For each model: half of the plans are the planner's own, at budgets from 2.5 to 6 bits; the other half are at random
ones, made as if every part's sensitivity were another one (times e^N(0, 1.5)), so that plans of about as many bits
differ. Every matrix is quantized in each format once; a plan is the model with the weights that its matrices then stand
for, and its KL divergence is that from the original. Spearman's rank correlation is that of this and the predicted loss,
by the priors that ship and by sensitivities measured on the model (`trilobite sensitivity`). Draws the former (extra
`plot`). The last line is JSON.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.markdown import table
from benchmarks.lib.scoring import build, open_bench
from benchmarks.lib.script import add_page, add_text, parser, publish
from trilobite.checkpoint.roles import read_matrix
from trilobite.checkpoint.source import Source, open_source
from trilobite.evaluate.perplexity import score
from trilobite.formats.weight import dequantize
from trilobite.quantize.budget.choose import choose, measure_errors
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.loss import of_columns
from trilobite.quantize.run.lines import quantize_line
from trilobite.quantize.run.options import Options
from trilobite.quantize.run.planned import question_of
from trilobite.quantize.run.sensitivity import TOKENS, measure_sensitivity
from trilobite.runtime.load import load

ROOT = Path(__file__).resolve().parents[2]
LEAST, MOST = 2.5, 6.0
"""Bits of the budgets."""
SPREAD = 1.5
Sensitivities = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A plan. kind: planned or random    priors, measured: its loss as predicted by these    kl: nats per token."""

    name: str
    kind: str
    bits: float
    priors: float
    measured: float
    kl: float = 0.0


def unit(row: Mapping[str, Any]) -> str:
    """What `trilobite sensitivity` calls the unit of a row of an account."""
    return f"{row['layer']} {row['role']}: {row['part']}"


class Planner:
    """A model of which everything is measured that plans need."""

    def __init__(self, source: Source) -> None:
        """Measures importance, errors and sensitivities."""
        self.question, calibrator = question_of(
            source, Budget(bits=MOST), keep_unmatched=False, calibration=None, options=Options()
        )
        assert calibrator is not None
        self.importance = calibrator.measured
        self.errors = measure_errors(self.question, self.importance)
        self.measured: Sensitivities = measure_sensitivity(source, tokens=TOKENS)["sensitivities"]
        self._decoded: dict[tuple[str, int], Tensor] = {}

    def choose(self, bits: float, sensitivities: Sensitivities) -> Sequence[Mapping[str, Any]]:
        """The choices of a plan, one for each unit."""
        weights = sum(unit.weights for unit in self.question.units)
        budget = Budget(bits=bits, sensitivities=sensitivities)
        asked = replace(self.question, budget=budget, bound=int(bits * weights / 8))
        rows: Sequence[Mapping[str, Any]] = choose(asked, self.errors, self.importance).account["choices"]
        return rows

    def tensors(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """All of the model's weights, those of the body as decoded."""
        names = [str(c) for c in self.question.candidates]
        chosen = {
            i: names.index(row["format"])
            for unit, row in zip(self.question.units, rows, strict=True)
            for i in unit.matrices
        }
        return {
            line.matrix.name: self._tensor(i, chosen.get(i, 0))
            for i, line in enumerate(self.question.plans[0].lines)
        }

    def _tensor(self, i: int, candidate: int) -> Tensor:
        """A tensor as it is stored, decoded; of a quantized one in the format of a candidate."""
        plan = self.question.plans[candidate]
        line = plan.lines[i]
        key = line.matrix.name, candidate
        if key not in self._decoded:
            w = read_matrix(self.question.source, line.matrix)
            if line.format is None:
                self._decoded[key] = w.bfloat16().float()
            else:
                h = of_columns(self.importance, line.matrix) if line.importance else None
                n, k = line.matrix.shape
                self._decoded[key] = dequantize(quantize_line(w, line, plan.recipe, h)[0])[:n, :k]
        return self._decoded[key]


def plans(planner: Planner, count: int) -> list[tuple[Point, Sequence[Mapping[str, Any]]]]:
    """What is chosen, and predicted of it."""
    priors = {unit(row): row["sensitivity"] for row in planner.choose(MOST, {})}
    chance = random.Random(0)
    found = []
    for i in range(count):
        place, kind = i // 2 / max(1, (count - 1) // 2), ("planned", "random")[i % 2]
        bits = LEAST * (MOST / LEAST) ** (place if kind == "planned" else chance.random())
        wrong = {name: a * exp(SPREAD * chance.gauss(0, 1)) for name, a in priors.items()}
        rows = planner.choose(bits, wrong if kind == "random" else {})
        point = Point(
            name=f"{kind}-{i}",
            kind=kind,
            bits=8 * sum(row["bytes"] for row in rows) / sum(row["weights"] for row in rows),
            priors=sum(priors[unit(row)] * row["error"] for row in rows),
            measured=sum(planner.measured[unit(row)] * row["error"] for row in rows),
        )
        found.append((point, rows))
    return found


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's, of values without ties."""
    n = len(xs)
    x, y = (sorted(range(n), key=values.__getitem__) for values in (xs, ys))
    ranks = {i: r for r, i in enumerate(y)}
    return 1 - 6 * sum((r - ranks[i]) ** 2 for r, i in enumerate(x)) / (n * (n * n - 1))


def measure(model: Path, args: argparse.Namespace) -> list[Point]:
    """Score the plans of one model."""
    planner = Planner(open_source(str(model)))
    bench = open_bench(model, args.text, context=args.context, tokens=args.tokens)
    reference = load(str(model), dtype=torch.float32)
    points = []
    for point, rows in plans(planner, args.plans):
        made = {point.name: build(planner.tensors(rows), model)}
        found = score(made, bench.ids, context=bench.context, batch=bench.batch, reference=reference)
        points.append(replace(point, kl=found[point.name].kl or 0.0))
        print(f"{point.name}: {point.bits:.2f} bits, KL {points[-1].kl:.5f}", flush=True)
    return points


def draw(found: Mapping[str, Sequence[Point]], path: Path) -> None:
    """One panel a model, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found), 4), squeeze=False)
    for panel, (model, points) in zip(axes[0], found.items(), strict=True):
        for kind, color in (("planned", "tab:blue"), ("random", "tab:orange")):
            of_kind = [p for p in points if p.kind == kind]
            panel.scatter([p.priors for p in of_kind], [p.kl for p in of_kind], s=16, color=color, label=kind)
        rho = correlation([p.priors for p in points], [p.kl for p in points])
        panel.set(title=f"{model}: {rho:.3f}", xlabel="predicted loss", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL divergence from 16 bit, nats per token")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    args = _arguments()
    found = {model.name: measure(model, args) for model in args.models}
    rows, summary = [], {}
    for model, points in found.items():
        kl = [p.kl for p in points]
        by_priors = correlation([p.priors for p in points], kl)
        by_measured = correlation([p.measured for p in points], kl)
        ratios = sorted(p.measured / p.kl for p in points)
        rows.append(
            (
                model,
                str(len(points)),
                f"{min(kl):.4f} to {max(kl):.3f}",
                f"{by_priors:.3f}",
                f"{by_measured:.3f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            )
        )
        summary[model] = {
            "priors": by_priors,
            "measured": by_measured,
            "points": [[p.kind, p.bits, p.priors, p.measured, p.kl] for p in points],
        }
    draw(found, args.figure)
    columns = ("model", "plans", "KL", "rank correlation, priors", "measured", "predicted / KL, measured")
    publish(
        table(columns, rows),
        {"benchmark": "planner", "tokens": args.tokens, "models": summary},
        page=args.page,
        marker="planner",
    )


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", help="folders of original checkpoints")
    add_text(options, tokens=4096)
    options.add_argument("--plans", type=int, default=24)
    options.add_argument("--figure", type=Path, default=ROOT / "docs/figures/planner.png")
    add_page(options, "planner")
    return options.parse_args()


if __name__ == "__main__":
    main()
