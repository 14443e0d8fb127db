"""Table 2 of *Who Says Elephants Can't Run*: what each recipe costs a translator, in BLEU, chrF and bytes.

    python -m benchmarks.quality.translation examples/tiny-translator --page docs/results.md

Greedy and with beams, on test_2016_flickr of Multi30k; calibrated recipes on pairs of its training sentences. All models
run in float32: bf16 activations alone would cost as much as int8 does.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.markdown import table
from benchmarks.lib.packed import bytes_on_disk, pack
from benchmarks.lib.recipes import slug, with_bits
from benchmarks.lib.script import add_model, add_output, add_page, add_work, parser, publish
from benchmarks.lib.translating import TEST, TRAIN
from trilobite.errors import EvaluationError
from trilobite.evaluate.translation import score_translations
from trilobite.models.pairs import read_parallel
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.recipe import PRESETS, Recipe
from trilobite.runtime.load import load, load_tokenizer
from trilobite.runtime.translate.translator import Search, Translator


def recipes() -> dict[str, Recipe]:
    """By their name in the table."""
    names = ("int8-experts", "int4-experts", "search3", "milo-s1", "milo-s2", "quip3-free", "quip2-free")
    found = {name: PRESETS[name] for name in names}
    found["milo-s2 int2"] = with_bits(PRESETS["milo-s2"], 2)
    found["search2"] = with_bits(PRESETS["search3"], 2)
    return found | {name: PRESETS[name] for name in ("gptq3", "quip3", "quip2")}


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Scores of one model, for every number of beams."""
    model = load(str(path), dtype=torch.float32)
    tokenizer = load_tokenizer(str(path))
    source, reference = options.pairs
    both = read_parallel(source, reference, EvaluationError)
    sources, references = (side[: options.limit] for side in both)
    row: dict[str, Any] = {"bytes": bytes_on_disk(path)}
    for beams in options.beams:
        translator = Translator(model, tokenizer, search=Search(beams=beams))
        score = score_translations(translator, sources, references)
        row |= {f"bleu{beams}": score.bleu, f"chrf{beams}": score.chrf, f"seconds{beams}": score.seconds}
    return row


def markdown(rows: dict[str, dict[str, Any]], beams: list[int]) -> str:
    first = next(iter(rows.values()))
    header = ["recipe", "MB"]
    for b in beams:
        header += [f"BLEU, beams {b}", "delta", "chrF", "delta"]
    lines = []
    for name, row in rows.items():
        cells = [name, f"{row['bytes'] / 1e6:.2f}"]
        for b in beams:
            for key in (f"bleu{b}", f"chrf{b}"):
                cells += [f"{row[key]:.2f}", f"{row[key] - first[key]:+.2f}" if row is not first else ""]
        lines.append(cells)
    return table(header, lines)


def main() -> None:
    options = parser(__doc__)
    add_model(options)
    options.add_argument("--pairs", type=Path, nargs=2, default=TEST, metavar=("SOURCE", "TARGET"))
    options.add_argument(
        "--calibration", type=Path, nargs=2, default=TRAIN, metavar=("SOURCE", "TARGET"), help="other pairs"
    )
    options.add_argument("--samples", type=int, help="pairs to calibrate on; default: as compress")
    options.add_argument("--beams", type=int, nargs="+", default=[1, 5])
    options.add_argument("--limit", type=int, help="only the first sentences")
    add_work(options)
    add_page(options, "translation-quality")
    add_output(options)
    chosen = options.parse_args()
    text, target = chosen.calibration
    ground = Calibration(text=text, target=target, samples=chosen.samples)
    rows = {"16 bit": measure(chosen.model, chosen)}
    for name, recipe in recipes().items():
        started = time.monotonic()
        packed = pack(chosen.model, _called(recipe, name), chosen.work, frequency=None, calibration=ground)
        rows[name] = measure(packed.path, chosen)
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    report = markdown(rows, chosen.beams)
    publish(report, rows, page=chosen.page, marker="translation-quality", output=chosen.output)


def _called(recipe: Recipe, name: str) -> Recipe:
    return replace(recipe, name=slug(name))


if __name__ == "__main__":
    main()
