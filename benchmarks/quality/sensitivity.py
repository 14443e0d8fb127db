"""How much does each part of a model suffer from errors, and what of that may be expected of other models?

    python -m benchmarks.quality.sensitivity ../shared/models/tiny-mixtral ../shared/models/tiny-mixtral-outliers \
      ../shared/models/tiny-mixtral-spiky ../shared/models/tiny-deepseek [--page docs/results.md] [--write]

Measures every model as `trilobite sensitivity` does, prints the divergence for a normalized error of 1 by role, part and
depth, and with --write makes the table of priors that the planner ships with of them: geometric means over models, those
that compute the same function (as the first two words of their names tell) together as one, and all moved to one level.
Depths at which no model has a part follow the mean course of all others. The last line is JSON, with the least and the
largest of what was found over what ships.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_page, parser, publish
from trilobite.checkpoint.source import open_source
from trilobite.quantize.budget.priors import TABLE
from trilobite.quantize.run.sensitivity import TOKENS, measure_sensitivity

DEPTHS = 6
Course = list[float | None]
"""The logarithm of a sensitivity at each depth, where it is known."""


def courses(measured: Mapping[str, Any]) -> dict[str, Course]:
    """By role and part: log of a layer's sensitivity times the number of layers."""
    rows = measured["measured"]
    layers = len({row["layer"] for row in rows})
    found: dict[str, Course] = {}
    for row in rows:
        depth = round(int(row["layer"]) / max(1, layers - 1) * (DEPTHS - 1))
        course = found.setdefault(f"{row['role']}: {row['part']}", [None] * DEPTHS)
        course[depth] = math.log(layers * row["kl"] / row["error"])
    return found


def mean(of: Sequence[Mapping[str, Course]]) -> dict[str, Course]:
    """The mean at each depth of those that know it."""
    return {
        name: [
            _mean([v for course in (c[name] for c in of if name in c) if (v := course[d]) is not None])
            for d in range(DEPTHS)
        ]
        for name in dict.fromkeys(name for c in of for name in c)
    }


def levelled(of: Sequence[Mapping[str, Course]]) -> list[dict[str, Course]]:
    """The same, moved up or down as a whole to one level, so that a mean does not depend on who knows which depth."""
    common = [
        (name, d)
        for name in of[0]
        for d in range(DEPTHS)
        if all(c.get(name, [None] * DEPTHS)[d] is not None for c in of)
    ]
    levels = [_mean([v for name, d in common if (v := c[name][d]) is not None]) or 0.0 for c in of]
    shifts = [sum(levels) / len(levels) - level for level in levels]
    return [
        {name: [None if v is None else v + shift for v in course] for name, course in c.items()}
        for c, shift in zip(of, shifts, strict=True)
    ]


def completed(found: Mapping[str, Course]) -> dict[str, list[float]]:
    """Every depth of every part, and of every role."""
    whole = [course for course in found.values() if None not in course]
    usual = [_mean([v for course in whole if (v := course[d]) is not None]) for d in range(DEPTHS)]
    filled: dict[str, list[float]] = {}
    for name, course in found.items():
        shifts = [v - u for v, u in zip(course, usual, strict=True) if v is not None and u is not None]
        shift = _mean(shifts) or 0.0
        filled[name] = [(u or 0.0) + shift if v is None else v for v, u in zip(course, usual, strict=True)]
    for role in dict.fromkeys(name.partition(":")[0] for name in found):
        parts = [course for name, course in filled.items() if name.startswith(f"{role}: ")]
        filled[role] = [sum(column) / len(column) for column in zip(*parts, strict=True)]
    return filled


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def main() -> None:
    args = _arguments()
    by_model: dict[str, dict[str, Course]] = {}
    for model in args.models:
        measured = measure_sensitivity(open_source(str(model)), tokens=args.tokens)
        by_model[model.name] = courses(measured)
        print(f"{model.name}: {sum(row['kl'] for row in measured['measured']):.4f} of all units", flush=True)
    families: dict[str, list[dict[str, Course]]] = {}
    for name, found in by_model.items():
        families.setdefault("-".join(name.split("-")[:2]), []).append(found)
    priors = completed(mean(levelled([mean(of_family) for of_family in families.values()])))
    values = {name: [float(f"{math.exp(v):.3g}") for v in course] for name, course in sorted(priors.items())}
    shipped = json.loads(TABLE.read_text())["sensitivities"]
    moved = [
        v / s for name in values.keys() & shipped for v, s in zip(values[name], shipped[name], strict=True)
    ]
    if args.write:
        rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(course)}" for name, course in values.items())
        TABLE.write_text(f'{{\n  "sensitivities": {{\n{rows}\n  }}\n}}\n')
    cells = [
        (model, name, *("" if v is None else f"{math.exp(v):.2f}" for v in course))
        for model, found in by_model.items()
        for name, course in found.items()
    ]
    cells += [
        ("prior", name, *(f"{v:.2f}" for v in course)) for name, course in values.items() if ":" in name
    ]
    depths = [f"{d / (DEPTHS - 1):.1f}" for d in range(DEPTHS)]
    publish(
        table(("model", "part", *depths), cells),
        {
            "benchmark": "sensitivity",
            "tokens": args.tokens,
            "priors": values,
            "of_shipped": [min(moved), max(moved)],
        },
        page=args.page,
        marker="sensitivity",
    )


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", help="folders of original checkpoints")
    options.add_argument("--tokens", type=int, default=TOKENS)
    options.add_argument("--write", action="store_true", help="replace the table that the planner ships with")
    add_page(options, "sensitivity")
    return options.parse_args()


if __name__ == "__main__":
    main()
