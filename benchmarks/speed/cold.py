"""The first tokens of a model whose file comes from the disk: pages as they are asked for, and read ahead, in turns.

    python -m benchmarks.speed.cold PACKED.. --page docs/performance.md

PACKED are folders that `trilobite compress` wrote. Each turn is a process of its own, before which the files are driven
out of memory (not with `--warm`): seconds that loading takes, and until the first token behind a prompt is there;
milliseconds of each of the four tokens behind that, whose steps are written down and compared, and of the others,
medians; and what the disk was read for all of it (Linux). `small` and `huge` are pages of a few KB and of 2 MB that are
read when they are asked for, `ahead` is what `trilobite.load` does. How far the system reads ahead
(/sys/block/*/queue/read_ahead_kb) matters, and is left as it is; `--limit 5` has a process in a control group of so many
GB (as root). The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.lib.control_group import limited, read_bytes
from benchmarks.lib.loading import in_small_pages, without_reading_ahead
from benchmarks.lib.markdown import table
from benchmarks.lib.script import ROOT, add_machine, add_page, of_machine, parser, publish
from benchmarks.lib.whole_models import leave_to_disk
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load

MARKER = "speed-cold"
WRITTEN = 4
"""Tokens whose steps are recorded, or compared with what is recorded."""
WAYS: dict[str, tuple[Callable[[], None], ...]] = {
    "small": (in_small_pages, without_reading_ahead),
    "huge": (without_reading_ahead,),
    "ahead": (),
}
HEADER = (
    "model",
    "pages",
    "turn",
    "loading, s",
    "first token after, s",
    f"{WRITTEN} behind it, ms",
    "others, ms",
    "read, GB",
)


@torch.inference_mode()
def begin(folder: Path, prompt: int, tokens: int, limit: float) -> dict[str, float]:
    """In this process: seconds of loading, until the first token, of each behind it, and bytes read from the disk."""
    with limited(int(limit * 1e9)) if limit else nullcontext():
        before, started = read_bytes(), time.perf_counter()
        model = load(str(folder))
        loaded = time.perf_counter() - started
        ids = torch.randint(model.config.vocab_size, (1, prompt + tokens))
        cache = model(ids[:, :prompt], use_cache=True)[CACHE]
        first, times = time.perf_counter() - started, []
        for i in range(prompt, prompt + tokens):
            started = time.perf_counter()
            model(ids[:, i : i + 1], use_cache=True, **{CACHE: cache})
            times.append(time.perf_counter() - started)
        written, others = (statistics.median(some) for some in (times[:WRITTEN], times[WRITTEN:]))
        read = read_bytes() - before
        return {"load": loaded, "first": first, "written": written, "token": others, "read": read}


def in_turn(folder: Path, way: str, args: argparse.Namespace) -> dict[str, float]:
    """The same in a process of its own, from the disk."""
    if not args.warm:
        leave_to_disk(folder)
    numbers = ["--prompt", args.prompt, "--tokens", args.tokens, "--limit", args.limit, "--way", way]
    command = [sys.executable, "-m", __spec__.name, str(folder.resolve()), *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("packed", type=Path, nargs="+", help="packed models")
    options.add_argument("--prompt", type=int, default=16)
    options.add_argument("--tokens", type=int, default=24)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options.add_argument("--warm", action="store_true", help="files stay in memory, where they lie there")
    options.add_argument("--limit", type=float, default=0, help="GB of memory that a process may hold")
    options.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)  # of a child
    add_page(options, MARKER)
    add_machine(options)
    args = options.parse_args()
    if args.tokens <= WRITTEN:
        options.error(f"--tokens {args.tokens}: at least {WRITTEN + 1}, for others than the first {WRITTEN}")
    if args.way:
        for change in WAYS[args.way]:
            change()
        torch.manual_seed(0)
        print(json.dumps(begin(args.packed[0], args.prompt, args.tokens, args.limit)))
        return
    rows, summary = [], []
    for folder in args.packed:
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        for turn in range(1, args.rounds + 1):
            for way in args.ways:
                found = in_turn(folder, way, args)
                cells = (
                    f"{found['load']:.2f}",
                    f"{found['first']:.2f}",
                    f"{found['written'] * 1e3:.0f}",
                    f"{found['token'] * 1e3:.0f}",
                    f"{found['read'] / 1e9:.1f}",
                )
                rows.append((f"{folder.name}, {layers} layers", way, str(turn), *cells))
                summary.append({"model": folder.name, "pages": way, "turn": turn, **found})
                print("  ".join(rows[-1]), flush=True)
    publish(table(HEADER, rows), {"rows": summary}, page=args.page, marker=of_machine(MARKER, args.machine))


if __name__ == "__main__":
    main()
