"""How fast is compression on this machine, how long would large models take, how much memory does it hold?

    python -m benchmarks.speed.compress [--quick] [--rss]
    python -m benchmarks.speed.compress --rss-only --recipe milo-s1 --layers 8

Prints the limit first: the memory bandwidth of this run. Then megaweights per second of each method on real
shapes, run as the compress loop does: one torch thread for each matrix, as many matrices at a time as cores.
Weights are bf16 from Student's t distribution with 5 degrees of freedom, heavy-tailed as real ones are.
`--rss` packs a synthetic checkpoint of Mixtral's shapes, 1.45 billion parameters a layer, from disk to disk, and
compares peak memory with the promise: the largest two tensors in fp32 plus 1 GB. The last line is JSON.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from benchmarks.lib.synthetic import heavy_tailed, write_mixtral
from trilobite.errors import RecipeError
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS, quantize
from trilobite.recipe import Format, load_recipe

INT3 = Format(bits=3, group=64)
SHAPES = ((14336, 4096), (4096, 4096), (1408, 2048))
KINDS = ("rtn", "search", "hqq")
PATIENCE = 90.0
"""Seconds after which a case is not repeated."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time: a method on a shape; with rank > 0, MiLo with that method inside."""

    shape: tuple[int, int]
    method: str
    rank: int = 0

    def __str__(self) -> str:
        """How tables call it."""
        return f"milo r{self.rank} ({self.method})" if self.rank else self.method


MILO_CASES = (
    Case(shape=(14336, 4096), method="search", rank=16),
    Case(shape=(4096, 4096), method="search", rank=512),
    Case(shape=(2048, 2048), method="search", rank=800),
    Case(shape=(14336, 4096), method="hqq", rank=16),
    Case(shape=(4096, 4096), method="hqq", rank=512),
    Case(shape=(2048, 2048), method="hqq", rank=800),
)
"""Ranks of Table 4: Mixtral-8x7B s1 has dense 512 and experts 16 on average, DeepSeek-MoE s1 dense 800."""

EXPERT = Case(shape=(14336, 4096), method="search", rank=16)
DENSE = Case(shape=(4096, 4096), method="search", rank=512)
FINE_DENSE = Case(shape=(2048, 2048), method="search", rank=800)
NONE = Case(shape=(1408, 2048), method="search")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The linear weights of a real model, (N, K, count, kind), and the timed cases that stand for MiLo-s1.

    Qwen3-235B gets the ranks of the fine-grained preset, which the cap lowers to 630 on a 4096x4096 matrix.
    """

    name: str
    matrices: tuple[tuple[int, int, int, str], ...]
    dense: Case
    expert: Case

    def weights(self, kind: str) -> int:
        """Weights of all matrices of a kind."""
        return sum(n * k * count for n, k, count, of in self.matrices if of == kind)


ARCHITECTURES = (
    Architecture(
        name="Mixtral-8x7B",
        matrices=(
            (14336, 4096, 32 * 8 * 2, "expert"),
            (4096, 14336, 32 * 8, "expert"),
            (4096, 4096, 32 * 2, "dense"),
            (1024, 4096, 32 * 2, "dense"),
        ),
        dense=DENSE,
        expert=EXPERT,
    ),
    Architecture(
        name="DeepSeek-MoE-16B",
        matrices=(
            (1408, 2048, 27 * 64 * 2, "expert"),
            (2048, 1408, 27 * 64, "expert"),
            (2816, 2048, 27 * 2, "dense"),
            (2048, 2816, 27, "dense"),
            (10944, 2048, 2, "dense"),
            (2048, 10944, 1, "dense"),
            (2048, 2048, 28 * 4, "dense"),
        ),
        dense=FINE_DENSE,
        expert=NONE,
    ),
    Architecture(
        name="Qwen3-235B-A22B",
        matrices=(
            (1536, 4096, 94 * 128 * 2, "expert"),
            (4096, 1536, 94 * 128, "expert"),
            (8192, 4096, 94, "dense"),
            (4096, 8192, 94, "dense"),
            (512, 4096, 94 * 2, "dense"),
        ),
        dense=DENSE,
        expert=NONE,
    ),
)


# The limit


def bandwidth() -> dict[str, float]:
    """GB/s of reading and of copying memory with all cores, best of five."""
    source = torch.ones(1 << 27)  # 512 MiB, more than what a core can hope to find in its caches
    target = torch.empty_like(source)
    read = min(_seconds(source.sum) for _ in range(5))
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    return {"read": source.nbytes / read / 1e9, "copy": 2 * source.nbytes / copy / 1e9}


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# Speed


def measure(case: Case, w: Tensor, *, jobs: int, repeats: int) -> dict[str, Any]:
    """Megaweights per second of all cores together: `jobs` matrices at a time, the median of the repeats.

    Cases of minutes are repeated only while they have taken less than PATIENCE.
    """
    iterations: list[int] = []

    def run(_: int) -> None:
        if not case.rank:
            quantize(w, INT3, case.method)
            return
        result = METHODS[case.method](w, INT3, compensation=Compensation(rank=case.rank))
        iterations.append(len(result.errors))

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            times: list[float] = []
            while len(times) < repeats and sum(times) < PATIENCE:
                times.append(_seconds(lambda: list(pool.map(run, range(jobs)))))
    finally:
        torch.set_num_threads(before)
    seconds = statistics.median(times)
    row: dict[str, Any] = {"case": str(case), "shape": list(case.shape), "seconds": times}
    return row | {
        "rate": jobs * w.numel() / seconds / 1e6,
        "iterations": iterations[0] if iterations else None,
    }


def speeds(cases: list[Case], *, jobs: int, repeats: int, fraction: int) -> dict[Case, dict[str, Any]]:
    """Time every case. fraction: of the rows of large matrices, at least 2048 (`--quick`)."""
    found = {}
    weights: dict[tuple[int, int], Tensor] = {}
    for case in cases:
        n, k = case.shape
        if (n, k) not in weights:
            weights = {(n, k): heavy_tailed(n, k)}
        rows = n if n * k < 1 << 23 else max(n // fraction, 2048)
        found[case] = measure(case, weights[n, k][:rows], jobs=jobs, repeats=repeats)
        print(f"{case} {n}x{k}: {found[case]['rate']:.2f} megaweights/s", flush=True)
    return found


def speed_table(found: dict[Case, dict[str, Any]], limit: dict[str, float]) -> str:
    """Rates, and the share of the read bandwidth that reading bf16 weights at this rate would take."""
    rows = []
    for case, row in found.items():
        share = row["rate"] * 2e6 / (limit["read"] * 1e9)
        iterations = str(row["iterations"] or "")
        rows.append(
            (f"{case} {case.shape[0]}x{case.shape[1]}", f"{row['rate']:.1f}", f"{share:.2%}", iterations)
        )
    return table(("method, INT3 g64", "Mweights/s", "of the read limit", "iterations"), rows)


def implied(found: dict[Case, dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds for whole models by the measured rates; plain methods by the shape nearest to the experts'."""
    rows = []
    for a in ARCHITECTURES:
        shape = NONE.shape if a.expert == NONE else EXPERT.shape
        total = a.weights("dense") + a.weights("expert")
        row: dict[str, Any] = {"model": a.name, "weights": total}
        for method in KINDS:
            row[method] = total / found[Case(shape=shape, method=method)]["rate"] / 1e6
        for kind in ("search", "hqq"):
            dense = Case(shape=a.dense.shape, method=kind, rank=a.dense.rank)
            expert = Case(shape=a.expert.shape, method=kind, rank=a.expert.rank)
            parts = a.weights("dense") / found[dense]["rate"] + a.weights("expert") / found[expert]["rate"]
            row[f"milo-s1 ({kind})"] = parts / 1e6
        rows.append(row)
    return rows


def implied_table(rows: list[dict[str, Any]]) -> str:
    """Minutes by model and method."""
    names = [key for key in rows[0] if key not in ("model", "weights")]
    cells = [
        (r["model"], f"{r['weights'] / 1e9:.1f}", *(f"{r[name] / 60:.1f}" for name in names)) for r in rows
    ]
    return table(("minutes for", "10^9 weights", *names), cells)


# Memory

CHILD = """
import sys, time
from pathlib import Path
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
compress(sys.argv[1], Path(sys.argv[2]), load_recipe(sys.argv[3]))
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""
"""ru_maxrss would count the parent's pages, which a child holds until it executes its own program."""


def peak_memory(folder: Path, recipe: str, layers: int) -> dict[str, Any]:
    """Compress a synthetic checkpoint in a child process: its seconds, and its peak memory beside the promised bound."""
    largest, parameters = write_mixtral(folder / "source", layers)
    started = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder / "source"), str(folder / "packed"), recipe],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    bound = sum(4 * count for count in largest) + 10**9
    size = sum(f.stat().st_size for f in (folder / "packed").iterdir())
    peak = int(child.stdout) * 1024
    row = {"recipe": recipe, "parameters": parameters, "peak": peak, "bound": bound, "packed_bytes": size}
    return row | {"seconds": seconds, "within": peak <= bound}


def memory_text(row: dict[str, Any]) -> str:
    """One sentence about the memory."""
    return (
        f"{row['parameters'] / 1e9:.2f} billion parameters with {row['recipe']}: {row['seconds']:.0f} s, peak resident "
        f"memory {row['peak'] / 1e9:.2f} GB, bound {row['bound'] / 1e9:.2f} GB (largest two in fp32 + 1 GB): "
        f"**{'within' if row['within'] else 'EXCEEDED'}**"
    )


def main() -> None:
    args = _arguments()
    jobs = args.jobs or os.cpu_count() or 1
    limit = bandwidth()
    lines = [
        f"{jobs} cores; memory of this run: read {limit['read']:.1f} GB/s, copy {limit['copy']:.1f} GB/s",
        "",
    ]
    print(lines[0], flush=True)
    summary: dict[str, Any] = {"benchmark": "compress", "jobs": jobs, "quick": args.quick, "bandwidth": limit}
    if not args.rss_only:
        cases = [Case(shape=shape, method=m) for shape in SHAPES for m in KINDS] + list(MILO_CASES)
        repeats, fraction = (1, 16) if args.quick else (args.repeats, 1)
        found = speeds(cases, jobs=jobs, repeats=repeats, fraction=fraction)
        models = implied(found)
        lines += [speed_table(found, limit), "", implied_table(models), ""]
        summary |= {"speeds": list(found.values()), "models": models}
    if args.rss or args.rss_only:
        folder = Path(tempfile.mkdtemp(prefix="trilobite-rss-", dir=args.work))
        try:
            summary["memory"] = peak_memory(folder, args.recipe, args.layers)
        finally:
            shutil.rmtree(folder)
        lines += [memory_text(summary["memory"])]
    report = "\n".join(lines).strip()
    publish(report, summary, page=args.page, marker=of_machine("compress", args.machine), output=args.output)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one repeat, a sixteenth of the large matrices")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--jobs", type=int, default=0, help="matrices at a time; 0 = one per core")
    options.add_argument(
        "--rss", action="store_true", help="also pack a synthetic checkpoint (needs 8 GB of disk)"
    )
    options.add_argument("--rss-only", action="store_true", help="only the synthetic checkpoint")
    options.add_argument("--recipe", default="rtn3", help="for the synthetic checkpoint")
    options.add_argument(
        "--layers", type=int, default=2, help="of the synthetic checkpoint, 1.45e9 parameters each"
    )
    options.add_argument(
        "--work", type=Path, help="folder for the synthetic checkpoint; default: the system's"
    )
    add_output(options)
    add_page(options, "compress")
    add_machine(options)
    args = options.parse_args()
    try:
        load_recipe(args.recipe)
    except RecipeError as e:
        options.error(str(e))
    return args


if __name__ == "__main__":
    main()
