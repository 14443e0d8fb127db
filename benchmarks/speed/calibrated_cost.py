"""What does each method cost on a true Mixtral layer, in time and memory, and what on the whole model?

    python -m benchmarks.speed.calibrated_cost [--cases 0 1 2 ...] [--results FILE.json] [--page docs/results.md]

Random heavy-tailed weights and H = I + X X^T / 512 with Gaussian X [K, 512]: neither changes what is computed. Every
case runs in a process of its own, on one thread, as `trilobite compress` works on a matrix. Rows do not depend on each
other, so the slow cases take some of them (column `rows`), and what a matrix costs once whatever its rows is clocked
apart: the factorisation of H (gptq), its rotation, factorisation and the scale search (ldlq). A matrix then takes

    once + N * (seconds - once) / rows,

and the model the sum over its matrices (a case stands for those with its K; MiLo's for experts and dense ones). Peak
memory is that of the process less what it held before, plus 12 bytes for each weight of the matrix that was left out.
Passing the calibration text through the model and summing up Hessians come on top for calibrated methods: their
operations, at the rate of a matrix product of this machine, on one core. `gptq super` is what `--bits 3.0 --method gptq`
does: formats under super-scales, found once more by descent, and a text that the model writes itself.

Seconds are those of the processor. `--cases` runs some cases only and `--results` keeps them, so that the machine has to
be quiet for a minute at a time; the tables are made from all that the file holds. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_page, parser, publish
from benchmarks.lib.synthetic import heavy_tailed
from trilobite.formats.weight import dequantize
from trilobite.quantize.calibrate.sampled import FOR_HESSIANS, LENGTH, PASSES
from trilobite.quantize.methods import gptq as gptq_module
from trilobite.quantize.methods import ldlq as ldlq_module
from trilobite.quantize.methods.hessian import relative_loss
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS
from trilobite.recipe import Format, LatticeFormat

INT3, INT2 = Format(bits=3, group=64), Format(bits=2, group=64)
SUPER = Format(bits=3, group=16, super_scales=True)
E8P = LatticeFormat(codebook="e8p", bits=2)
WIDE, DOWN = 4096, 14336
MODEL = ((14336, WIDE, 32 * 8 * 2), (4096, DOWN, 32 * 8), (4096, WIDE, 32 * 2), (1024, WIDE, 32 * 2))
"""Mixtral-8x7B: (N, K, count) of gate and up, down, q and o, k and v."""
ACTIVE, LAYERS, TOP = 12.9e9, 32, 2
"""Mixtral's parameters at work on a token."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method on some rows of a matrix [N, K]. rank: of MiLo's compensator."""

    method: str
    n: int
    k: int
    rows: int
    rank: int = 0


CASES = (
    Case(method="search", n=14336, k=WIDE, rows=14336),
    Case(method="hqq", n=14336, k=WIDE, rows=14336),
    Case(method="milo-s1", n=14336, k=WIDE, rows=14336, rank=16),
    Case(method="milo-s1", n=4096, k=WIDE, rows=4096, rank=512),
    Case(method="gptq", n=14336, k=WIDE, rows=8192),
    Case(method="ldlq e8p-2", n=14336, k=WIDE, rows=1024),
    Case(method="gptq", n=4096, k=DOWN, rows=512),
    Case(method="ldlq e8p-2", n=4096, k=DOWN, rows=256),
    Case(method="gptq super", n=14336, k=WIDE, rows=8192),
    Case(method="gptq super", n=4096, k=DOWN, rows=512),
)
TEXT = 128 * 2048, 2
"""Tokens of the default calibration, and passes: collect, propagate."""
CALIBRATED = {"gptq": TEXT, "ldlq e8p-2": TEXT, "gptq super": (FOR_HESSIANS * LENGTH, PASSES + 1)}
"""By method: tokens that pass through the model, and how often."""


# One case, in a process of its own


def hessian(k: int) -> Tensor:
    """A positive definite matrix [K, K] fp32."""
    x = torch.randn(k, 512, generator=torch.Generator().manual_seed(k))
    h = torch.addmm(torch.zeros(()), x, x.T, alpha=1 / 512)
    h.diagonal().add_(1.0)
    return h


class Clock:
    """Seconds of the calls of some functions, by name, in order."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.calls: dict[str, list[float]] = {}

    @contextmanager
    def on(self, module: ModuleType, *names: str) -> Iterator[None]:
        """Clock these functions of a module."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(module, name, self._clocked(getattr(module, name), name)))
            yield

    def _clocked(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args)
            finally:
                self.calls.setdefault(name, []).append(time.process_time() - started)

        return call


def run_gptq(w: Tensor, h: Tensor, fmt: Format) -> float:
    """GPTQ and the measuring of its loss; returns the seconds of what it does once."""
    clock = Clock()
    with clock.on(gptq_module, "inverse_factor"):
        METHODS["gptq"](w, fmt, hessian=h)
    return sum(clock.calls["inverse_factor"])


def run_ldlq(w: Tensor, h: Tensor) -> float:
    """BlockLDLQ and the measuring of its loss; returns the seconds of what it does once."""
    clock = Clock()
    with clock.on(ldlq_module, "_rotated_hessian", "block_ldl", "block_ldlq"):
        packed = ldlq_module.quantize_lattice(w, E8P, method="ldlq", hessian=h).weight
    relative_loss(w, dequantize(packed), h)
    return sum(
        clock.calls[name][0] for name in ("_rotated_hessian", "block_ldl", "block_ldlq")
    )  # of the last, the scale search


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) * 1024


def measure(case: Case) -> dict[str, Any]:
    """Seconds and peak memory of one case."""
    torch.set_num_threads(1)
    before = status("VmRSS")
    w = heavy_tailed(case.rows, case.k)
    h = hessian(case.k) if case.method in CALIBRATED else None
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: making the inputs does not count
    once = 0.0
    started = time.process_time()
    if case.method in ("gptq", "gptq super"):
        assert h is not None
        once = run_gptq(w, h, INT2 if case.method == "gptq" else SUPER)
    elif case.method in CALIBRATED:
        assert h is not None
        once = run_ldlq(w, h)
    elif case.rank:
        METHODS["search"](w, INT3, compensation=Compensation(rank=case.rank))
    else:
        METHODS[case.method](w, INT3)
    seconds = time.process_time() - started
    peak = status("VmHWM") - before + 12 * (case.n - case.rows) * case.k
    return {**asdict(case), "seconds": seconds, "once": once, "peak": peak}


def matmul_rate() -> float:
    """Operations a second of a product of 4096x4096 matrices in fp32 on one thread, the best of two."""
    torch.set_num_threads(1)
    a = torch.randn(4096, 4096)
    times = []
    for _ in range(2):
        started = time.process_time()
        a @ a
        times.append(time.process_time() - started)
    return 2 * 4096**3 / min(times)


# All cases


def whole(row: dict[str, Any]) -> float:
    """Seconds of the whole matrix of a case."""
    return matrix_seconds(row, row["n"], row["k"])


def matrix_seconds(row: dict[str, Any], n: int, k: int) -> float:
    """Seconds of a matrix [N, K], by the row of a case; another K counts by its weights."""
    rate = (row["seconds"] - row["once"]) / (row["rows"] * row["k"])
    return float(row["once"] + rate * n * k)


def model_seconds(rows: Sequence[dict[str, Any]], method: str) -> float:
    """Core seconds of all matrices of the model."""
    of_method = [row for row in rows if row["method"] == method]

    def stands_for(n: int, k: int) -> dict[str, Any]:
        if method == "milo-s1":  # by kind: dense matrices have at most 4096 x 4096 weights
            return next(row for row in of_method if (row["rank"] > 16) == (n * k <= WIDE * WIDE))
        return next((row for row in of_method if row["k"] == k), of_method[0])

    return sum(count * matrix_seconds(stands_for(n, k), n, k) for n, k, count in MODEL)


def pass_operations(tokens: int, passes: int) -> dict[str, float]:
    """Operations of passes through the model, in one of which its Hessians are summed up."""
    hessians = 2 * (WIDE**2 * 2 + TOP * (WIDE**2 + DOWN**2))  # of q, k and v; of o; of gate and up; of down
    again = TOP * 2 * (2 * WIDE * DOWN)  # gate and up once more, for what enters down
    return {
        "forward": tokens * (passes * 2 * ACTIVE + LAYERS * again),
        "hessians": float(tokens * LAYERS * hessians),
    }


def markdown(rows: Sequence[dict[str, Any]], rate: float) -> str:
    """The tables."""
    cells = [
        (
            f"{r['method']}{' r' + str(r['rank']) if r['rank'] else ''}",
            f"{r['n']}x{r['k']}",
            str(r["rows"]),
            f"{r['once']:.1f}",
            f"{r['seconds']:.1f}",
            f"{whole(r):.1f}",
            f"{r['peak'] / 1e9:.2f}",
        )
        for r in rows
    ]
    header = ("method", "matrix", "rows", "s once", "s measured", "s whole matrix", "peak GB")
    operations = {method: pass_operations(tokens, passes) for method, (tokens, passes) in CALIBRATED.items()}
    totals = []
    for method in dict.fromkeys(r["method"] for r in rows):
        seconds = model_seconds(rows, method)
        extra = sum(operations.get(method, {}).values()) / rate
        totals.append(
            (
                method,
                *(f"{s / 3600:.1f}" if s else "" for s in (seconds, extra)),
                f"{(seconds + extra) / 3600:.1f}",
            )
        )
    lines = (
        table(header, cells),
        "",
        "Mixtral-8x7B, 46.4·10⁹ weights, in core hours:",
        "",
        table(("method", "quantizing", "forward and Hessians", "total"), totals),
        "",
        *(_passes(method, operations[method]) for method in ("gptq", "gptq super")),
        f"{rate / 1e9:.0f}·10⁹ operations a second of one core.",
    )
    return "\n".join(lines)


def _passes(method: str, operations: Mapping[str, float]) -> str:
    tokens, passes = CALIBRATED[method]
    return (
        f"`{method}`: {passes} passes of {tokens:,} tokens, {operations['forward']:.1e} operations forward, "
        f"{operations['hessians']:.1e} for Hessians."
    )


def main() -> None:
    """Run the cases, one process each; print the tables and put them on their page."""
    args = _arguments()
    if args.child is not None:
        print(json.dumps(measure(CASES[args.child])))
        return
    known = json.loads(args.results.read_text()) if args.results and args.results.exists() else {}
    known["rate"] = known.get("rate") or matmul_rate()
    for number in args.cases:
        command = [sys.executable, "-m", "benchmarks.speed.calibrated_cost", "--child", str(number)]
        child = subprocess.run(command, check=True, capture_output=True, text=True)
        known[str(number)] = json.loads(child.stdout)
        print(known[str(number)], flush=True)
        if args.results:
            args.results.write_text(json.dumps(known))
    rows = [known[str(i)] for i in range(len(CASES)) if str(i) in known]
    if len(rows) < len(CASES):
        raise SystemExit(f"{len(rows)} of {len(CASES)} cases are measured; run the other --cases, too")
    report = markdown(rows, known["rate"])
    summary = {"benchmark": "calibrated_cost", "rate": known["rate"], "rows": rows}
    publish(report, summary, page=args.page, marker="calibrated-cost")


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--cases", type=int, nargs="*", default=range(len(CASES)), help="only these, by number"
    )
    options.add_argument("--results", type=Path, help="keep the measured cases in this file")
    add_page(options, "calibrated-cost")
    options.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return options.parse_args()


if __name__ == "__main__":
    main()
