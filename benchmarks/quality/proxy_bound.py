"""Does the bound of QuIP#'s Theorem 4.1 hold on real Hessians, and how near to it does BlockLDLQ come?

    python -m benchmarks.quality.proxy_bound MODEL [--layers 0 3 5] [--page docs/results.md]

For several matrices W [N, K] of a model and the Hessians H [K, K] of their inputs (those that `quality.py
--calibration` keeps in the work folder, or newly collected ones), rotated and rounded to E8P points by `block_ldlq` at
the scale of a Gaussian source. With E = W - W_q and eta the errors that the quantizer makes on what it is given, in
units of tr(W H W^T), from the smallest to the largest:

    loss        tr(E H E^T)                                       what was to be made small
    tr D        N sigma^2 tr(D),  H = L^T D L                     the proof of the theorem
    B.1         N sigma^2 |H^1/2 . M_D|_2 tr(H^1/2)               the first half of Lemma B.1
    theorem     g N mu^2 sigma^2 / K tr(H^1/2)^2                  Theorem 4.1

sigma^2 is the largest eigenvalue that the second moment of eta has in any block of eight columns: a codebook of finite
size has no bound that holds for every vector, so the theorem's condition is taken as it turned out. mu is sqrt(K) times
the largest entry of H's eigenvectors; Lemma 3.1 bounds it with probability 0.99. `nearest` is the loss without
feedback, N g sigma^2 tr(H) its bound (section 4.1), `stored` the loss after the scale search and the second passes of
method `ldlq`. The theorem without rotation, for the same sigma, shows what incoherence is worth.

Prints a markdown table, whether all inequalities hold, and one line of JSON.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.markdown import table
from benchmarks.lib.packed import hessians
from benchmarks.lib.script import TRAINING_TEXT, add_model, add_page, add_work, parser, publish
from trilobite.checkpoint.roles import identify, read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.formats.incoherence import Spin, draw_signs, read_signs
from trilobite.formats.lattice import DIM, RHO, nearest
from trilobite.formats.weight import dequantize
from trilobite.quantize.calibrate.store import HessianStore
from trilobite.quantize.calibrate.windows import SAMPLES, Calibration
from trilobite.quantize.methods.hessian import relative_loss, weighted_error
from trilobite.quantize.methods.ldlq import SIGMA, block_ldl, block_ldlq, quantize_lattice
from trilobite.recipe import LatticeFormat

FORMAT = LatticeFormat(codebook="e8p", bits=2)
MATRICES = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "self_attn.kv_b_proj",
    "experts.1.w1",
    "experts.1.w2",
    "experts.1.gate_proj",
    "experts.1.down_proj",
)
"""Ends of the names of the matrices that are looked at: attention, gate and down of an expert."""
CONFIDENCE = 0.99
KEYS = ("loss", "tr D", "B.1", "theorem")


def spread(h: Tensor) -> float:
    """mu of H [K, K] fp64: sqrt(K) times the largest entry of its eigenvectors."""
    return math.sqrt(len(h)) * float(torch.linalg.eigh(h)[1].abs().max())


def root(h: Tensor) -> Tensor:
    """H^1/2 of a positive definite H [K, K] fp64."""
    values, vectors = torch.linalg.eigh(h)
    return (vectors * values.sqrt()) @ vectors.T


def masked_norm(half: Tensor) -> float:
    """|H^1/2 . M_D|_2: the largest eigenvalue that any diagonal block of eight has."""
    blocks = torch.stack([half[i : i + DIM, i : i + DIM] for i in range(0, len(half), DIM)])
    return float(torch.linalg.eigvalsh(blocks).max())


def rotated(w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 3: both sides of W [N, K] fp32, in units of its standard deviation; H [K, K] fp64, still undamped."""
    n, k = w.shape
    first, second = (
        read_signs(draw_signs("hadamard", m, seed), "hadamard", m) for seed, m in ((0, k), (1, n))
    )
    turned = second.forward(first.forward(w).T.contiguous()).T.contiguous()
    matrix = conjugated(h.float(), first)
    return turned / turned.square().mean().sqrt(), ((matrix + matrix.T) / 2).double()


def conjugated(h: Tensor, spin: Spin) -> Tensor:
    """T H T^T."""
    return spin.forward(spin.forward(h).T.contiguous())


def damped(h: Tensor) -> Tensor:
    """H in units of its mean diagonal, plus SIGMA on the diagonal, as `ldlq` has it."""
    return h / h.diagonal().mean() + SIGMA * torch.eye(len(h), dtype=h.dtype)


def measure(w: Tensor, hessian: Tensor) -> dict[str, Any]:
    """Losses and bounds of one matrix. w: [N, K] fp32    hessian: [K, K] fp32."""
    n, k = w.shape
    raw = damped(hessian.double())
    turned, h = rotated(w, hessian.double())
    h = damped(h)
    scale = RHO[FORMAT.codebook, FORMAT.bits][0]
    lower, diagonal = block_ldl(h)

    def quantizer(vectors: Tensor) -> tuple[Tensor, Tensor]:
        codes, points = nearest(vectors * scale, FORMAT, 1.0)
        return codes, points / scale

    _, error = block_ldlq(turned, lower.float(), quantizer)
    eta = (error.double() @ lower.T).view(n, k // DIM, DIM).transpose(0, 1)  # (W - W_q) L^T
    sigma2 = float(torch.linalg.eigvalsh(eta.mT @ eta / n).max())
    flat = turned - quantizer(turned.reshape(-1, DIM))[1].view(n, k)
    blocks = flat.double().view(n, k // DIM, DIM).transpose(0, 1)
    alone = float(torch.linalg.eigvalsh(blocks.mT @ blocks / n).max())
    half = root(h)
    trace, mu = float(half.trace()), spread(h)
    whole = weighted_error(turned, h.float())
    packed = quantize_lattice(w, FORMAT, method="ldlq", hessian=hessian, input_seed=0, seed=1).weight
    return {
        "shape": [n, k],
        "mu without": spread(raw),
        "mu": mu,
        "mu bound": math.sqrt(2 * math.log(2 * k**2 / (1 - CONFIDENCE))),
        "sigma2": sigma2,
        "loss": weighted_error(error, h.float()) / whole,
        "tr D": n * sigma2 * float(diagonal.diagonal(dim1=1, dim2=2).sum()) / whole,
        "B.1": n * sigma2 * masked_norm(half) * trace / whole,
        "theorem": DIM * n * mu**2 * sigma2 / k * trace**2 / whole,
        "theorem without": DIM * n * spread(raw) ** 2 * sigma2 / k * trace**2 / whole,
        "nearest": weighted_error(flat, h.float()) / whole,
        "nearest bound": DIM * n * alone * float(h.trace()) / whole,
        "stored": relative_loss(w, dequantize(packed), hessian),
    }


def ordered(row: Mapping[str, Any]) -> bool:
    """Whether every bound is above what it bounds."""
    values = [row[key] for key in KEYS]
    return (
        values == sorted(values) and row["nearest"] <= row["nearest bound"] and row["mu"] <= row["mu bound"]
    )


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    header = (
        *("matrix", "shape", "μ as it is", "μ rotated", "Lemma 3.1", "σ²"),
        *("stored", "loss", "N σ² tr D", "Lemma B.1", "Theorem 4.1", "the same, not rotated", "nearest"),
    )
    cells = [
        (
            row["name"],
            "x".join(map(str, row["shape"])),
            *(f"{row[key]:.1f}" for key in ("mu without", "mu", "mu bound")),
            f"{row['sigma2']:.3f}",
            *(f"{row[key]:.4f}" for key in ("stored", "loss", "tr D", "B.1")),
            f"{row['theorem']:.2f}",
            f"{row['theorem without']:.1f}",
            f"{row['nearest']:.4f}",
        )
        for row in rows
    ]
    return table(header, cells)


def main() -> None:
    """Measure, print, put the table on its page; exit status 1 when a bound does not hold."""
    args = _arguments()
    text = Calibration(text=args.calibration, samples=args.samples, context=args.context)
    shared, _ = hessians(args.model, args.work, text)
    assert shared.hessians is not None
    source = open_source(str(args.model))
    store = HessianStore(shared.hessians, source=source.fingerprint(), calibration=None)
    ends = tuple(f"{name}.weight" for name in MATRICES)
    rows = []
    for matrix in identify(source):
        if matrix.layer not in args.layers or not matrix.name.endswith(ends):
            continue
        h, _ = store.get(matrix.name, matrix.shape[1])
        name = matrix.name.removeprefix("model.layers.").removesuffix(".weight")
        rows.append({"name": name, **measure(read_matrix(source, matrix).float(), h)})
    good = all(ordered(row) for row in rows)
    report = "\n".join(
        (
            f"`{args.model.name}`, e8p-2; losses and bounds over tr(W H Wᵀ):",
            "",
            markdown(rows),
            "",
            f"- Every bound is above what it bounds: **{'yes' if good else 'NO'}**",
        )
    )
    summary = {"benchmark": "proxy_bound", "model": args.model.name, "rows": rows, "good": good}
    publish(report, summary, page=args.page, marker="proxy-bound")
    sys.exit(not good)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    add_model(options)
    options.add_argument("--layers", type=int, nargs="*", default=[0, 3, 5])
    options.add_argument("--calibration", type=Path, default=TRAINING_TEXT)
    options.add_argument("--samples", type=int, default=SAMPLES)
    options.add_argument("--context", type=int, default=256)
    add_work(options, "where quality.py keeps the Hessians")
    add_page(options, "proxy-bound")
    return options.parse_args()


if __name__ == "__main__":
    main()
