"""Would rotated inputs help formats of integers? Planned recipes, and the same with W H^T in the place of W.

    python -m benchmarks.quality.rotation MODEL... [--bits 2.5625 3.5] [--page docs/results.md]

H is the Hadamard transform over K with random signs, as QuIP# has it; a model would have to apply it to every input.
Each matrix is quantized in the format that the planner gave it, as it is and rotated; behind a rotation all columns
matter alike, so that importance says nothing there. Prints the KL divergence from 16 bit with none rotated, with all,
and with those whose weighted error is less then (`best of both`: what a planner would choose), and how many these are.
Nothing of it ships. The last line is JSON.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lib.divergence import Found, of_decoded
from benchmarks.lib.markdown import table
from benchmarks.lib.scoring import Bench, open_bench
from benchmarks.lib.script import add_page, add_text, add_work, parser, publish
from trilobite.checkpoint.roles import read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.formats.incoherence import factors, hadamard
from trilobite.formats.weight import dequantize
from trilobite.quantize.budget.choose import choose, measure_errors
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.loss import of_columns
from trilobite.quantize.methods.hessian import relative_loss
from trilobite.quantize.plan.plan import PlanLine, make_plan
from trilobite.quantize.run.lines import quantize_line
from trilobite.quantize.run.options import Options
from trilobite.quantize.run.planned import question_of
from trilobite.recipe import BODY_ROLES, Recipe

WAYS = ("as they are", "all rotated", "best of both")


class Rounded:
    """A model planned for a budget, every matrix decoded in each way. tensors: by way    bits: of a body weight"""

    def __init__(self, model: Path, bits: float) -> None:
        """Quantizes the body twice."""
        question, ground = question_of(
            open_source(str(model)),
            Budget(bits=bits),
            keep_unmatched=False,
            calibration=None,
            options=Options(),
        )
        importance = None if ground is None else ground.measured
        recipe = choose(question, measure_errors(question, importance), importance).recipe
        plan = make_plan(question.source, question.matrices, recipe, unfit=question.unfit)
        self.tensors: dict[str, dict[str, Tensor]] = {way: {} for way in WAYS}
        self.rotated = 0
        for line in plan.lines:
            w, h = (
                read_matrix(question.source, line.matrix),
                of_columns(importance, line.matrix) if line.importance else None,
            )
            for way, decoded in zip(WAYS, self._ways(w, line, recipe, h), strict=True):
                self.tensors[way][line.matrix.name] = decoded
        body = [line for line in plan.lines if line.format and line.matrix.role in BODY_ROLES]
        self.matrices = len(body)
        self.bits = (
            8
            * sum(line.nbytes for line in body)
            / sum(line.matrix.shape[0] * line.matrix.shape[1] for line in body)
        )

    def _ways(
        self, w: Tensor, line: PlanLine, recipe: Recipe, h: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if line.format is None:
            return (w.bfloat16().float(),) * 3
        plain = _decoded(w, line, recipe, h)
        if line.matrix.role not in BODY_ROLES or factors(w.shape[1]) is None:
            return (plain,) * 3
        generator = torch.Generator().manual_seed(zlib.crc32(line.matrix.name.encode()))
        signs = torch.randint(2, (w.shape[1],), generator=generator) * 2.0 - 1
        turned = _decoded(
            hadamard(w.float() * signs), line, recipe, None if h is None else torch.ones_like(h)
        )
        turned = hadamard(turned, transpose=True) * signs
        weight = torch.ones(w.shape[1]) if h is None else h
        better = relative_loss(w, turned, weight) < relative_loss(w, plain, weight)
        self.rotated += better
        return plain, turned, turned if better else plain


def _decoded(w: Tensor, line: PlanLine, recipe: Recipe, h: Tensor | None) -> Tensor:
    n, k = line.matrix.shape
    return dequantize(quantize_line(w, line, recipe, h)[0])[:n, :k]


def measure(bench: Bench, bits: float, kept: Path) -> tuple[dict[str, Found], str]:
    """By way, and how many matrices are better off rotated."""
    made = Rounded(bench.model, bits)
    return of_decoded(bench, made.tensors, made.bits, kept), f"{made.rotated} of {made.matrices}"


def main() -> None:
    """A row for each budget and model."""
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    options.add_argument("--bits", type=float, nargs="+", default=(2.5625, 3.5))
    add_text(options, tokens=12288)
    add_work(options, "what is found stays here")
    add_page(options, "rotation")
    args = options.parse_args()
    rows, found = [], {}
    for model in args.models:
        bench = open_bench(model, args.text, context=args.context, tokens=args.tokens)
        for bits in args.bits:
            of, count = measure(bench, bits, args.work / model.name / f"rotation-{bits}.json")
            rows.append(
                (model.name, f"{of[WAYS[0]].bits:.2f}", *(f"{of[way].kl:.4f}" for way in WAYS), count)
            )
            found[f"{model.name} {bits}"] = _kl(of)
    report = table(("model", "bits", *WAYS, "better rotated"), rows)
    publish(report, {"benchmark": "rotation", "kl": found}, page=args.page, marker="rotation")


def _kl(found: Mapping[str, Found]) -> dict[str, float]:
    return {name: f.kl for name, f in found.items()}


if __name__ == "__main__":
    main()
