"""Tables 1, 3 and 4 of *Who Says Elephants Can't Run*: sentences and tokens per second, what pruning is worth, the cost.

    python -m benchmarks.speed.translate examples/tiny-translator --price 0.40
    python -m benchmarks.speed.translate examples/tiny-translator --large --experts 128   # NLLB-MoE's layers, random
    python -m benchmarks.speed.translate --price 0.40 --from MEASURED.json                # Table 4 alone

Batches are those that `trilobite translate` makes of the whole test set, some of them, spread evenly over the lengths.
"transformers" is its own model and its own `generate`, in a process that has not seen trilobite; "16 bit" is the
original with the loops of `trilobite translate`. Tokens are those of the translations. With --large the weights are
random, so experts are drawn by the shares that the trained model's decoder gives its own, and sentences end where their
references do. A cell is the best of its rounds, in which the ways of pruning take turns, and of the cycles, in which
the models do: the machine is not as fast in every minute. Every model has a process of its own, whose peak of resident
memory counts Python and torch, too. Where ctranslate2 is installed (pip install ctranslate2) it runs a dense T5 of
random weights beside a Switch model, of the size that a token meets in that.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.dense_ctranslate2 import DTYPES, installed, write_dense
from benchmarks.lib.markdown import table
from benchmarks.lib.plain_translation import padded
from benchmarks.lib.recipes import with_method
from benchmarks.lib.script import add_output, add_page, add_work, parser, publish
from benchmarks.lib.translating import TEST, counted, routed_like, spread_batches, write_nllb
from trilobite.cli.threads import BRIEFLY
from trilobite.errors import EvaluationError
from trilobite.models.pairs import read_parallel
from trilobite.quantize.run.compress import compress
from trilobite.recipe import PRESETS
from trilobite.runtime.load import load, load_tokenizer
from trilobite.runtime.translate.decoding import Decoding
from trilobite.runtime.translate.rows import Pruning
from trilobite.runtime.translate.translator import Search, Translator

RECIPES = {"int8": "int8-experts", "int4": "int4-experts", "3 bit": "search3"}
PRUNINGS: dict[str, Pruning] = {"": "off", ", pruned": "compact", ", index E": "mask"}
Cells = dict[str, list[list[float]]]
"""Variant -> for every number of beams and batch size, in this order: seconds, tokens, sentences."""
ORIGINAL = "16 bit"


@dataclass(frozen=True)
class Found:
    """By variant: what was measured, bytes of the weights, and the most memory that its process held."""

    cells: Cells = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, cells: list[list[float]], size: int, peak: int) -> None:
        """Of a variant that was measured before, the faster of each cell counts."""
        before = self.cells.get(name, cells)
        self.cells[name] = [min(pair) for pair in zip(before, cells, strict=True)]
        self.bytes[name], self.peak[name] = size, max(peak, self.peak.get(name, 0))


def in_a_process(module: str, *arguments: object, job: str = "", environment: Mapping[str, str] = {}) -> Any:
    """The object that a module prints as its last line. environment: what is set there beside what is here."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    there = {**os.environ, **environment}
    made = subprocess.run(command, input=job, text=True, capture_output=True, check=False, env=there)
    if made.returncode:
        raise SystemExit(made.stderr)
    return json.loads(made.stdout.splitlines()[-1])


def packed_at(model: Path, name: str, work: Path, *, quickly: bool) -> Path:
    """A packed copy in the work folder; quickly: rounded to nearest, where weights are random anyway."""
    recipe = PRESETS[RECIPES[name]]
    folder = work / model.name / f"translate-{recipe.name}"
    if not (folder / "config.json").exists():
        compress(str(model), folder, with_method(recipe, "rtn") if quickly else recipe)
    return folder


class Bench:
    """Sentences of the test set, their batches, and what is measured on a model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = load_tokenizer(str(options.model))
        sources, references = read_parallel(options.pairs[0], options.pairs[1], EvaluationError)
        self.ids = self.tokenizer(sources).input_ids
        self.ends = [len(row) for row in self.tokenizer(references).input_ids]
        lengths = [len(row) for row in self.ids]
        self.batches = [
            spread_batches(lengths, size, max(options.sentences, size)) for size in options.batches
        ]

    def transformers(self, found: Found, dtype: str, name: str) -> None:
        """Its own model and loops, which have not seen trilobite."""
        job = json.dumps(self._job([[[self.ids[i] for i in batch] for batch in b] for b in self.batches]))
        made = in_a_process("benchmarks.lib.plain_translation", self.options.model, dtype, job=job)
        found.add(name, self._with_sentences(made["cells"]), made["bytes"], made["peak"])

    def ctranslate2(self, found: Found, say: Callable[[str], None]) -> None:
        """A dense model in each of its dtypes."""
        if not installed():
            say("ctranslate2: is not installed, left out (pip install ctranslate2)")
            return
        folder = write_dense(self.options.model, self.options.work / f"ctranslate2-{self.options.model.name}")
        name_of = self.tokenizer.convert_ids_to_tokens
        job = self._job([[[name_of(self.ids[i]) for i in batch] for batch in b] for b in self.batches])
        job["lengths"] = [[round(sum(self.ends[i] for i in c) / len(c)) for c in b] for b in self.batches]
        for dtype in DTYPES:
            say(name := f"CTranslate2, dense, {dtype}")
            made = in_a_process("benchmarks.lib.dense_ctranslate2", folder, dtype, job=json.dumps(job))
            found.add(name, self._with_sentences(made["cells"]), made["bytes"], made["peak"])

    def _job(self, batches: list[Any]) -> dict[str, Any]:
        options = self.options
        common = {"beams": options.beams, "threads": torch.get_num_threads(), "rounds": options.rounds}
        return common | {"batches": batches}

    def _with_sentences(self, cells: list[list[float]]) -> list[list[float]]:
        sentences = [sum(map(len, batches)) for _ in self.options.beams for batches in self.batches]
        return [[*cell, count] for cell, count in zip(cells, sentences, strict=True)]

    def ours(self, model: Any, prunings: list[str], *, random: bool) -> dict[str, list[list[float]]]:
        """Our loops, the ways of pruning in turns, the best of the rounds. random: see `_forced`."""
        run = self._forced if random else self._free
        found: dict[str, list[list[float]]] = {suffix: [] for suffix in prunings}
        for beams in self.options.beams:
            for batches in self.batches:
                run(model, batches[0][:2], beams, "off")
                best = dict.fromkeys(prunings, (float("inf"), 0))
                for _ in range(self.options.rounds):
                    for suffix in prunings:
                        started = time.perf_counter()
                        tokens = sum(run(model, batch, beams, PRUNINGS[suffix]) for batch in batches)
                        best[suffix] = min(best[suffix], (time.perf_counter() - started, tokens))
                for suffix in prunings:
                    found[suffix].append([*best[suffix], sum(map(len, batches))])
        return found

    def _free(self, model: Any, batch: list[int], beams: int, pruning: Pruning) -> int:
        search = Search(beams=beams, batch=len(batch), pruning=pruning)
        translator = Translator(model, self.tokenizer, search=search)
        return sum(t.tokens for _, found in translator.run([self.ids[i] for i in batch]) for t in found)

    def _forced(self, model: Any, batch: list[int], beams: int, pruning: Pruning) -> int:
        """Random weights end nowhere: each sentence ends where its reference does."""
        source, mask = padded([self.ids[i] for i in batch])
        limits = torch.tensor([self.ends[i] for i in batch])
        with torch.inference_mode():
            model.generate(
                source,
                attention_mask=mask,
                num_beams=beams,
                do_sample=False,
                max_new_tokens=int(limits.max()),
                suppress_tokens=[model.generation_config.eos_token_id],
                custom_generate=Decoding(source, limits=limits, pruning=pruning),
            )
        return int(limits.sum())


def prepared(options: argparse.Namespace, tokenizer: Any) -> dict[str, Path]:
    """The folders of our models, made where they are not there yet."""
    folder = options.model
    if options.large:
        folder = options.work / f"nllb-{options.experts}-{options.layers}"
        if not folder.exists():
            write_nllb(folder, tokenizer, experts=options.experts, layers=options.layers)
    packed = {name: packed_at(folder, name, options.work, quickly=options.large) for name in options.recipes}
    return {ORIGINAL: folder, **packed}


def measure(options: argparse.Namespace, arguments: Sequence[str], say: Callable[[str], None]) -> Found:
    """Every variant, each model in a process of its own. arguments: those that this script was called with."""
    bench, found = Bench(options), Found()
    folders = prepared(options, bench.tokenizer)
    for _ in range(0 if options.prepare else options.cycles):
        _measure_each(bench, folders, found, arguments, say)
    return found


def _measure_each(
    bench: Bench, folders: Iterable[str], found: Found, arguments: Sequence[str], say: Callable[[str], None]
) -> None:
    if not bench.options.large:
        for dtype, name in (("float32", "transformers fp32"), ("bfloat16", "transformers bf16")):
            say(name)
            bench.transformers(found, dtype, name)
        bench.ctranslate2(found, say)
    for name in folders:
        say(name)
        made = in_a_process("benchmarks.speed.translate", *arguments, "--one", name, environment=BRIEFLY)
        for suffix, cells in made["cells"].items():
            found.add(name + suffix, cells, made["bytes"], made["peak"])


def measure_one(options: argparse.Namespace) -> dict[str, Any]:
    """One of our models, by pruning."""
    bench = Bench(options)
    shares = None
    if options.large:
        with counted(trained := load(str(options.model))) as shares:
            bench._free(trained, list(range(50)), 1, "compact")
        del trained
    model = load(str(prepared(options, bench.tokenizer)[options.one]), dtype=torch.bfloat16)
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:  # read what is mapped before time is taken
        tensor.detach().flatten().view(torch.uint8).max()
    with routed_like(model, shares) if shares is not None else nullcontext():
        cells = bench.ours(model, options.prunings, random=options.large)
    size = sum(t.nbytes for t in tensors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cells": cells, "bytes": size, "peak": peak}


def speeds(options: argparse.Namespace, measured: Found) -> str:
    """Tokens, and sentences, per second: a table for each number of beams."""
    parts = []
    columns = len(options.batches)
    for at, beams in enumerate(options.beams):
        rows = []
        for name, found in measured.cells.items():
            row = found[at * columns : (at + 1) * columns]
            speed = [f"{tokens / s:,.0f} ({count / s:.1f})" for s, tokens, count in row]
            memory = [f"{n / 1e6:,.0f}" for n in (measured.bytes[name], measured.peak[name])]
            rows.append([name, *memory, *speed])
        sizes = [f"batch {size}" for size in options.batches]
        header = ["tokens/s (sentences/s)", "weights, MB", "peak, MB", *sizes]
        parts += [f"Beams {beams}:\n\n{table(header, rows)}"]
    return "\n\n".join(parts)


def costs(price: float, cells: Cells) -> str:
    """Table 4: cost of a million tokens at the best throughput of each variant."""
    rows = []
    for name, found in cells.items():
        best = max(tokens / seconds for seconds, tokens, _ in found)
        rows.append([name, f"{best:,.0f}", f"{price / (best * 3600) * 1e6:.4f}"])
    return table(["variant", "best tokens/s", f"per million tokens, at {price} an hour"], rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path, nargs="?", help="a trained translator, unpacked")
    options.add_argument("--pairs", type=Path, nargs=2, default=TEST, metavar=("SOURCE", "TARGET"))
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 20, 64, 96])
    options.add_argument("--beams", type=int, nargs="+", default=[1, 5])
    options.add_argument("--sentences", type=int, default=96, help="in a cell, or one batch")
    options.add_argument("--rounds", type=int, default=3, help="of each cell; the best counts")
    options.add_argument("--cycles", type=int, default=1, help="of all variants; the best counts")
    options.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    options.add_argument("--prunings", nargs="+", default=list(PRUNINGS), choices=list(PRUNINGS))
    options.add_argument("--large", action="store_true", help="layers of NLLB-MoE-54B, random weights")
    options.add_argument("--experts", type=int, default=128, help="with --large")
    options.add_argument("--layers", type=int, default=1, help="with --large: of the decoder")
    options.add_argument("--prepare", action="store_true", help="only pack the models")
    options.add_argument("--price", type=float, help="of an hour of this machine: also print Table 4")
    options.add_argument("--from", dest="measured", type=Path, help="cells measured before, as JSON")
    options.add_argument("--threads", type=int, help="default: torch's")
    options.add_argument("--one", choices=(ORIGINAL, *RECIPES), help=argparse.SUPPRESS)
    add_work(options)
    add_page(options, "translate-speed")
    add_output(options)
    chosen = options.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    found = Found()
    if chosen.measured:
        report = costs(chosen.price or 1.0, json.loads(chosen.measured.read_text())["cells"])
    elif chosen.model is None:
        options.error("give MODEL, or --from FILE")
    elif chosen.one:
        print(json.dumps(measure_one(chosen)))
        return
    else:
        found = measure(chosen, sys.argv[1:], lambda name: print(name, file=sys.stderr, flush=True))
        report = speeds(chosen, found) if found.cells else "prepared"
        if chosen.price and found.cells:
            report += f"\n\n{costs(chosen.price, found.cells)}"
    marker = "translate-speed-large" if chosen.large else "translate-speed"
    publish(report, asdict(found), page=chosen.page, marker=marker, output=chosen.output)


if __name__ == "__main__":
    main()
