"""What do benchmark tasks say of 16 bit and of some recipes? Each score with the half width of its 95 % interval.

    python -m benchmarks.quality.tasks MODEL --data ../shared/data/eval [--limit 200] [--page docs/results.md]

Compressed models are decoded into float32 ones, as in `recipes`. --limit: items of a task; of each subject of MMLU a
twentieth of it. The row `chance` is what guessing gives: a difference means something where the intervals say so, and where
the model itself is beyond chance. The last line is JSON.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks.lib.markdown import table
from benchmarks.lib.packed import pack
from benchmarks.lib.recipes import named, with_bits
from benchmarks.lib.scoring import unpacked
from benchmarks.lib.script import add_model, add_page, add_work, parser, publish
from trilobite.evaluate.measure import fitting_batch
from trilobite.evaluate.tasks import deviations, load_tasks, run_tasks
from trilobite.recipe import PRESETS
from trilobite.runtime.generate.text import context_length
from trilobite.runtime.load import load, load_tokenizer

CHANCE = {
    "piqa": 0.5,
    "hellaswag": 0.25,
    "lambada_openai": 0.0,
    "winogrande": 0.5,
    "arc_easy": 0.25,
    "mmlu": 0.25,
    "triviaqa": 0.0,
}
"""Tasks, and what guessing gives."""
METRICS = {"triviaqa": "exact_match"}
"""What is printed of a task; of others the accuracy."""
RECIPES = named(
    {
        "int4": PRESETS["int4"],
        "super3": PRESETS["super3"],
        "milo-s1": PRESETS["milo-s1"],
        "search2": with_bits(PRESETS["search3"], 2),
    }
)
Scores = dict[str, dict[str, float]]


def measured(model: PreTrainedModel, folder: Path, args: argparse.Namespace) -> Scores:
    """All tasks of one model."""
    found: Scores = {}
    tokenizer = load_tokenizer(str(folder))
    batch = fitting_batch(model, context_length(model) or 2048)
    for name in args.tasks:
        limit = max(1, args.limit // 20) if name == "mmlu" else args.limit
        ready = load_tasks([name], data=args.data)
        found[name] = run_tasks(model, tokenizer, ready, limit=limit, batch=batch)[name]
        print(f"{name}: {found[name]}", flush=True)
    return found


def cell(name: str, scores: Scores) -> str:
    """One score in percent, with the half width of its interval."""
    metric = METRICS.get(name, "acc")
    width = 1.96 * scores[name].get(f"{metric}_stderr", 0.0)
    return f"{100 * scores[name][metric]:.1f} ± {100 * width:.1f}"


def main() -> None:
    args = _arguments()
    found = {"16 bit": measured(load(str(args.model)).float(), args.model, args)}
    for name in args.recipes:
        packed = pack(args.model, RECIPES[name], args.work, frequency=None)
        found[name] = measured(unpacked(packed.path, args.model), args.model, args)
        gc.collect()
    items = {name: int(scores["n"]) for name, scores in found["16 bit"].items()}
    rows = [("chance", *(f"{100 * CHANCE[name]:.0f}" for name in args.tasks))]
    rows += [(name, *(cell(task, scores) for task in args.tasks)) for name, scores in found.items()]
    differs = deviations(load_tasks(list(args.tasks), data=args.data))
    lines = [
        f"`{args.model.name}`, accuracy in percent with 95 % intervals; items: "
        f"{', '.join(f'{name} {n:,}' for name, n in items.items())}:",
        "",
        table(("recipe", *args.tasks), rows),
        "",
        *(f"- {name} is not lm_eval's: {text}." for name, text in differs.items()),
    ]
    summary: dict[str, Any] = {"benchmark": "tasks", "model": args.model.name, "scores": found}
    publish("\n".join(lines).strip(), summary, page=args.page, marker=f"tasks-{args.model.name}")


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    add_model(options)
    options.add_argument("--data", type=Path, required=True, help="folder of the task files")
    options.add_argument("--tasks", nargs="+", choices=list(CHANCE), default=list(CHANCE))
    options.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    options.add_argument("--limit", type=int, default=200, help="items of a task")
    add_work(options)
    add_page(options, "tasks-MODEL")
    return options.parse_args()


if __name__ == "__main__":
    main()
