"""Is a vector of column scales for every matrix better than one for all matrices that read the same?

    python -m benchmarks.quality.own_scales MODEL... [--page docs/results.md]

The latter moves into norms and other matrices and costs nothing; the former would be stored, and multiplied by at run
time. Every matrix of the body is quantized by `search` in INT3 g64 without scales, with those that are shared, and with
its own, as they are found for it alone; by the plain error, and weighed by what enters each column (a pass of the text
that comes with Trilobite). Its columns are multiplied by their scales again, so that nothing of the model is rounded
but these matrices. Prints the KL divergence from 16 bit. The last line is JSON.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lib.divergence import of_decoded
from benchmarks.lib.markdown import table
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import add_page, add_text, add_work, parser, publish
from trilobite.checkpoint.roles import Matrix, read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.formats.weight import dequantize
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.loss import of_columns
from trilobite.quantize.columns.find import column_scales
from trilobite.quantize.columns.streams import Port, Stream, find_streams
from trilobite.quantize.plan.plan import PlanLine, make_plan
from trilobite.quantize.run.lines import quantize_line
from trilobite.quantize.run.options import Options
from trilobite.quantize.run.planned import question_of
from trilobite.recipe import BODY_ROLES, PRESETS

SCALES = ("none", "shared", "own")
RECIPE = PRESETS["search3"]
NAMES = [f"{scales}{ending}" for ending in ("", ", importance") for scales in SCALES]


class Scaled:
    """A model whose body is quantized in all ways. tensors: by way    bits: of a body weight"""

    def __init__(self, model: Path) -> None:
        """Quantizes the body once for each."""
        self.source = open_source(str(model))
        question, ground = question_of(
            self.source,
            Budget(bits=3.5, importance="builtin"),
            keep_unmatched=False,
            calibration=None,
            options=Options(),
        )
        assert ground is not None
        plan = make_plan(self.source, question.matrices, RECIPE, unfit=question.unfit)
        self.shared = dict(self._shared(question.matrices))
        self.tensors: dict[str, dict[str, Tensor]] = {name: {} for name in NAMES}
        body = [line for line in plan.lines if line.format and line.matrix.role in BODY_ROLES]
        weights = sum(line.matrix.shape[0] * line.matrix.shape[1] for line in body)
        self.bits = 8 * sum(line.nbytes for line in body) / weights
        for line in plan.lines:
            w = read_matrix(self.source, line.matrix).float()
            for tensors in self.tensors.values():
                tensors[line.matrix.name] = w
        for line in body:
            self._quantize(line, of_columns(ground.measured, line.matrix))

    def _quantize(self, line: PlanLine, entering: Tensor | None) -> None:
        """One matrix in all ways. entering: what enters its columns where they have the shared scales, [K] fp32"""
        assert entering is not None
        m = line.matrix
        w = self.tensors[NAMES[0]][m.name]
        one = torch.ones(m.shape[1])
        shared = self.shared.get(m.name, one)
        alone = Stream(name=m.name, size=m.shape[1], readers=(Port(matrix=m),), writers=())
        own = column_scales(self.source, alone)
        for ending, h in (("", None), (", importance", entering / shared**2)):
            for scales, c in zip(SCALES, (one, shared, own), strict=True):
                decoded = dequantize(quantize_line(w / c, line, RECIPE, None if h is None else h * c**2)[0])
                self.tensors[scales + ending][m.name] = decoded[: m.shape[0], : m.shape[1]] * c

    def _shared(self, matrices: Sequence[Matrix]) -> Iterator[tuple[str, Tensor]]:
        for stream in find_streams(self.source, matrices):
            scales = column_scales(self.source, stream)
            for port in stream.readers:
                yield port.matrix.name, scales if port.channels is None else scales[port.channels]


def main() -> None:
    """A row for each model."""
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    add_text(options, tokens=6144)
    add_work(options, "what is found stays here")
    add_page(options, "own-scales")
    args = options.parse_args()
    rows, found = [], {}
    for model in args.models:
        bench = open_bench(model, args.text, context=args.context, tokens=args.tokens)
        made = Scaled(model)
        of = of_decoded(bench, made.tensors, made.bits, args.work / model.name / "own-scales.json")
        found[model.name] = {name: one.kl for name, one in of.items()}
        rows.append((model.name, *(f"{kl:.4f}" for kl in found[model.name].values())))
    publish(
        table(("model", *NAMES), rows),
        {"benchmark": "own-scales", "kl": found},
        page=args.page,
        marker="own-scales",
    )


if __name__ == "__main__":
    main()
