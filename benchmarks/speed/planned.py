"""How long does `trilobite compress --bits 3.5` take on Mixtral-8x7B, in how much memory, with importance from where?

    python -m benchmarks.speed.planned --tokenizer ../shared/models/tiny-mixtral [--page docs/results.md]

Compresses random checkpoints of Mixtral's shapes, of one layer and of two, each in a process of its own. A layer takes
what two of them take more than one, the model 32 times that and what one layer takes beside. Needs 7 GB of disk. The
tokenizer is for importance that reads a text, whatever tokens it makes. The last line is JSON.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_machine, add_page, of_machine, parser, publish
from benchmarks.lib.synthetic import write_mixtral

IMPORTANCES = ("none", "weights", "builtin", "self")
LAYERS = 32
CHILD = """
import json, sys, time
from pathlib import Path
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.run.compress import compress
started = time.monotonic()
compress(sys.argv[1], Path(sys.argv[2]), Budget(bits=float(sys.argv[3]), importance=sys.argv[4]))
seconds = time.monotonic() - started
status = Path("/proc/self/status").read_text()
peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
print(json.dumps({"seconds": seconds, "peak": peak}))
"""


def compressed(source: Path, importance: str, bits: float) -> dict[str, float]:
    """Seconds, and peak memory in bytes."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        command = [sys.executable, "-c", CHILD, str(source), f"{folder}/packed", str(bits), importance]
        child = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each importance."""
    folder = Path(tempfile.mkdtemp(prefix="trilobite-planned-", dir=args.work))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in args.importance}
    try:
        for layers in (1, 2):
            source = folder / str(layers)
            write_mixtral(source, layers)
            for file in args.tokenizer.glob("tokenizer*"):
                shutil.copy(file, source)
            for name in args.importance:
                found[name].append(compressed(source, name, args.bits))
                print(f"{name}, {layers} layers: {found[name][-1]['seconds']:.1f} s", flush=True)
            shutil.rmtree(source)
    finally:
        shutil.rmtree(folder)
    rows = []
    for name, (one, two) in found.items():
        layer = two["seconds"] - one["seconds"]
        whole = one["seconds"] + (LAYERS - 1) * layer
        rows.append({"importance": name, "layer": layer, "model": whole, "peak": two["peak"]})
    return rows


def main() -> None:
    """Measure, extrapolate, print."""
    options = parser(__doc__)
    options.add_argument("--bits", type=float, default=3.5)
    options.add_argument("--importance", nargs="+", default=IMPORTANCES)
    options.add_argument("--tokenizer", type=Path, required=True, help="folder of a checkpoint")
    options.add_argument("--work", type=Path, help="folder for checkpoints; default: the system's")
    add_page(options, "planned-speed")
    add_machine(options)
    args = options.parse_args()
    rows = measure(args)
    cells = [
        (r["importance"], f"{r['layer']:.1f}", f"{r['model'] / 60:.1f}", f"{r['peak'] / 1e9:.2f}")
        for r in rows
    ]
    report = table(("importance", "seconds a layer", "minutes for Mixtral-8x7B", "peak memory, GB"), cells)
    publish(
        report,
        {"benchmark": "planned", "rows": rows},
        page=args.page,
        marker=of_machine("planned-speed", args.machine),
    )


if __name__ == "__main__":
    main()
