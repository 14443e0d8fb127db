"""What do workers of a Ray cluster add to the speed of compression, and what do they cost?

    python -m benchmarks.speed.ray [--recipes search3 hqq3]

Packs a synthetic layer of Mixtral-8x7B's shapes (1.7 billion weights, 4 GB of disk) with one thread of one process, then
on a cluster of one node of one core, then of two: processes on this machine. Prints the limit first, the rate that all
cores reach together without any coordination. Rates are those from the first tenth of the weights on; the time before,
in which Ray and the workers start, is a column of its own. With as many cores as nodes, the command itself and Ray's
services share the nodes' cores. The last line is JSON.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.ray_nodes import Nodes
from benchmarks.lib.script import add_output, add_page, parser, publish
from benchmarks.lib.synthetic import heavy_tailed, write_mixtral
from trilobite.integrations.ray import RayWorkers
from trilobite.quantize.methods.registry import quantize
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.quantize.threads import single_threaded_torch
from trilobite.recipe import Format, load_recipe

BEFORE = 0.1
"""Of the weights: what is packed before speed is measured."""


class Clock:
    """When how many weights were done."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.done = [(0.0, 0)]

    def line(self, line: PlanLine, record: Mapping[str, Any], fresh: bool) -> None:
        """Count one that is done."""
        n, k = line.matrix.shape if line.format else (0, 0)
        self.done.append((time.perf_counter() - self.began, self.done[-1][1] + n * k))

    def rate(self) -> tuple[float, float]:
        """Weights per second from the first tenth on, and the seconds that the run took beyond that rate."""
        end, total = self.done[-1]
        at, first = next((at, count) for at, count in self.done if count > BEFORE * total)
        rate = (total - first) / (end - at)
        return rate, end - total / rate


def pack(source: Path, dst: Path, recipe: str, workers: RayWorkers | None) -> tuple[float, float]:
    """One run; its rate, and seconds beyond it."""
    clock = Clock()
    options = Options(jobs=1, device="cpu", on_line=clock.line, workers=workers)
    compress(str(source), dst, load_recipe(recipe), options=options)
    shutil.rmtree(dst)
    return clock.rate()


def limit(recipe: str) -> float:
    """Weights per second of two processes, of one thread each, that know nothing of each other."""
    with ProcessPoolExecutor(2) as pool:
        return sum(pool.map(_alone, [recipe] * 2))


def _alone(recipe: str) -> float:
    rule = next(rule for rule in load_recipe(recipe).rules if isinstance(rule.format, Format))
    assert isinstance(rule.format, Format)
    w = heavy_tailed(4096, 4096)
    with single_threaded_torch():
        quantize(w, rule.format, rule.method)
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < 2:
            quantize(w, rule.format, rule.method)
            count += w.numel()
        return count / (time.perf_counter() - began)


def measure(source: Path, work: Path, recipes: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each recipe: medians of the rates on one thread, one node and two, and their seconds of starting."""
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        rows.append({"recipe": recipe, "limit": limit(recipe), "thread": [], "one": [], "two": []})
    for _ in range(repeats):
        for row in rows:
            row["thread"].append(pack(source, work / "packed", row["recipe"], None))
        for name, count in (("one", 1), ("two", 2)):
            with ExitStack() as leave:
                nodes = Nodes(count)
                leave.callback(nodes.close)
                for row in rows:
                    workers = RayWorkers(nodes.address)
                    row[name].append(pack(source, work / "packed", row["recipe"], workers))
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """The rates as a table."""
    cells = []
    for row in rows:
        rate = {name: statistics.median(r for r, _ in row[name]) for name in ("thread", "one", "two")}
        start = statistics.median(s for _, s in row["two"])
        cells.append(
            (
                row["recipe"],
                *(f"{value / 1e6:.1f}" for value in (row["limit"], *rate.values())),
                f"{1 - rate['one'] / rate['thread']:.1%}",
                f"{rate['two'] / rate['one']:.2f}",
                f"{start:.1f}",
            )
        )
    heads = ("Mweights/s", "limit of 2 cores", "1 thread", "1 node", "2 nodes", "cost of Ray", "2 nodes / 1")
    return table((*heads, "start, s"), cells)


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
