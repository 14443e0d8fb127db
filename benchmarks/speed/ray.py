"""What do workers of a Ray cluster add to the speed of compression, and what do they cost?

    python -m benchmarks.speed.ray [--recipes search3 hqq3]

Packs a synthetic layer of Mixtral-8x7B's shapes (1.7 billion weights, 5 GB of disk) with two threads of one process, and
with one; then on a cluster of one node of one core, and of two: processes on this machine, each node's bound to a core.
Rates are those of the layer's matrices, from the first tenth of their weights on: embeddings and head come at other
times in each. What a run takes beyond its rate, in which Ray and the workers start and these two are packed, is a
column of its own. All four follow each other in every repetition, and ratios are medians of those within one. With as
many cores as nodes, the command itself and Ray's services share the nodes' cores. The last line is JSON.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.markdown import table
from benchmarks.lib.ray_nodes import Nodes
from benchmarks.lib.script import add_output, add_page, parser, publish
from benchmarks.lib.synthetic import write_mixtral
from trilobite.integrations.ray import RayWorkers
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe

RUNS = ("threads", "thread", "one", "two")
BEFORE = 0.1
"""Of the weights: what is packed before speed is measured."""
SAME = 0.005
"""Seconds between what is told of the matrices of a task at most."""


class Clock:
    """When which weights of the layer were done, and what each matrix took."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.lines = list[tuple[float, float, int]]()

    def line(self, line: PlanLine, record: Mapping[str, Any], fresh: bool) -> None:
        """Note one that is done."""
        if line.format and line.matrix.layer is not None:
            weights = torch.Size(line.matrix.shape).numel()
            self.lines.append((time.perf_counter() - self.began, record["seconds"], weights))

    def rate(self) -> tuple[float, float]:
        """Weights per second from the first tenth on, and the seconds that the run took beyond that rate.

        Of what is in work at the first tenth, the part that is left counts.
        """
        end, total = self.lines[-1][0], sum(weights for *_, weights in self.lines)
        counts = accumulate(weights for *_, weights in self.lines)
        first = next(at for (at, *_), count in zip(self.lines, counts, strict=True) if count > BEFORE * total)
        left, following, begin = 0.0, end, end
        for at, seconds, weights in reversed(self.lines):
            stop = at if following - at > SAME else begin  # of a task's matrices the last one ended now
            following, begin = at, stop - seconds
            left += weights * min(1.0, max(0.0, stop - first) / seconds)
        rate = left / (end - first)
        return rate, end - total / rate


def pack(
    source: Path, dst: Path, recipe: str, *, jobs: int = 1, workers: RayWorkers | None = None
) -> tuple[float, float]:
    """One run; its rate, and seconds beyond it."""
    clock = Clock()
    options = Options(jobs=jobs, device="cpu", on_line=clock.line, workers=workers)
    compress(str(source), dst, load_recipe(recipe), options=options)
    shutil.rmtree(dst)
    return clock.rate()


def measure(source: Path, work: Path, recipes: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each recipe: rate and seconds of starting of every run."""
    rows: list[dict[str, Any]] = [{"recipe": recipe} | {n: [] for n in RUNS} for recipe in recipes]
    for _ in range(repeats):
        for row in rows:
            row["threads"].append(pack(source, work / "packed", row["recipe"], jobs=2))
            row["thread"].append(pack(source, work / "packed", row["recipe"]))
            for name, count in (("one", 1), ("two", 2)):
                with ExitStack() as leave:
                    nodes = Nodes(count, pinned=True)
                    leave.callback(nodes.close)
                    workers = RayWorkers(nodes.address)
                    row[name].append(pack(source, work / "packed", row["recipe"], workers=workers))
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """The rates as a table."""
    cells = []
    for row in rows:
        rate = {name: statistics.median(r for r, _ in row[name]) for name in RUNS}
        start = statistics.median(s for _, s in row["two"])
        cells.append(
            (
                row["recipe"],
                *(f"{value / 1e6:.1f}" for value in rate.values()),
                f"{1 - _ratio(row, 'one', 'thread'):.1%}",
                f"{_ratio(row, 'threads', 'thread'):.2f}",
                f"{_ratio(row, 'two', 'one'):.2f}",
                f"{start:.1f}",
            )
        )
    heads = (
        "Mweights/s",
        "2 threads",
        "1 thread",
        "1 node",
        "2 nodes",
        "cost of Ray",
        "2 threads / 1",
        "2 nodes / 1",
    )
    return table((*heads, "start, s"), cells)


def _ratio(row: dict[str, Any], one: str, other: str) -> float:
    return statistics.median(a / b for (a, _), (b, _) in zip(row[one], row[other], strict=True))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--recipes", nargs="+", default=["search3", "hqq3"])
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument(
        "--work", type=Path, help="folder for the synthetic checkpoint (default: a temporary one)"
    )
    add_output(options)
    add_page(options, "ray")
    args: argparse.Namespace = options.parse_args()
    work = Path(tempfile.mkdtemp(prefix="trilobite-ray-", dir=args.work))
    try:
        write_mixtral(work / "source", 1)
        rows = measure(work / "source", work, args.recipes, args.repeats)
    finally:
        shutil.rmtree(work)
    publish(
        report(rows), {"benchmark": "ray", "rows": rows}, page=args.page, marker="ray", output=args.output
    )


if __name__ == "__main__":
    main()
