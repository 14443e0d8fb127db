"""What would grids of other levels, or trellises, gain over the formats that there are?

    python -m benchmarks.quality.grids MODEL... [--ik libggml.so] [--page docs/results.md]

Every code has sub-scales of 4 bits under an fp16 for 256 columns, as our formats have, which count; ours have offsets
besides. Tables of levels are trained on a Gaussian source and made of whole numbers of a byte. A grid has a table of
its levels, or two of which each group of columns chooses one (as IQ2_K and IQ3_K); a trellis (benchmarks/lib/trellis.py)
one of 2^window, or sums of 16-entry tables, which byte shuffles look up in registers. Nothing of it ships.

First table: the squared error relative to the weights', of a Gaussian source and, weighted by the importance that the
planner assumes without data, of matrices of each model behind their column scales; of the first model the KL divergence
from 16 bit with layers 1 and 4 in one code and the head in ours. Second table, with --ik: one vector times a matrix in
the cache, on one thread, by the kernels of ik_llama.cpp (iqk, which its own products call) and by ours, conversion of
the vector included, best of many rounds. Errors and divergences stay in the work folder: a run that is stopped goes on.
The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.lib.divergence import Variant, divergences
from benchmarks.lib.ggml import Ggml
from benchmarks.lib.markdown import table
from benchmarks.lib.packed import numel
from benchmarks.lib.scoring import build, open_bench
from benchmarks.lib.script import add_page, add_text, add_work, parser, publish
from benchmarks.lib.trellis import Code, encode, train
from trilobite.checkpoint.roles import Matrix, read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.formats.weight import dequantize, stored_shapes
from trilobite.kernels import ops
from trilobite.kernels.layer import CpuSettings
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.loss import of_columns
from trilobite.quantize.methods.hessian import relative_loss
from trilobite.quantize.methods.registry import METHODS
from trilobite.quantize.run.lines import quantize_line
from trilobite.quantize.run.options import Options
from trilobite.quantize.run.planned import question_of
from trilobite.recipe import BODY_ROLES, AnyFormat, LatticeFormat, parse_format

OURS = ("e8p-2", "int2-g32-super", "int2-g16-super", "e8p-3", "int3-g32-super", "int3-g16-super")
WINDOWS: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {
    2: ((4, (0,)), (6, (0, 2)), (8, (0, 4)), (8, ())),
    3: ((4, (0,)), (7, (0, 3)), (8, (0, 4))),
}
"""Of trellises, by bits: the window, and the shifts of their lookups."""
LOOKUPS = ("a table of 2^{window}", "a shuffle", "two shuffles")
DIVERGENCE = (
    "e8p-2",
    "int2-g16-super",
    "e8p-3",
    "int3-g16-super",
    *(f"{kind}, {bits} bits, g16" for bits in (2, 3) for kind in ("two grids", "trellis of 8, two shuffles")),
)
"""Of these the KL divergence is measured."""
TYPES = ("IQ2_KT", "IQ2_K", "IQ2_S", "Q2_K", "IQ3_KT", "IQ3_XXS", "IQ3_K", "Q3_K")
TIMED = (*OURS, "int3-g64")
SHAPE = (768, 1024)
"""Of the matrix of the second table: a third of a megabyte at most."""
TIMED_ROWS = 64
"""Of the matrix, which is these again and again: others' codes take long to find."""
ROUNDS = 100
LAYERS, EXPERTS, ROWS = (1, 4), (None, 1), 64
"""Layers and experts whose matrices are sampled, and rows of each; in models all of these layers is rounded."""
SOURCE, SAMPLE = (128, 1024), (96, 256)
"""Weights of the Gaussian source that errors are measured on, and that tables are trained on."""

AnyCode = Code | AnyFormat


def other_codes() -> dict[str, Code]:
    """All grids and trellises by name, whose tables are not yet trained."""
    found: dict[str, Code] = {}
    for bits, trellises in WINDOWS.items():
        made = {"grid": _code(bits, bits), "two grids": _code(bits, bits, count=2)}
        for window, shifts in trellises:
            lookups = LOOKUPS[len(shifts)].format(window=window)
            made[f"trellis of {window}, {lookups}"] = _code(bits, window, shifts)
        for group in (32, 16):
            found |= {f"{n}, {bits} bits, g{group}": replace(code, group=group) for n, code in made.items()}
    return found


def _code(bits: int, window: int, shifts: tuple[int, ...] = (), count: int = 1) -> Code:
    return Code(bits=bits, window=window, group=16, shifts=shifts, tables=torch.zeros(count, 2**window))


def trained(code: AnyCode) -> AnyCode:
    """The same code with its tables, which are trained once, in groups of 16."""
    if not isinstance(code, Code):
        return code
    return replace(code, tables=_tables(code.bits, code.window, code.shifts, len(code.tables)))


@cache
def _tables(bits: int, window: int, shifts: tuple[int, ...], count: int) -> Tensor:
    sample = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(1))
    starts = 1 if window == bits else 2
    return train(_code(bits, window, shifts, count), sample, starts=starts, rounds=12).tables


def size(code: AnyCode) -> float:
    """Bits that a weight of a large matrix takes."""
    if isinstance(code, Code):
        return code.size
    return 8 * sum(map(numel, stored_shapes(code, 4096, 4096).values())) / 4096**2


def rounded(w: Tensor, h: Tensor | None, code: AnyCode, rows: slice = slice(None)) -> Tensor:
    """Rows of a matrix in a code, decoded. w: [N, K] fp32    h: [K] fp32, weights of columns"""
    if isinstance(code, Code):
        return encode(w[rows], code, h).decoded(code)
    weight = None if isinstance(code, LatticeFormat) else h
    return dequantize(METHODS["search"](w, code, hessian=weight).weight)[rows]


class Body:
    """A model behind its column scales, and what is important in it."""

    def __init__(self, model: Path) -> None:
        """Reads no weights yet."""
        self.model = model
        self.question, ground = question_of(
            open_source(str(model)),
            Budget(bits=3.0),
            keep_unmatched=False,
            calibration=None,
            options=Options(device="cpu"),
        )
        self.importance = None if ground is None else ground.measured
        self.lines = self.question.plans[0].lines
        self.matrices = [line.matrix for line in self.lines if line.format and line.matrix.role in BODY_ROLES]

    def read(self, m: Matrix) -> tuple[Tensor, Tensor | None]:
        """A matrix and the importance of its columns."""
        return read_matrix(self.question.source, m).float(), of_columns(self.importance, m)

    def error(self, code: AnyCode) -> float:
        """Mean of the weighted errors of some matrices."""
        errors = []
        for m in self.matrices:
            if m.layer in LAYERS and m.expert in EXPERTS:
                w, h = self.read(m)
                step = max(1, len(w) // ROWS)
                rows = slice(step // 2, step // 2 + step * ROWS, step)
                weight = torch.ones(w.shape[1]) if h is None else h
                errors.append(relative_loss(w[rows], rounded(w, h, code, rows), weight))
        return fmean(errors)

    def rounded(self, code: AnyCode) -> tuple[PreTrainedModel, float]:
        """All matrices of the sampled layers in one code, those of the others as they are, the head in ours."""
        code = trained(code)
        sampled = [m for m in self.matrices if m.layer in LAYERS]
        tensors = {m.name: rounded(*self.read(m), code).contiguous() for m in sampled}
        for line in self.lines:
            if line.matrix.name not in tensors:
                w = read_matrix(self.question.source, line.matrix)
                kept = line.format is None or line.matrix.role in BODY_ROLES
                tensors[line.matrix.name] = (
                    w.bfloat16().float()
                    if kept
                    else dequantize(quantize_line(w, line, self.question.recipe)[0])
                )
        return build(tensors, self.model), size(code)


@cache
def body(model: Path) -> Body:
    """A model, opened once."""
    return Body(model)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each code."""
    codes: dict[str, AnyCode] = {name: parse_format(name) for name in OURS}
    codes |= other_codes()
    source = torch.randn(SOURCE, generator=torch.Generator().manual_seed(2))
    kept = args.work / f"grids-{'-'.join(model.name for model in args.models)}.json"
    rows = json.loads(kept.read_text()) if kept.exists() else []
    for name, code in codes.items():
        if name not in [row["code"] for row in rows]:
            code = trained(code)
            gaussian = relative_loss(source, rounded(source, None, code), torch.ones(SOURCE[1]))
            errors = {model.name: body(model).error(code) for model in args.models}
            rows.append({"code": name, "bits": size(code), "gaussian": gaussian, "errors": errors})
            kept.write_text(json.dumps(rows))
            print(f"{name}: {gaussian:.4f}", *(f"{e:.4f}" for e in errors.values()), flush=True)
    found = divergence(args, codes) if args.kl else {}
    return [row | {"kl": found.get(row["code"])} for row in rows]


def divergence(args: argparse.Namespace, codes: Mapping[str, AnyCode]) -> dict[str, float]:
    """The KL divergence of the first model, by code."""
    model = args.models[0]
    bench = open_bench(model, args.text, context=args.context, tokens=args.tokens)
    variants: dict[str, Variant] = {name: partial(body(model).rounded, codes[name]) for name in args.kl}
    found = divergences(bench, variants, args.work / model.name / "grids.json")
    return {name: of.kl for name, of in found.items()}


def speeds(ik: Path) -> list[dict[str, Any]]:
    """Weights and bytes a second, of others' types and of our formats in both modes."""
    n, k = SHAPE
    w = torch.randn((TIMED_ROWS, k), generator=torch.Generator().manual_seed(3))
    library, rows = Ggml(ik), []
    for name in TYPES:
        call, nbytes = library.product(w, name, n // TIMED_ROWS)
        rows.append(_rate(f"{name} (ik)", "int8", call, nbytes))
    w = w.repeat(n // TIMED_ROWS, 1)
    for name in TIMED:
        packed, x = METHODS["rtn"](w, parse_format(name)).weight, torch.ones(1, k)
        for mode in ("int8", "exact"):
            bound = ops.bind_linear(packed, None, CpuSettings(mode, threads=1))
            assert bound is not None, name
            rows.append(_rate(f"**{name}**", mode, partial(bound, x), packed.nbytes()))
    return rows


def _rate(name: str, mode: str, call: Callable[[], Tensor], nbytes: int) -> dict[str, Any]:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(10):
            call()
        best = min(best, (time.perf_counter() - start) / 10)
    weights = numel(SHAPE)
    found = {"bits": 8 * nbytes / weights, "weights": weights / best / 1e9, "bytes": nbytes / best / 1e9}
    print(f"{name} {mode}: {found}", flush=True)
    return {"code": name, "activations": mode, **found}


def report(rows: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> str:
    """Both tables, by bits."""
    models = list(rows[0]["errors"])
    lines = []
    for row in sorted(rows, key=lambda r: r["bits"]):
        errors = [f"{e:.4f}" for e in (row["gaussian"], *row["errors"].values())]
        name = f"**{row['code']}**" if row["code"] in OURS else row["code"]
        lines.append((name, f"{row['bits']:.2f}", *errors, f"{row['kl']:.4f}" if row["kl"] else ""))
    first = table(("code", "bits", "Gaussian", *models, f"KL, {models[0]}"), lines)
    if not timed:
        return first
    fast = [
        (r["code"], f"{r['bits']:.2f}", r["activations"], f"{r['weights']:.1f}", f"{r['bytes']:.1f}")
        for r in sorted(timed, key=lambda r: r["bits"])
    ]
    return f"{first}\n\n{table(('code', 'bits', 'activations', 'Gweights/s', 'GB/s'), fast)}"


@torch.no_grad()
def main() -> None:
    """Measure, print, and put the tables on their page."""
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    options.add_argument("--ik", type=Path, help="ik_llama.cpp's libggml.so")
    options.add_argument("--kl", nargs="*", default=DIVERGENCE, help="only of these codes the KL divergence")
    add_text(options, tokens=4096)
    add_work(options, "divergences that are stay here")
    add_page(options, "grids")
    args = options.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    timed = speeds(args.ik) if args.ik else []
    rows = measure(args)
    summary = {"benchmark": "grids", "rows": rows, "speeds": timed}
    publish(report(rows, timed), summary, page=args.page, marker="grids")


if __name__ == "__main__":
    main()
