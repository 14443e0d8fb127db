"""What does each recipe cost a model? Bytes, bits per weight, perplexity, KL divergence, agreement, seconds.

    python benchmarks/quality.py ../shared/models/tiny-mixtral-outliers [--tokens 8192] [-o FILE.md]
    python benchmarks/quality.py ../shared/models/tiny-mixtral-outliers --calibration ../shared/data/train/wikipedia.txt

Compresses the model with every recipe of `data_free()` into the work folder (finished ones are used again,
`--fresh` makes all anew), then measures all of them in one pass over the text, so that the original runs once
per batch. With `--calibration` it is those of `calibrated()`: the original is run on that text once, its Hessians
are kept in the work folder, and all recipes take them from there.

The operators decode packed weights on every call. So that 20 recipes x 300,000 tokens take minutes, each
packed model is decoded once into a float32 model; on the first window it must agree with the operators
(KL < 1e-6). Everything runs in float32: bf16 activations alone would cost as much as int8 does.

Prints a markdown table, whether the orderings hold that the methods promise, and one line of JSON.
"""

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _markdown import insert, table
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

import trilobite.integrations.transformers  # noqa: F401  (registers the plugin)
from trilobite.checkpoint.packed import read_report
from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import open_source
from trilobite.errors import DestinationError
from trilobite.evaluate.frequency import expert_frequency, load_frequency, save_frequency
from trilobite.evaluate.perplexity import REFERENCE, Score, score, tokenize_file, windows
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.quantize.calibrated import Calibrator, Run
from trilobite.quantize.calibration import SAMPLES, Calibration
from trilobite.quantize.compress import Options, compress, prepare
from trilobite.quantize.plan import Plan
from trilobite.recipe import PRESETS, AnyFormat, Recipe, needs_calibration, parse_format
from trilobite.runtime.load import load, load_tokenizer, map_tensors
from trilobite.runtime.swap import group_parts

SHARED = Path(__file__).resolve().parents[2] / "shared"
TEXT = SHARED / "data/eval/wikitext-2/wiki.test.detok.txt"
FREQUENCY_TEXT = SHARED / "data/train/wikipedia.txt"
FREQUENCY_TOKENS = 65_536
WORK = Path(tempfile.gettempdir()) / "trilobite-bench"
AGREEMENT = 1e-6
"""Largest KL divergence between the operators and the decoded model: float32 rounding, nothing else."""
HEAD16 = "search3, 16-bit head"
BEHIND = " (behind quantized)"
"""Ends the names of rows whose blocks are calibrated on what the quantized blocks before them make."""
Frequency = dict[int, list[int]]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One compressed model on disk.

    bits: per parameter, every byte counted    body: per weight of the quantized matrices but the 8-bit head
    """

    name: str
    path: Path
    bytes: int
    bits: float
    body: float
    seconds: float
    plan: Plan


# Recipes


def data_free() -> dict[str, Recipe]:
    """What is measured without a calibration text, by the name in the table."""
    found = {name: PRESETS[name] for name in ("rtn3", "hqq3", "search3")}
    for size in ("s1", "s2"):
        for method in ("hqq", "search"):
            found[f"milo-{size} ({method})"] = with_method(PRESETS[f"milo-{size}"], method)
    two = {
        name.replace("3", "2", 1) if name[-1] == "3" else f"{name} int2": with_bits(r, 2)
        for name, r in found.items()
    }
    found |= two
    found |= {name: PRESETS[name] for name in ("milo-s1-paper", "milo-s2-paper")}
    found["mixed-4-3"], found["mixed-4-2"] = PRESETS["mixed-4-3"], PRESETS["mixed-4-2"]
    found["int8"], found["int4"] = PRESETS["int8"], PRESETS["int4"]
    found[HEAD16] = without_head(PRESETS["search3"])
    return named(found)


def calibrated() -> dict[str, Recipe]:
    """What is measured with a calibration text, beside the data-free methods of as many bits."""
    found: dict[str, Recipe] = {}
    for bits in (2, 3, 4):
        for method in ("rtn", "hqq", "search"):
            found[f"{method}{bits}"] = with_bits(PRESETS[f"{method}3"], bits)
        found[f"gptq{bits}"] = PRESETS[f"gptq{bits}"]
        found[f"gptq{bits} (order)"] = with_method(PRESETS[f"gptq{bits}"], "gptq-order")
        found[f"milo-s1 (search) int{bits}"] = with_bits(PRESETS["milo-s1"], bits)
        if bits < 4:
            found[f"milo-s1 (gptq) int{bits}"] = with_method(found[f"milo-s1 (search) int{bits}"], "gptq")
        if bits == 2:  # near the bits of QuIP#
            for fmt in ("int2-g128-sym", "int2-g64-dq"):
                found[f"search {fmt}"] = with_format(PRESETS["search3"], fmt)
                found[f"gptq {fmt}"] = with_format(PRESETS["gptq2"], fmt)
        found[f"quip{bits}-free"] = PRESETS[f"quip{bits}-free"]
        found[f"quip{bits} (no E8)"] = with_format(PRESETS[f"quip{bits}"], f"grid-{bits}")
        found[f"quip{bits}"] = PRESETS[f"quip{bits}"]
        if bits < 4:
            found[f"quip{bits} (fourier)"] = with_format(PRESETS[f"quip{bits}"], f"e8p-{bits}-fourier")
    found["gptq3" + BEHIND] = PRESETS["gptq3"]
    return named(found)


def named(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Each recipe is called as its row is."""
    return {name: replace(r, name=slug(name)) for name, r in recipes.items()}


def slug(name: str) -> str:
    """A name for a folder and a recipe: `milo-s1 (hqq) int2` -> `milo-s1-hqq-int2`."""
    return "-".join(name.replace("(", "").replace(")", "").replace(",", "").split())


def with_method(recipe: Recipe, method: str) -> Recipe:
    """The same recipe with another method in every rule of the body; the head stays as it is."""
    rules = tuple(r if _is_head(r.format) else replace(r, method=method) for r in recipe.rules)
    return replace(recipe, rules=rules)


def with_bits(recipe: Recipe, bits: int) -> Recipe:
    """The same recipe with other codes in every rule of the body; the head stays as it is."""
    rules = tuple(
        r if r.format is None or _is_head(r.format) else replace(r, format=replace(r.format, bits=bits))
        for r in recipe.rules
    )
    return replace(recipe, rules=rules)


def with_format(recipe: Recipe, fmt: str) -> Recipe:
    """The same recipe with another format in every rule of the body; the head stays as it is."""
    rules = tuple(r if _is_head(r.format) else replace(r, format=parse_format(fmt)) for r in recipe.rules)
    return replace(recipe, rules=rules)


def without_head(recipe: Recipe) -> Recipe:
    """The same recipe with the output head in 16 bit."""
    return replace(recipe, rules=tuple(r for r in recipe.rules if not _is_head(r.format)))


def _is_head(fmt: AnyFormat | None) -> bool:
    return fmt is not None and fmt.bits == 8


# Compressing


def hessians(model: Path, work: Path, calibration: Calibration) -> tuple[Calibration, float]:
    """The Hessians of the original model, collected once for all recipes, and the seconds that took."""
    folder = work / model.name / "hessians"
    clock = folder.with_name("hessians.seconds")
    source = open_source(str(model))
    lines = [line for line in prepare(source, PRESETS["gptq3"]).lines if line.method == "gptq"]
    started = time.monotonic()
    calibrator = Calibrator(source, replace(calibration, propagate="original", save=folder))
    assert calibrator.store is not None
    if any(line.matrix.name not in calibrator.store for line in lines):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        calibrator.build(source, identify(source), torch.device("cpu"))
        calibrator.collect(lines, Run(jobs=os.cpu_count() or 1, workspace=work))
        torch.set_num_threads(threads)
        clock.write_text(f"{time.monotonic() - started:.3f}\n")
    return Calibration(hessians=folder), float(clock.read_text())


def pack(
    model: Path,
    recipe: Recipe,
    work: Path,
    *,
    frequency: Frequency | None,
    calibration: Calibration | None = None,
    fresh: bool = False,
) -> Packed:
    """Compress into the work folder, or use what an earlier run left there."""
    folder = work / model.name / recipe.name
    clock = folder.with_name(f"{folder.name}.seconds")
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    run = partial(
        compress,
        str(model),
        folder,
        recipe,
        frequency=frequency,
        calibration=calibration if needs_calibration(recipe) else None,
        options=Options(device="cpu"),
    )
    try:
        result = run()
    except DestinationError:  # of an older version, or another recipe of this name: the folder is ours
        shutil.rmtree(folder)
        result = run()
    if result.fresh:
        clock.write_text(f"{result.seconds:.3f}\n")
    lines = [line for line in result.plan.lines if line.format is not None and line.format.bits < 8]
    lines = lines or [line for line in result.plan.lines if line.format is not None]
    size = bytes_on_disk(folder)
    return Packed(
        name=recipe.name,
        path=folder,
        bytes=size,
        bits=8 * size / parameters(result.plan),
        body=8 * sum(line.nbytes for line in lines) / sum(numel(line.matrix.shape) for line in lines),
        seconds=float(clock.read_text()),
        plan=result.plan,
    )


def bytes_on_disk(folder: Path) -> int:
    """Every file: weights, headers, index, config, report, tokenizer."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def parameters(plan: Plan) -> int:
    """Parameters of the whole model."""
    return sum(numel(line.matrix.shape) for line in plan.lines)


def numel(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape."""
    return torch.Size(shape).numel()


def frequencies(model: Path, work: Path) -> Frequency:
    """How often each expert is used on training text, not the measured one; kept in the work folder."""
    path = work / model.name / "frequency.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        excerpt = path.with_name("frequency.txt")
        excerpt.write_text(
            FREQUENCY_TEXT.read_text(encoding="utf-8")[: FREQUENCY_TOKENS * 6], encoding="utf-8"
        )
        ids = windows(tokenize_file(load_tokenizer(str(model)), excerpt)[:FREQUENCY_TOKENS], 256)
        counts = expert_frequency(load(str(model), dtype=torch.float32), ids, batch=16)
        save_frequency(path, counts, model_name=model.name, text=FREQUENCY_TEXT.name, tokens=ids.numel())
    return load_frequency(path)


# Measuring


def unpacked(folder: Path, original: Path) -> PreTrainedModel:
    """A packed model as an ordinary float32 one: every matrix decoded once."""
    return build(decoded(folder), original)


def decoded(folder: Path) -> dict[str, Tensor]:
    """The tensors of a packed model by the original's names, every matrix decoded."""
    tensors = map_tensors(open_source(str(folder)))
    shapes = {t["name"].removesuffix(".weight"): t["shape"] for t in read_report(folder)["tensors"]}
    for path, parts in group_parts(tensors).items():
        n, k = shapes[path]
        for suffix in parts:
            del tensors[f"{path}.weight_{suffix}"]
        tensors[f"{path}.weight"] = dequantize(PackedWeight(shape=(n, k), **parts))
    return tensors


def build(tensors: dict[str, Tensor], original: Path) -> PreTrainedModel:
    """An ordinary float32 model of the original's architecture with these weights."""
    kind = type(load(str(original)))
    model: PreTrainedModel = kind.from_pretrained(
        None, config=AutoConfig.from_pretrained(original), state_dict=tensors, dtype=torch.float32
    )
    return model.eval()


def disagreement(folder: Path, decoded: PreTrainedModel, window: Tensor) -> float:
    """KL divergence between decoded model and operators on one window; SystemExit when more than rounding."""
    packed = load(str(folder), dtype=torch.float32)
    kl = score({"operators": packed}, window, context=len(window), batch=1, reference=decoded)["operators"].kl
    assert kl is not None
    if not kl < AGREEMENT:
        raise SystemExit(
            f"error: {folder}: the operators differ from the decoded weights by KL {kl:.3g} on one window"
        )
    return kl


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to measure on. memory: GB for decoded models, which are measured together while they fit."""

    model: Path
    ids: Tensor
    context: int
    batch: int = 16
    memory: float = 8.0

    def scores(self, packed: Mapping[str, Path]) -> dict[str, Score]:
        """Score packed checkpoints against the original."""
        reference = load(str(self.model), dtype=torch.float32)
        found: dict[str, Score] = {}
        for names in self._chunks(list(packed), reference):
            models = {name: unpacked(packed[name], self.model) for name in names}
            for name, model in models.items():
                disagreement(packed[name], model, self.ids[: self.context])
            found |= score(
                models,
                self.ids,
                context=self.context,
                batch=self.batch,
                reference=reference,
                progress=_progress,
            )
            del models
            gc.collect()
        return found

    def _chunks(self, names: Sequence[str], model: PreTrainedModel) -> Iterator[Sequence[str]]:
        size = max(1, int(self.memory * 1e9 / (4 * model.num_parameters())) - 1)
        for start in range(0, len(names), size):
            yield names[start : start + size]


def open_bench(
    model: Path, text: Path, *, context: int, tokens: int = 0, batch: int = 16, memory: float = 8.0
) -> Bench:
    """Tokenise the text (its first `tokens` tokens, 0 = all) for a model."""
    transformers_logging.disable_progress_bar()
    ids = tokenize_file(load_tokenizer(str(model)), text)
    return Bench(model=model, ids=ids[: tokens or len(ids)], context=context, batch=batch, memory=memory)


def _progress(done: int, total: int) -> None:
    print(f"\r{done}/{total} windows ", end="" if done < total else "\n", flush=True)


# Reporting


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
    print(report)
    if args.output:
        args.output.write_text(report + "\n", encoding="utf-8")
    if args.page:
        insert(args.page, f"{'calibrated' if args.calibration else 'quality'}-{args.model.name}", report)
    summary = {
        "benchmark": "quality",
        "model": args.model.name,
        "context": args.context,
        "tokens": first.tokens,
    }
    names = {REFERENCE: asdict(first)["reference_perplexity"]}
    print(json.dumps(summary | names | {"rows": rows, "checks": dict(verdicts)}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the original checkpoint")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=0, help="of the text, from its beginning; 0 = all")
    parser.add_argument("--calibration", type=Path, help="measure the calibrated recipes, on this text")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help="calibration windows of --context tokens"
    )
    parser.add_argument("--recipes", nargs="*", help="only these, by their name in the table")
    parser.add_argument("--work", type=Path, default=WORK, help="packed checkpoints stay here for reuse")
    parser.add_argument("--fresh", action="store_true", help="compress everything anew")
    parser.add_argument(
        "--memory", type=float, default=8.0, help="GB for the models that are measured together"
    )
    parser.add_argument("-o", "--output", type=Path, help="write the markdown here")
    parser.add_argument(
        "--page", type=Path, help="insert it between the markers of this page (docs/results.md)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
