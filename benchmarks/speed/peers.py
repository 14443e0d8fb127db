"""Whole models of a few true layers beside llama.cpp in the same minutes: tokens a second, of texts and of a prompt.

    python -m benchmarks.speed.peers PACKED.. --gguf FILE.. --llama [TIER=]FOLDER.. --page docs/performance.md

PACKED are folders that `trilobite compress` wrote, FILE those of `benchmarks.lib.gguf` with the same shapes, in the same
order. Each FOLDER has llama.cpp's `llama-bench` and `llama-batched-bench`, built for one instruction set: TIER caps ours
to the same one, as TRILOBITE_ISA does. Programs run in turns, `--rounds` times, a probe of the memory before each; the
table has medians. tg: random tokens after an empty cache, one at a time; tg 8: of eight texts at a time, each after a
prompt of 16 tokens. pp: a prompt of `--prompt` random tokens, of which the logits of the last are wanted, as in
llama-bench. For those llama.cpp leaves out what its last layer would compute of the other tokens, so of L layers it
computes about L - 1. The last line is JSON.
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
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings
from trilobite.runtime.load import load
from trilobite.runtime.modules.swap import configure

MARKER = "speed-peers"
PEER = "llama.cpp"
MODES = ("exact", "int8")
PROBED = 512 << 20
"""Bytes that the probe reads."""
WARM = 8
"""Steps before those that are counted: in the first ones what is replayed afterwards is recorded and compared."""
PROMPT = 16
"""Tokens of each text before those that are counted."""
HEADER = ("model", "tier", "tokens/s", *MODES, PEER, *(f"{mode} / its" for mode in MODES), "probe GB/s")


@torch.inference_mode()
def ours(model: Any, mode: str, options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second."""
    configure(model, CpuSettings(mode))
    vocabulary = model.config.vocab_size
    read_prompt(model, options.prompt)  # maps all experts
    _steps(model, 1, None, WARM)
    found = {"tg": _steps(model, 1, None, options.tokens)}
    for texts in options.texts:
        cache = model(torch.randint(vocabulary, (texts, PROMPT)), use_cache=True).past_key_values
        found[f"tg {texts}"] = _steps(model, texts, cache, options.tokens)
    return {**found, f"pp {options.prompt}": options.prompt / read_prompt(model, options.prompt)}


def read_prompt(model: Any, tokens: int) -> float:
    """Seconds for a prompt of random tokens."""
    ids = torch.randint(model.config.vocab_size, (1, tokens))
    started = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def _steps(model: Any, texts: int, cache: Any, tokens: int) -> float:
    """Tokens a second of all texts."""
    started = time.perf_counter()
    for _ in range(tokens):
        step = model(
            torch.randint(model.config.vocab_size, (texts, 1)), past_key_values=cache, use_cache=True
        )
        cache = step.past_key_values
    return texts * tokens / (time.perf_counter() - started)


def theirs(folder: Path, file: Path, options: argparse.Namespace, threads: int) -> dict[str, float]:
    """The same by llama.cpp's programs, which have warmed themselves up before."""
    speeds = llama_bench(folder, file, threads, prompt=options.prompt, tokens=options.tokens)
    found = {"tg": speeds[True]}
    if options.texts:
        room = max(options.texts) * (PROMPT + options.tokens)
        sizes = [
            "-c",
            room,
            "-npp",
            PROMPT,
            "-ntg",
            options.tokens,
            "-npl",
            ",".join(map(str, options.texts)),
        ]
        lines = _printed(
            folder / "llama-batched-bench",
            *("-m", file, "-t", threads, "-tb", threads, *sizes, "--output-format", "jsonl"),
        ).splitlines()
        rows = [json.loads(line) for line in lines if line.startswith("{")]
        found |= {f"tg {row['pl']}": float(row["speed_tg"]) for row in rows}
    return {**found, f"pp {options.prompt}": speeds[False]}


def llama_bench(folder: Path, file: Path, threads: int, *, prompt: int, tokens: int) -> dict[bool, float]:
    """Tokens a second that llama.cpp's program reads (False) and writes (True), of which one may be none."""
    sizes = ["-p", prompt, "-n", tokens, "-r", 1, "-o", "json"]
    made = json.loads(_printed(folder / "llama-bench", "-m", file, "-t", threads, *sizes))
    return {bool(row["n_gen"]): float(row["avg_ts"]) for row in made}


def _printed(*command: object) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def measure(folder: Path, file: Path, peer: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of each program, and of the probe before it in GB/s."""
    model, memory = load(str(folder)), torch.ones(PROBED, dtype=torch.uint8)
    programs: dict[str, Callable[[], dict[str, float]]] = {
        mode: partial(ours, model, mode, options) for mode in MODES
    }
    programs[PEER] = partial(theirs, peer, file, options, cpu.team(None))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, run in programs.items():
            probe = cpu.measure_read_bandwidth(memory)
            found[name].append({**run(), "probe": probe})
    return {
        program: {what: statistics.median(run[what] for run in runs) for what in runs[0]}
        for program, runs in found.items()
    }


def rows_of(title: str, tier: str, found: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """Of the table: speeds, ours over theirs, probes."""
    probes = [found[name]["probe"] for name in (*MODES, PEER)]
    return [
        (
            title,
            tier,
            what,
            *(f"{found[name][what]:.1f}" for name in (*MODES, PEER)),
            *(f"{found[mode][what] / found[PEER][what]:.2f}" for mode in MODES),
            f"{min(probes):.0f} to {max(probes):.0f}",
        )
        for what in found[PEER]
        if what != "probe"
    ]


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("packed", type=Path, nargs="+", help="packed models")
    options.add_argument("--gguf", type=Path, nargs="+", required=True, help="a file of each for llama.cpp")
    options.add_argument("--llama", nargs="+", required=True, help="[TIER=] folder of its programs")
    options.add_argument("--prompt", type=int, default=512)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--texts", type=int, nargs="*", default=[8, 32], help="numbers of texts at a time")
    options.add_argument("--rounds", type=int, default=3)
    add_page(options, MARKER)
    add_machine(options)
    add_output(options)
    args = options.parse_args()
    if len(args.gguf) != len(args.packed):
        raise SystemExit(
            f"error: {len(args.packed)} packed models, but {len(args.gguf)} files; give one of each"
        )
    rows: list[tuple[str, ...]] = []
    summary = []
    for build in args.llama:
        cap, _, peer = build.rpartition("=")
        tier = cpu.set_tier(cap or None)
        for folder, file in zip(args.packed, args.gguf, strict=True):
            found = measure(folder, file, Path(peer), args)
            rows += rows_of(folder.name, tier, found)
            summary.append({"model": folder.name, "tier": tier, **found})
            print(summary[-1], flush=True)
    publish(
        table(HEADER, rows),
        {"rows": summary},
        page=args.page,
        marker=of_machine(MARKER, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
