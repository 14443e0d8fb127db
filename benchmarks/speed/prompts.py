"""How long does a whole model take to read a prompt, beside llama.cpp in the same minutes?

    python -m benchmarks.speed.prompts --builds FOLDER --python ENV/bin/python --page docs/performance.md

FOLDER keeps llama.cpp's programs (`benchmarks.lib.llama`), ENV has the package gguf; `--tier avx_vnni` caps both
programs to an instruction set. Of a prompt whose last token alone
is asked for, llama.cpp leaves out what its last layer would compute of the others: little of a whole model, most of one
with two layers. So each shape is measured at two depths, and a whole model takes what the shallow one takes, and for
each layer more what a layer takes: the difference. Both programs, in turns, `--rounds` times; medians of seconds. The
peak is the arithmetic's (`measure_peak`), of the products of packed matrices alone: attention over the prompt, routing
and norms come on top. The last line is JSON.
"""

import argparse
import math
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import gguf
from benchmarks.lib.llama import LLAMA, NATIVE, bench, build
from benchmarks.lib.markdown import table
from benchmarks.lib.script import ROOT, add_machine, add_page, of_machine, parser, publish
from benchmarks.lib.whole_models import SHAPES, packed_models
from benchmarks.speed.peers import MODES, read_prompt
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings
from trilobite.runtime.load import load
from trilobite.runtime.modules.swap import configure

MARKER = "speed-prompts"
DEPTHS = {"mixtral": (1, 2, 32), "deepseek": (2, 4, 28), "qwen3": (2, 4, 48)}
"""Layers of the two models, and of the one they stand for."""
HEADER = (
    "whole model",
    *(f"{mode}, tokens/s" for mode in (*MODES, LLAMA)),
    *(f"{mode} / its" for mode in MODES),
)
SHARES = tuple(f"{mode} of peak" for mode in MODES)


@torch.inference_mode()
def ours(model: Any, mode: str, prompt: int) -> float:
    """Seconds, of a model that has read another prompt before."""
    configure(model, CpuSettings(mode))
    read_prompt(model, prompt)
    return read_prompt(model, prompt)


def theirs(folder: Path, file: Path, threads: int, prompt: int) -> float:
    """Seconds, of a program that reads another prompt before."""
    return prompt / bench(folder, file, threads=threads, prompt=prompt, tokens=0)[False]


def measure(name: str, work: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds of each program, at each depth and of a whole model ("whole")."""
    threads, peer = cpu.team(None), build(LLAMA, args.tier, args.builds)
    programs: dict[tuple[str, int], Callable[[], float]] = {}
    shallow, deep, whole = DEPTHS[name]
    for layers in (shallow, deep):
        with closing(packed_models((name,), layers)) as made:
            _, folder = next(made)
            model = load(str(folder))
            ours(model, "exact", args.prompt)  # maps all experts, which stay when the files are gone
        file = work / f"{name}-{layers}.gguf"
        making = [str(args.python), "-m", gguf.__name__, str(file), "--shape", name, "--layers", str(layers)]
        subprocess.run(making, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for mode in MODES:
            programs[mode, layers] = partial(ours, model, mode, args.prompt)
        programs[LLAMA, layers] = partial(theirs, peer, file, threads, args.prompt)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for key, run in programs.items():
            seconds[key].append(run())
    found = {}
    for program in (*MODES, LLAMA):
        first, second = (statistics.median(seconds[program, layers]) for layers in (shallow, deep))
        if second <= first:
            raise SystemExit(
                f"{name}, {program}: {deep} layers took {second:.3f} s and {shallow} took {first:.3f}; "
                "something else ran beside them: measure again, with more --rounds"
            )
        layer = (second - first) / (deep - shallow)
        found[program] = {
            f"{shallow} layers": first,
            f"{deep} layers": second,
            "layer": layer,
            "whole": first + (whole - shallow) * layer,
        }
    return found


def macs(name: str) -> int:
    """Multiply-accumulates of packed matrices for a token in a layer."""
    shape = gguf.SHAPES[name]
    return sum(
        math.prod(size[-2:]) * (shape.active if matrix.endswith("_exps") else 1)
        for matrix, size in gguf.layer(shape)
    )


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--builds", type=Path, required=True, help="folder of llama.cpp's programs")
    options.add_argument("--python", type=Path, required=True, help="of an environment with gguf")
    options.add_argument("--shapes", nargs="+", choices=list(DEPTHS), default=list(DEPTHS))
    options.add_argument("--prompt", type=int, default=512)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--tier", default=NATIVE, help="instruction set; default: all that the processor has"
    )
    add_page(options, MARKER)
    add_machine(options)
    args = options.parse_args()
    cpu.set_tier(None if args.tier == NATIVE else args.tier)
    peaks = {mode: cpu.measure_peak(mode) for mode in MODES}
    limit = f"peak: exact {peaks['exact']:.0f} GMAC/s, int8 {peaks['int8']:.0f} ({cpu.info()['tier']})"
    print(limit, flush=True)
    rows, summary = [], {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as work:
        for name in args.shapes:
            found = measure(name, Path(work), args)
            speeds = {program: args.prompt / f["whole"] for program, f in found.items()}
            rates = {mode: args.prompt * macs(name) / found[mode]["layer"] / 1e9 for mode in MODES}
            rows.append(
                (
                    f"{SHAPES[name][1]}, {DEPTHS[name][2]} layers, {args.prompt} tokens",
                    *(f"{speeds[program]:.2f}" for program in (*MODES, LLAMA)),
                    *(f"{speeds[mode] / speeds[LLAMA]:.2f}" for mode in MODES),
                    *(f"{rates[mode] / peaks[mode]:.0%}" for mode in MODES),
                )
            )
            summary[name] = {"seconds": found, "GMAC/s": rates}
            print(summary[name], flush=True)
    report = f"{table((*HEADER, *SHARES), rows)}\n\n{limit}"
    publish(report, {"peaks": peaks, **summary}, page=args.page, marker=of_machine(MARKER, args.machine))


if __name__ == "__main__":
    main()
