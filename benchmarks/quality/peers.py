"""What others lose at as many bits: llama.cpp's weight types beside our recipes, in the same model on the same text.

    python -m benchmarks.quality.peers MODEL... --ggml build/bin/libggml-base.so --page docs/results.md

Every matrix of attention and MLPs is quantized by llama.cpp's own code, decoded, and put into the model; the head is
ours, in 8 bit, everywhere. Types are used alone, without the mixes of `llama-quantize`, which raise some roles; a type
whose blocks do not divide a row falls back as there. Without data: no importance matrix. With data: the mean squares of
what enters each column, on the same text for theirs and ours. Bits are those of the quantized matrices, metadata
included. The last line is JSON.
"""

import argparse
import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.ggml import Ggml
from benchmarks.lib.markdown import table
from benchmarks.lib.packed import numel, pack
from benchmarks.lib.recipes import named, with_bits
from benchmarks.lib.scoring import Bench, build, decoded, open_bench
from benchmarks.lib.script import TRAINING_TEXT, add_page, add_text, add_work, parser, publish
from trilobite.checkpoint.roles import Matrix, read_matrix
from trilobite.checkpoint.source import Source, open_source
from trilobite.evaluate.perplexity import score
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.plan.plan import Plan
from trilobite.quantize.run.calibrated import Calibrator
from trilobite.quantize.run.compress import prepare
from trilobite.recipe import PRESETS, Recipe, Role
from trilobite.runtime.load import load, map_tensors

TYPES = ("IQ2_XXS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_K")
SAMPLES = 128
HEAD = "lm_head.weight"


def free_recipes() -> dict[str, Recipe]:
    """Ours, without a text of the user's."""
    chosen = {name: PRESETS[name] for name in ("quip2-free", "search3", "milo-s1", "int4")}
    chosen["search2"] = with_bits(PRESETS["search3"], 2)
    for bits in (2, 3, 4):
        chosen[f"super{bits}"], chosen[f"fine{bits}"] = PRESETS[f"super{bits}"], PRESETS[f"fine{bits}"]
    return named(chosen)


def text_recipes() -> dict[str, Recipe]:
    """Ours, on a text."""
    chosen = {name: PRESETS[name] for name in ("quip2", "quip3", "gptq3")}
    for bits in (2, 3, 4):
        chosen[f"fine{bits} (text)"] = replace(PRESETS[f"fine{bits}"], importance="text")
    return named(chosen)


class Peers:
    """One model: its matrices, what is important in them, and how others round them."""

    def __init__(self, model: Path, ggml: Ggml, text: Path, context: int) -> None:
        self.model, self.ggml = model, ggml
        self.source: Source = open_source(str(model))
        self.calibration = Calibration(text=text, samples=SAMPLES, context=context, propagate="original")
        recipe = replace(PRESETS["super3"], importance="text")
        self.plan: Plan = prepare(self.source, recipe)
        body = [line for line in self.plan.lines if line.format is not None]
        self.body: list[Matrix] = [line.matrix for line in body if line.matrix.role is not Role.HEAD]
        self.weights = sum(numel(m.shape) for m in self.body)

    def importance(self, work: Path) -> dict[str, Tensor]:
        """By matrix: mean squares of its inputs on the text, [K] fp32."""
        calibrator = Calibrator(self.source, self.calibration)
        calibrator.build(self.source, [line.matrix for line in self.plan.lines], torch.device("cpu"))
        work.mkdir(parents=True, exist_ok=True)
        calibrator.measure([line for line in self.plan.lines if line.calibrated], jobs=2, workspace=work)
        assert calibrator.measured is not None
        return {m.name: calibrator.measured.get(m.name, m.shape[1])[0] for m in self.body}

    def rounded(
        self, name: str, head: Tensor, importance: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], float]:
        """The tensors of the model with its body in one of their types, and the bits of a weight there."""
        tensors = {n: t.float() for n, t in map_tensors(self.source).items()} | {HEAD: head}
        stored = 0
        for m in self.body:
            assert m.source == m.name, "matrices lie one by one in these checkpoints"
            columns = None if importance is None else importance[m.name]
            tensors[m.name], nbytes = self.ggml.quantize(read_matrix(self.source, m).float(), name, columns)
            stored += nbytes
        return tensors, 8 * stored / self.weights


def measure(model: Path, ggml: Ggml, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each of their types and of our recipes."""
    bench = open_bench(model, args.text, context=args.context, tokens=args.tokens)
    peers = Peers(model, ggml, args.calibration, args.context)
    rows = []
    for data, recipes in ((False, free_recipes()), (True, {} if args.free else text_recipes())):
        packed = {
            name: pack(model, r, args.work, frequency=None, calibration=peers.calibration)
            for name, r in recipes.items()
        }
        found = bench.scores({name: p.path for name, p in packed.items()})
        rows += [
            {"name": name, "ours": True, "data": data, "bits": p.body, "kl": found[name].kl}
            for name, p in packed.items()
        ]
    head = decoded(args.work / model.name / "search3")[HEAD]
    for data in (False,) if args.free else (False, True):
        importance = peers.importance(args.work / model.name / "importance") if data else None
        for name in TYPES:
            if data or not ggml.needs_importance(name):
                tensors, bits = peers.rounded(name, head, importance)
                kl = divergence(bench, tensors)
                print(
                    f"{model.name} {name} {'text' if data else 'free'}: {bits:.2f} bits, KL {kl:.4f}",
                    flush=True,
                )
                rows.append({"name": name, "ours": False, "data": data, "bits": bits, "kl": kl})
    return rows


def divergence(bench: Bench, tensors: dict[str, Tensor]) -> float:
    """KL divergence of a model with these weights to the original, nats."""
    reference = load(str(bench.model), dtype=torch.float32)
    model = build(tensors, bench.model)
    found = score({"": model}, bench.ids, context=bench.context, batch=bench.batch, reference=reference)[
        ""
    ].kl
    del model, reference
    gc.collect()
    assert found is not None
    return found


def report(measured: Mapping[str, list[dict[str, Any]]], text: str, tokens: int) -> str:
    """Two tables, by bits on the first model: without data, with a text. Ours in bold."""
    parts = []
    first = next(iter(measured.values()))
    for data, title in ((False, "Without data"), (True, "With a text")):
        by_name = {
            model: {r["name"]: r for r in rows if r["data"] is data} for model, rows in measured.items()
        }
        cells = [
            [
                f"**{r['name']}**" if r["ours"] else r["name"],
                *(
                    f"{of[r['name']]['kl']:.4f} ({of[r['name']]['bits']:.2f})" if r["name"] in of else ""
                    for of in by_name.values()
                ),
            ]
            for r in sorted(first, key=lambda r: r["bits"])
            if r["data"] is data
        ]
        if cells:
            parts.append(f"{title}:\n\n{table(('recipe or type', *measured), cells)}")
    head = f"KL in nats (bits of a weight), first {tokens:,} tokens of {text}; ours in bold."
    return "\n\n".join([head, *parts])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    options.add_argument("--ggml", type=Path, required=True, help="llama.cpp's libggml-base.so")
    options.add_argument(
        "--calibration", type=Path, default=TRAINING_TEXT, help="text for those that take one"
    )
    options.add_argument("--free", action="store_true", help="only what needs no text")
    add_text(options, tokens=12288)
    add_work(options)
    add_page(options, "peers")
    args = options.parse_args()
    ggml = Ggml(args.ggml)
    measured = {model.name: measure(model, ggml, args) for model in args.models}
    publish(
        report(measured, args.text.name, args.tokens), {"peers": measured}, page=args.page, marker="peers"
    )


if __name__ == "__main__":
    main()
