"""Models of true layers, a few or all, beside llama.cpp and ik_llama.cpp in the same minutes: tokens a second.

    python -m benchmarks.speed.peers PACKED.. --gguf FILE.. --builds FOLDER --page docs/performance.md

PACKED are folders that `trilobite compress` wrote, FILE those of `benchmarks.lib.gguf` with the same shapes, in the same
order. FOLDER keeps the others' programs, which `benchmarks.lib.llama` builds where they are not there yet, for each of
`--tiers` in turn; each caps ours to the same instruction set, as TRILOBITE_ISA does, and `native` is all that the
processor has. Programs run in turns, `--rounds` times, a probe of the memory before each, and print what they found; the
table has medians, and - where one does not run a model. tg: random tokens after an empty cache, one at a time; tg 8: of
eight texts at a time, each after a prompt of 16 tokens. pp: a prompt of `--prompt` random tokens, of which the logits of
the last are wanted, as in llama-bench. For those llama.cpp leaves out what its last layer would compute of the other
tokens, so of L layers it computes about L - 1. `benchmarks.lib.deeper` makes them of all layers. The last line is JSON.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.llama import IK, LLAMA, NATIVE, batched_bench, bench, build
from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from trilobite.huge_pages import ones
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load
from trilobite.runtime.modules.swap import configure
from trilobite.runtime.step.texts import WORTH

MARKER = "speed-peers"
MODES = ("exact", "int8")
PROBED = 512 << 20
"""Bytes that the probe reads."""
WARM = 8
"""Steps before those that are counted: in the first ones what is replayed afterwards is recorded and compared."""
PROMPT = 16
"""Tokens of each text before those that are counted."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """project: of `benchmarks.lib.llama`    bench, batched: flags of its two programs."""

    project: str
    bench: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()


NO_FLASH = ("-no-fa",)
"""Attention to several texts at a time stops with an assertion without it (0.1.5, AVX2)."""
PEERS = {
    LLAMA: Peer(project=LLAMA),
    IK: Peer(project=IK, batched=NO_FLASH),
    f"{IK} -rtr": Peer(project=IK, bench=("-rtr", "1"), batched=("-rtr", *NO_FLASH)),
}
"""By the name of the column; -rtr: weights are laid out for the kernels when the file is loaded."""


@torch.inference_mode()
def ours(model: Any, mode: str, options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second."""
    configure(model, CpuSettings(mode))
    vocabulary = model.config.vocab_size
    read_prompt(model, options.prompt)  # maps all experts
    _steps(model, 1, None, WARM)
    found = {"tg": _steps(model, 1, None, options.tokens)}
    for texts in options.texts:
        cache = model(torch.randint(vocabulary, (texts, PROMPT)), use_cache=True)[CACHE]
        _steps(model, texts, cache, WORTH + WARM)
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
        step = model(torch.randint(model.config.vocab_size, (texts, 1)), use_cache=True, **{CACHE: cache})
        cache = step[CACHE]
    return texts * tokens / (time.perf_counter() - started)


def theirs(peer: Peer, tier: str, file: Path, options: argparse.Namespace) -> dict[str, float]:
    """The same by the programs of another, which have warmed themselves up before; nothing where they do not run."""
    programs, threads = build(peer.project, tier, options.builds), cpu.team(None)
    try:
        speeds = bench(
            programs, file, threads=threads, prompt=options.prompt, tokens=options.tokens, flags=peer.bench
        )
        texts = {}
        if options.texts:
            texts = batched_bench(
                programs,
                file,
                threads=threads,
                texts=options.texts,
                prompt=PROMPT,
                tokens=options.tokens,
                flags=peer.batched,
            )
    except RuntimeError as e:
        print(e, flush=True)
        return {}
    alone = {"tg": speeds[True], f"pp {options.prompt}": speeds[False]}
    return alone | {f"tg {number}": speed for number, speed in texts.items()}


def bring(files: Iterable[Path]) -> None:
    """Into memory, where what another program has read since has driven them out."""
    for file in files:
        with file.open("rb") as opened:
            while opened.read(1 << 26):
                pass


def measure(folder: Path, file: Path, tier: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of each program, and of the probe before it in GB/s; only the probe of one that does not run."""
    model, memory = load(str(folder)), ones(PROBED)
    programs: dict[str, Callable[[], dict[str, float]]] = {
        mode: partial(ours, model, mode, options) for mode in MODES
    }
    programs |= {name: partial(theirs, PEERS[name], tier, file, options) for name in options.peers}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, run in programs.items():
            bring(folder.glob("*.safetensors") if name in MODES else [file])
            probe = cpu.measure_read_bandwidth(memory)
            found[name].append({**run(), "probe": probe})
            print(folder.name, tier, name, found[name][-1], flush=True)
    return {
        program: {what: statistics.median(run[what] for run in runs) for what in min(runs, key=len)}
        for program, runs in found.items()
    }


def rows_of(
    title: str, tier: str, found: Mapping[str, Mapping[str, float]], peers: Sequence[str]
) -> list[tuple[str, ...]]:
    """Of the table: speeds, ours over llama.cpp's and over the fastest other's, probes."""
    probes = [speeds["probe"] for speeds in found.values()]
    rows = []
    for what in found[MODES[0]]:
        if what == "probe":
            continue
        others = [found[name].get(what) for name in peers]
        ratios = []
        for mode in MODES:
            first, best = others[0], max(filter(None, others), default=None)
            ratios += [f"{found[mode][what] / other:.2f}" if other else "-" for other in (first, best)]
        rows.append(
            (
                title,
                tier,
                what,
                *(f"{found[mode][what]:.1f}" for mode in MODES),
                *(f"{speed:.1f}" if speed else "-" for speed in others),
                *ratios,
                f"{min(probes):.0f} to {max(probes):.0f}",
            )
        )
    return rows


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("packed", type=Path, nargs="+", help="packed models")
    options.add_argument("--gguf", type=Path, nargs="+", required=True, help="a file of each for llama.cpp")
    options.add_argument("--builds", type=Path, required=True, help="folder of the others' programs")
    options.add_argument("--tiers", nargs="+", default=[NATIVE], help="instruction sets, one after another")
    options.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="who beside us")
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
    for tier, peer in itertools.product(args.tiers, args.peers):
        build(PEERS[peer].project, tier, args.builds)  # before anything is measured
    rows: list[tuple[str, ...]] = []
    summary = []
    for name in args.tiers:
        tier = cpu.set_tier(None if name == NATIVE else name)
        for folder, file in zip(args.packed, args.gguf, strict=True):
            found = measure(folder, file, name, args)
            layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
            rows += rows_of(f"{folder.name}, {layers} layers", tier, found, args.peers)
            summary.append({"model": folder.name, "layers": layers, "tier": tier, **found})
    over = (f"{mode} / {other}" for mode in MODES for other in (args.peers[0], "best"))
    header = ("model", "tier", "tokens/s", *MODES, *args.peers, *over, "probe GB/s")
    publish(
        table(header, rows),
        {"rows": summary},
        page=args.page,
        marker=of_machine(MARKER, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
