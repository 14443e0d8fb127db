"""Two builds of the native library in turns, call by call: what a change is worth on a machine that others disturb.

    python -m benchmarks.speed.libraries OLD/libtrilobite.so NEW/libtrilobite.so --tokens 1 8 32

Each has a process of its own with the same random layer of experts, INT3 in groups of 64. In a round both run the same
calls, one after the other, and who begins changes from round to round. Where memory lies for a process is worth as much
as what is looked for, so pairs of processes are started several times. Times are medians of all rounds; the ratio is the
median of each round's. Results are compared bit by bit. TRILOBITE_ISA caps both. The last line is JSON.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lib.layers import DEEPSEEK, MIXTRAL, QWEN3, make_layer, routing
from benchmarks.lib.markdown import table
from benchmarks.lib.script import ROOT, add_machine, add_output, add_page, of_machine, parser, publish
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings
from trilobite.recipe import Format

MARKER = "speed-libraries"
SHAPES = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "qwen3": QWEN3}
MODES = ("exact", "int8")
CALLS = 16
"""Of one token in a round; of more tokens as many fewer, but two."""
HEADER = ("layer", "tokens", "activations", "old, ms", "new, ms", "new / old", "bits", "probe GB/s")


class Answer(NamedTuple):
    """Of a call, of the last result of a round, and GB/s of the memory that it reads."""

    milliseconds: float
    digest: str
    probe: float


@torch.inference_mode()
def serve(shape: str) -> None:
    """For each line `mode tokens seed` of the input a line `milliseconds digest probe`."""
    layer = SHAPES[shape]
    torch.manual_seed(0)
    experts, _ = make_layer(layer, Format(bits=3, group=64))
    calls = {mode: ops.bind_experts(experts, CpuSettings(mode)) for mode in MODES}
    print(cpu.info()["tier"], flush=True)
    for line in sys.stdin:
        mode, tokens, seed = line.split()
        call, times, made = calls[mode], [], torch.empty(0)
        assert call is not None
        torch.manual_seed(int(seed))
        for _ in range(max(2, CALLS // int(tokens))):
            index, weights = routing(layer, int(tokens))
            x = torch.randn(int(tokens), layer.hidden, dtype=torch.bfloat16)
            start = time.perf_counter()
            made = call(x, index, weights)
            times.append(time.perf_counter() - start)
        digest = hashlib.sha256(made.view(torch.uint8).numpy().tobytes()).hexdigest()
        print(1e3 * statistics.mean(times), digest, cpu.measure_read_bandwidth(experts.slab, 1), flush=True)


def start(library: Path, shape: str) -> subprocess.Popen[str]:
    """A process that serves with a library; it has said which instruction set that has chosen."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.speed.libraries", "--serve", shape],
        cwd=ROOT,
        env={**environment, "TRILOBITE_LIBRARY": str(library.resolve())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    if not process.stdout.readline():
        raise SystemExit(f"{library}: no layer of experts runs with it; see above")
    return process


def ask(process: subprocess.Popen[str], mode: str, tokens: int, seed: int) -> Answer:
    """Let it run a round's calls."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(f"{mode} {tokens} {seed}\n")
    process.stdin.flush()
    milliseconds, digest, probe = process.stdout.readline().split()
    return Answer(float(milliseconds), digest, float(probe))


def measure(
    libraries: Sequence[Path], shape: str, cases: Sequence[tuple[int, str]], pairs: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Old and new in turns. cases: tokens, activations    pairs: of processes    rounds: of each"""
    found: dict[tuple[int, str], list[tuple[Answer, Answer]]] = {case: [] for case in cases}
    for _ in range(pairs):
        old, new = (start(library, shape) for library in libraries)
        for (tokens, mode), seed in product(cases, range(rounds)):
            first = ask(old, mode, tokens, seed) if seed % 2 else None
            second = ask(new, mode, tokens, seed)
            found[tokens, mode].append((first or ask(old, mode, tokens, seed), second))
        for process in (old, new):
            process.communicate()
    for (tokens, mode), answers in found.items():
        yield {
            "shape": shape,
            "tokens": tokens,
            "mode": mode,
            "old": statistics.median(old.milliseconds for old, _ in answers),
            "new": statistics.median(new.milliseconds for _, new in answers),
            "ratio": statistics.median(new.milliseconds / old.milliseconds for old, new in answers),
            "same": all(old.digest == new.digest for old, new in answers),
            "probe": statistics.median(answer.probe for both in answers for answer in both),
        }


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("old", type=Path, nargs="?", help="a build of the library")
    options.add_argument("new", type=Path, nargs="?", help="another one")
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32])
    options.add_argument("--pairs", type=int, default=4, help="of processes")
    options.add_argument("--rounds", type=int, default=8, help="of each pair")
    options.add_argument("--serve", choices=SHAPES, help=argparse.SUPPRESS)
    add_page(options, MARKER)
    add_machine(options)
    add_output(options)
    args = options.parse_args()
    if args.serve:
        return serve(args.serve)
    if not args.new:
        options.error("two libraries are compared")
    for library in (args.old, args.new):
        if not library.is_file():
            options.error(f"{library}: no such file; both are builds of libtrilobite.so")
    rows, data = [], []
    cases = list(product(args.tokens, MODES))
    for shape in args.shapes:
        for r in measure((args.old, args.new), shape, cases, args.pairs, args.rounds):
            bits = "the same" if r["same"] else "**others**"
            times = f"{r['old']:.2f}", f"{r['new']:.2f}", f"{r['ratio']:.3f}"
            rows.append((SHAPES[shape].name, str(r["tokens"]), r["mode"], *times, bits, f"{r['probe']:.1f}"))
            data.append(r)
            print("  ".join(rows[-1]), flush=True)
    publish(
        table(HEADER, rows),
        {"tier": cpu.info()["tier"], "rows": data},
        page=args.page,
        marker=of_machine(MARKER, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
