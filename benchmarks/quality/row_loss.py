"""Why can QuIP# have less proxy loss than GPTQ and yet more KL divergence? The loss row by row.

    python -m benchmarks.quality.row_loss ../shared/models/tiny-mixtral-outliers [--tokens 4096] [--page docs/results.md]

Takes what `quality.py --calibration` left in the work folder. With E = W - W_q, for attention and expert 1 the mean
over layers of

    whole    tr(E H E^T) / tr(W H W^T)                what both methods make small
    rows     the mean over rows of the same ratio     what an output of small size suffers

and the KL divergence of models that are put together from both: attention of one, experts of the other.
Prints markdown tables and one line of JSON.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.markdown import table
from benchmarks.lib.scoring import build, decoded, open_bench
from benchmarks.lib.script import add_model, add_page, add_text, add_work, parser, publish
from trilobite.checkpoint.roles import Matrix, identify, read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.evaluate.perplexity import score
from trilobite.quantize.calibrate.store import HessianStore
from trilobite.recipe import Role
from trilobite.runtime.load import load

METHODS = ("gptq2", "quip2")
"""Names of folders in the work folder: the methods that are compared."""


def losses(
    matrices: list[Matrix], model: Path, work: Path, packed: Mapping[str, Mapping[str, Tensor]]
) -> list[dict[str, Any]]:
    """Whole and row-wise loss by projection and method."""
    source = open_source(str(model))
    store = HessianStore(work / "hessians", source=source.fingerprint(), calibration=None)
    found: dict[str, dict[str, list[float]]] = {}
    for m in matrices:
        w = read_matrix(source, m).float()
        h, _ = store.get(m.name, w.shape[1])
        size = ((w @ h) * w).sum(-1)
        row = found.setdefault(f"{m.role.value}, {m.projection}", {})
        row.setdefault("spread", []).append(float(size.max() / size.median()))
        for method, tensors in packed.items():
            e = w - tensors[m.name]
            loss = ((e @ h) * e).sum(-1)
            row.setdefault(f"{method} whole", []).append(float(loss.sum() / size.sum()))
            row.setdefault(f"{method} rows", []).append(float((loss / size).mean()))
    return [{"role": role} | {k: statistics.mean(v) for k, v in row.items()} for role, row in found.items()]


def joined(
    tensors: Mapping[str, Mapping[str, Tensor]], matrices: list[Matrix], attention: str, experts: str
) -> dict[str, Tensor]:
    """The tensors of a model whose attention is that of one method and whose experts are of another."""
    found = dict(tensors[experts])
    for m in matrices:
        if m.role is Role.ATTENTION:
            found[m.name] = tensors[attention][m.name]
    return found


def main() -> None:
    """Measure, print, put the tables on their page."""
    args = _arguments()
    work = args.work / args.model.name
    packed = {method: decoded(work / method) for method in METHODS}
    matrices = [m for m in identify(open_source(str(args.model))) if m.role in (Role.ATTENTION, Role.EXPERT)]
    picked = [m for m in matrices if m.expert in (None, 1)]
    rows = losses(picked, args.model, work, packed)
    pairs = [(attention, experts) for attention in METHODS for experts in METHODS]
    models = {f"{a} / {e}": build(joined(packed, matrices, a, e), args.model) for a, e in pairs}
    bench = open_bench(args.model, args.text, context=args.context, tokens=args.tokens)
    reference = load(str(args.model), dtype=torch.float32)
    scores = score(models, bench.ids, context=args.context, batch=4, reference=reference)
    columns = [f"{method} {kind}" for kind in ("whole", "rows") for method in METHODS]
    report = "\n".join(
        (
            table(
                ("role", "largest row / median", *columns),
                [(r["role"], f"{r['spread']:.0f}", *(f"{r[c]:.4f}" for c in columns)) for r in rows],
            ),
            "",
            table(
                ("attention / experts", "perplexity", "KL"),
                [(name, f"{s.perplexity:.2f}", f"{s.kl:.4f}") for name, s in scores.items()],
            ),
        )
    )
    kl = {name: s.kl for name, s in scores.items()}
    summary = {"benchmark": "row_loss", "model": args.model.name, "rows": rows, "kl": kl}
    publish(report, summary, page=args.page, marker="row-loss", title=f"`{args.model.name}`:")


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    add_model(options)
    add_text(options, tokens=4096)
    add_work(options, "where quality.py keeps its folders")
    add_page(options, "row-loss")
    return options.parse_args()


if __name__ == "__main__":
    main()
