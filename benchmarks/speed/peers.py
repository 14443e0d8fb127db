"""Whole models of a few true layers beside llama.cpp in the same minutes: tokens a second at batch 1, and of a prompt.

    python -m benchmarks.speed.peers PACKED.. --gguf FILE.. --llama [TIER=]LLAMA_BENCH.. --page docs/performance.md

PACKED are folders that `trilobite compress` wrote, FILE those of `benchmarks.lib.gguf` with the same shapes, in the same
order. Each LLAMA_BENCH is llama.cpp's `llama-bench`, built for one instruction set: TIER caps ours to the same one, as
TRILOBITE_ISA does. Programs run in turns, `--rounds` times, a probe of the memory before each; the table has medians.
tg: tokens after an empty cache, one at a time, random ones. pp: a prompt of `--prompt` random tokens, of which the
logits of the last are wanted, as in llama-bench. For those llama.cpp leaves out what its last layer would compute of the
other tokens, so of L layers it computes about L - 1. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_output, add_page, parser, publish
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings
from trilobite.runtime.load import load
from trilobite.runtime.modules.swap import configure

MARKER = "speed-peers"
PEER = "llama.cpp"
MODES = ("exact", "int8")
PROBED = 512 << 20
"""Bytes that the probe reads."""


@torch.inference_mode()
def ours(model: Any, mode: str, prompt: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of a prompt, and one at a time after an empty cache."""
    configure(model, CpuSettings(mode))
    vocabulary = model.config.vocab_size
    model(torch.randint(vocabulary, (1, 16)), use_cache=True)
    started = time.perf_counter()
    model(torch.randint(vocabulary, (1, prompt)), use_cache=True, logits_to_keep=1)
    read = time.perf_counter() - started
    cache = None
    started = time.perf_counter()
    for _ in range(tokens):
        step = model(torch.randint(vocabulary, (1, 1)), past_key_values=cache, use_cache=True)
        cache = step.past_key_values
    return prompt / read, tokens / (time.perf_counter() - started)


def theirs(bench: str, file: Path, prompt: int, tokens: int, threads: int) -> tuple[float, float]:
    """The same by llama-bench, which has warmed itself up before."""
    command = [bench, "-m", file, "-t", threads, "-p", prompt, "-n", tokens, "-r", 1, "-o", "json"]
    made = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    found = {bool(row["n_gen"]): float(row["avg_ts"]) for row in json.loads(made.stdout)}
    return found[False], found[True]


def measure(folder: Path, file: Path, bench: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of each program: pp, tg, and the probe before it in GB/s."""
    model, memory = load(str(folder)), torch.ones(PROBED, dtype=torch.uint8)
    sizes = options.prompt, options.tokens
    programs: dict[str, Callable[[], tuple[float, float]]] = {
        mode: partial(ours, model, mode, *sizes) for mode in MODES
    }
    programs[PEER] = partial(theirs, bench, file, *sizes, cpu.team(None))
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, run in programs.items():
            probe = cpu.measure_read_bandwidth(memory)
            found[name].append((*run(), probe))
    names = ("pp", "tg", "probe")
    return {
        program: dict(zip(names, map(statistics.median, zip(*runs, strict=True)), strict=True))
        for program, runs in found.items()
    }


def row(title: str, tier: str, found: dict[str, dict[str, float]]) -> tuple[str, ...]:
    """Of the table: speeds, ours over theirs, probes."""
    cells = [title, tier]
    for what in ("tg", "pp"):
        cells += [f"{found[name][what]:.1f}" for name in (*MODES, PEER)]
        cells += ["/".join(f"{found[mode][what] / found[PEER][what]:.2f}" for mode in MODES)]
    probes = [found[name]["probe"] for name in (*MODES, PEER)]
    return (*cells, f"{min(probes):.0f} to {max(probes):.0f}")


def header(prompt: int) -> tuple[str, ...]:
    """Of the table."""
    names = [f"{what}, {name}" for what in ("tg", f"pp{prompt}") for name in (*MODES, PEER, "ours / its")]
    return ("model", "tier", *names, "probe GB/s")


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("packed", type=Path, nargs="+", help="packed models")
    options.add_argument("--gguf", type=Path, nargs="+", required=True, help="a file of each for llama.cpp")
    options.add_argument("--llama", nargs="+", required=True, help="[TIER=] path of a llama-bench")
    options.add_argument("--prompt", type=int, default=512)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    add_page(options, MARKER)
    add_output(options)
    args = options.parse_args()
    if len(args.gguf) != len(args.packed):
        raise SystemExit(
            f"error: {len(args.packed)} packed models, but {len(args.gguf)} files; give one of each"
        )
    rows, summary = [], []
    for build in args.llama:
        cap, _, bench = build.rpartition("=")
        tier = cpu.set_tier(cap or None)
        for folder, file in zip(args.packed, args.gguf, strict=True):
            found = measure(folder, file, bench, args)
            rows.append(row(folder.name, tier, found))
            summary.append({"model": folder.name, "tier": tier, **found})
            print("  ".join(rows[-1]), flush=True)
    report = table(header(args.prompt), rows)
    publish(report, {"rows": summary}, page=args.page, marker=MARKER, output=args.output)


if __name__ == "__main__":
    main()
