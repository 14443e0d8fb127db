"""Table 2 of arXiv:2312.17238 on the CPU: what a cache of experts, and speculation, are worth under a bound on memory.

    python -m benchmarks.speed.offload --make 6                      # Mixtral-8x7B's shapes, 6 layers, in --work
    trilobite trace ../shared/models/tiny-mixtral --text FILE --samples 4 -o trace.npz
    python -m benchmarks.speed.offload PACKED trace.npz --shares 25 40 60 80 --tokens 40 --page docs/offloading.md

Only the experts run, routed as a trained model routed its text; guesses are those of the trace (`norm+1`). Every variant
is a process of its own in a memory control group (version 1, needs root), with the page cache of the file dropped, whose
limit is a share of the expert bytes; what the program held before is not charged to it. The bound next to each speed is
max(computing alone, bytes missed / bandwidth of the disk), which the same process measures in turns with the tokens;
what was guessed in time counts as missed, what was read for nothing does not. Figures stay in --results, so that a run
can be cut by --shares and --variants. Before each variant the file is read once, so that a disk with a cache of its own
knows it equally well.

`--llama LLAMA_BENCH --gguf FILE` (of benchmarks.lib.gguf) puts llama.cpp beside it, under the limit of the same share of
its experts; its whole model runs, routed by random weights, so `uniform` is what compares with it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.control_group import limited, read_bytes, start_equal
from benchmarks.lib.gguf import expert_bytes
from benchmarks.lib.markdown import table as markdown
from benchmarks.lib.script import add_output, add_page, add_work, parser, publish
from benchmarks.lib.synthetic import write_mixtral
from trilobite.checkpoint.source import Source, open_source
from trilobite.evaluate.trace import Trace, load_trace, norm
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.mapped import EXPERT_PART
from trilobite.runtime.offload.memory import Arena
from trilobite.runtime.offload.plan import MemoryPlan, Offload
from trilobite.runtime.offload.reader import Reader
from trilobite.runtime.offload.residence import ExpertsInSlots
from trilobite.runtime.offload.store import FileStore
from trilobite.runtime.offload.streaming import experts_of, streaming
from trilobite.runtime.routing import moe_layers

VARIANTS = {
    "full": "full algorithm",
    "no speculation": "without speculation",
    "no cache": "without cache, only speculation",
    "neither": "neither",
    "whole layers": "whole layers, as accelerate does",
    "mmap": "plain mmap of the same file",
    "uniform": "without speculation, all experts equally likely",
    "uniform mmap": "plain mmap, all experts equally likely",
    "llama": "llama.cpp, mmap",
}
SLOTLESS = ("no cache", "neither", "whole layers")
"""Variants that no memory makes faster; measured at the first share alone."""
RESIDENT = "resident"
"""Computing alone, beside all experts in slots."""
STAGING = 2
ROUNDS = 3
"""Of the trace, with both of those in turns."""
WARM = 8
"""Tokens before the clock starts, and from one probe of the disk to the next."""
PROBED = 6
"""Experts that a probe reads."""
MARGIN = 96 * 2**20
"""Of the control group's limit: pages of libraries, the kernel's own."""
LLAMA_MARGIN = 384 * 2**20
"""The same for llama.cpp, its buffers included."""


class TraceGuesser:
    """Stands in the place of `Guesser`: what the traced model would have guessed."""

    def __init__(self, guesses: np.ndarray | None, layers: int) -> None:
        """guesses: [L, T, G], or None for no speculation."""
        self.guesses, self.layers, self.token = guesses, layers, 0

    def guess(self, layer: int, most: int) -> tuple[int, list[int]] | None:
        """At most two experts of the next layer."""
        if self.guesses is None or layer + 1 >= self.layers:
            return None
        row = self.guesses[(layer + 1) % len(self.guesses), self.token]
        return layer + 1, [int(e) for e in row[: min(2, most)] if e >= 0]


def uniform(like: np.ndarray) -> np.ndarray:
    """[L, T, A]: distinct experts, each as likely as any other."""
    order = np.random.default_rng(0).random((*like.shape[:2], int(like.max()) + 1)).argsort(-1)
    return order[..., : like.shape[2]].astype(like.dtype)


class DiskProbe:
    """Reads whole experts, whichever come next, with the threads and requests of the reader."""

    def __init__(self, model: str) -> None:
        found = streaming(load(model, memory=Offload(memory=2**50, slots=2, pool=True)))
        assert found is not None
        assert found.cache is not None
        store = found.cache.store
        assert isinstance(store, FileStore)
        self._stretches = cycle(s for row in store.stretches for s in row)
        self._reader = Reader({f: e.size for f, e in open_source(model).files.items()})
        self._arena = Arena(PROBED, store.slot_bytes)
        self.nbytes, self.seconds = 0, 0.0
        self()
        self.nbytes, self.seconds = 0, 0.0  # that was when the memory was made

    def __call__(self) -> None:
        stretches = list(islice(self._stretches, PROBED))
        started = time.perf_counter()
        reads = [self._reader.read(s, self._arena.view(i), urgent=True) for i, s in enumerate(stretches)]
        for read in reads:
            read.wait()
        self.seconds += time.perf_counter() - started
        self.nbytes += sum(s.nbytes for s in stretches)


class Engine:
    """The experts of a model, routed by a trace; wanted: None where they lie in memory as loaded."""

    def __init__(self, model: str, wanted: Offload | None, found: Trace, *, guessing: bool = False) -> None:
        """Load them. guessing: what the traced model would have guessed is fetched ahead."""
        loaded = load(model, memory=wanted)
        self.experts = [experts_of(layer) for layer in moe_layers(loaded)]
        self.guesser = TraceGuesser(found.guesses[norm(1)] if guessing else None, len(self.experts))
        self.cache = None
        for module in self.experts:
            if isinstance(module.residence, ExpertsInSlots):
                self.cache, module.residence.guesser = module.residence.cache, self.guesser  # type: ignore[assignment]
        self.x = torch.randn(1, self.experts[0].hidden_size, dtype=torch.bfloat16)

    def token(self, routing: np.ndarray, t: int, *, whole_layers: bool = False) -> float:
        """Seconds of a token."""
        started, self.guesser.token = time.perf_counter(), t
        for i, module in enumerate(self.experts):
            index = torch.from_numpy(routing[i % len(routing), t].astype(np.int64))[None]
            if whole_layers and self.cache is not None:
                self.cache.ensure(i, range(module.num_experts))
            module(self.x, index, torch.full(index.shape, 0.5))
        return time.perf_counter() - started


def expert_layers(source: Source) -> int:
    return len({m[1] for name in source.tensors if (m := EXPERT_PART.match(name))})


def measure_resident(options: argparse.Namespace) -> dict[str, Any]:
    """Computing alone, and the same with all experts in slots of a cache: two models, token by token in turns."""
    found = load_trace(options.trace)
    source = open_source(options.model)
    layers = expert_layers(source)
    MemoryPlan.fits = property(lambda self: False)  # type: ignore[assignment, method-assign]
    wanted = Offload(memory=2**50, staging=STAGING, guesses=0, slots=layers * found.experts_of[0])
    engines = [Engine(options.model, None, found), Engine(options.model, wanted, found)]
    seconds: list[list[float]] = [[], []]
    with torch.inference_mode():
        for rounds in range(1 + ROUNDS):  # both have been read once before the clock starts
            for t in range(options.tokens):
                for i in (0, 1) if t % 2 else (1, 0):
                    took = engines[i].token(found.experts, t)
                    if rounds:
                        seconds[i].append(took)
    cost = statistics.median(b / a for a, b in zip(*seconds, strict=True)) - 1
    return {"alone": statistics.median(seconds[0]), "cost": cost}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One variant, in this process: seconds of each token, and the counters."""
    found = load_trace(options.trace)
    routing = uniform(found.experts) if options.variant.startswith("uniform") else found.experts
    source = open_source(options.model)
    parts = [i for name, i in source.tensors.items() if EXPERT_PART.match(name)]
    nbytes, files = sum(i.nbytes for i in parts), sorted({i.file for i in parts})
    layers = expert_layers(source)
    each, active = found.experts_of[0], found.experts.shape[2]
    fit = max(active + 1, int(options.share / 100 * layers * each) - STAGING)
    few = {"no cache": active, "neither": active, "whole layers": each}
    slots = few.get(options.variant, fit)
    wanted = Offload(
        memory=2**50,
        staging=STAGING,
        guesses=0,
        slots=slots,
        pool=options.variant in few or slots < active * layers,
    )
    streams = options.variant not in ("mmap", "uniform mmap")
    guessing = options.variant in ("full", "no cache")
    engine = Engine(options.model, wanted if streams else None, found, guessing=guessing)
    cache = engine.cache
    start_equal(files)
    probe = DiskProbe(options.model)
    whole_layers = options.variant == "whole layers"
    # What the program holds already stays charged to the group that it comes from.
    with torch.inference_mode(), limited(int(options.share / 100 * nbytes) + MARGIN):
        for t in range(WARM):
            engine.token(routing, t, whole_layers=whole_layers)
        before, seconds, read = cache.counters if cache else None, [], 0
        for t in range(WARM, options.tokens):
            if t % WARM == 0:
                probe()
            at = read_bytes()
            seconds.append(engine.token(routing, t, whole_layers=whole_layers))
            read += read_bytes() - at
    counts = cache.counters - before if cache and before else None
    return {
        "seconds": sum(seconds) / len(seconds),
        "median": statistics.median(seconds),
        "bytes": read / len(seconds),
        "hit_ratio": counts.hit_ratio if counts else None,
        "missed": counts.misses * nbytes / (layers * each) / len(seconds) if counts else None,
        "stall": counts.stalled / len(seconds) if counts else None,
        "used": counts.used / counts.guesses if counts and counts.guesses else None,
        "disk": probe.nbytes / probe.seconds if probe.seconds else None,
    }


def measure_llama(options: argparse.Namespace) -> dict[str, Any]:
    """llama-bench on a file of the same shapes, under the same share of its experts."""
    path = Path(options.gguf)
    experts = expert_bytes(options.layers)
    limit = int(options.share / 100 * experts) + path.stat().st_size - experts + LLAMA_MARGIN
    command = [options.llama, "-m", str(path), "-t", "2", "-p", "0", "-n", str(options.tokens), "-r", "1"]
    start_equal([path])
    with limited(limit):
        made = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=True)
    seconds = 1 / json.loads(made.stdout)[0]["avg_ts"]
    return {"seconds": seconds, "median": seconds} | dict.fromkeys(("bytes", "hit_ratio", "missed", "stall"))


def run(options: argparse.Namespace, variant: str, share: int) -> dict[str, Any]:
    """A variant in a process of its own; empty where it was killed."""
    command: list[str] = [sys.executable, "-m", "benchmarks.speed.offload", options.model, options.trace]
    command += ["--one", variant, "--share", str(share), "--tokens", str(options.tokens)]
    if variant == "llama":
        command += ["--llama", options.llama, "--gguf", options.gguf]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(
            f"{variant} at {share} %: {(done.stderr.splitlines() or [str(done.returncode)])[-1]}",
            file=sys.stderr,
        )
        return {}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure_all(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Add to the results what was asked for; computing alone is measured every time, the last one stays."""
    chosen = [v for v in options.variants if v != "llama" or (options.llama and options.gguf)]
    results |= run(options, RESIDENT, 100)
    for share in options.shares:
        for variant in chosen:
            if variant in SLOTLESS and share != options.shares[0]:
                continue
            print(f"{variant} at {share} %", file=sys.stderr, flush=True)
            found = run(options, variant, share)
            if found:
                row = {"share": 0 if variant in SLOTLESS else share, "variant": variant, **found}
                row |= {"alone": results["alone"], "disk": found.get("disk")}
                results["rows"][f"{row['share']} {variant}"] = row
            if options.results:
                options.results.write_text(json.dumps(results))


def bound(row: dict[str, Any]) -> float | None:
    """Seconds that a token takes at least: computing alone, or reading what was missed."""
    if row["missed"] is None or not row["disk"]:
        return None
    return float(max(row["alone"], row["missed"] / row["disk"]))


def report(results: dict[str, Any]) -> str:
    rows = sorted(results["rows"].values(), key=lambda r: (r["share"], list(VARIANTS).index(r["variant"])))
    lines = []
    for r in rows:
        limit = bound(r)
        lines.append(
            [
                f"{r['share']} %" if r["share"] else "any",
                VARIANTS[r["variant"]],
                f"{1 / r['seconds']:.2f}",
                f"{100 * limit / r['seconds']:.0f} %" if limit else "",
                f"{100 * r['hit_ratio']:.0f} %" if r["hit_ratio"] is not None else "",
                f"{r['missed'] / 1e6:.0f}" if r["missed"] is not None else "",
                f"{r['bytes'] / 1e6:.0f}" if r["bytes"] is not None else "",
                f"{r['stall']:.3f}" if r["stall"] is not None else "",
                f"{r['disk'] / 1e9:.2f}" if r["disk"] else "",
            ]
        )
    header = (
        "memory",
        "variant",
        "tokens/s",
        "of the bound",
        "hits",
        "MB missed",
        "MB read",
        "stall, s",
        "GB/s",
    )
    return (
        f"Computing alone {1 / results['alone']:.1f} tokens/s; with all experts in slots of a cache "
        f"{results['cost']:+.1%} time. MB and stall are per token, GB/s is the disk at the reader's requests, "
        f"every {WARM} tokens.\n\n"
        f"{markdown(header, lines)}"
    )


def make(options: argparse.Namespace) -> None:
    """A packed checkpoint of Mixtral-8x7B's shapes in the work folder."""
    folder = options.work / f"mixtral-{options.make}-layers"
    if not (folder / "packed").exists():
        with tempfile.TemporaryDirectory(dir=options.work) as original:
            write_mixtral(Path(original) / "original", options.make)
            compress(str(Path(original) / "original"), folder / "packed", load_recipe("rtn3"))
    print(json.dumps({"packed": str(folder / "packed")}))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=str, nargs="?", help="a packed checkpoint")
    options.add_argument(
        "trace", type=str, nargs="?", help="of `trilobite trace`: how its experts are routed"
    )
    options.add_argument(
        "--shares", type=int, nargs="+", default=[25, 40, 60, 80], help="per cent of the experts"
    )
    options.add_argument(
        "--tokens", type=int, default=40, help=f"of the trace; {WARM} pass before the clock starts"
    )
    options.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    options.add_argument("--results", type=Path, help="JSON file of figures: read before, written after each")
    options.add_argument("--print", action="store_true", help="measure nothing, print what --results holds")
    options.add_argument("--llama", help="llama.cpp's llama-bench")
    options.add_argument("--gguf", help="a file of benchmarks.lib.gguf")
    options.add_argument("--layers", type=int, default=6, help="of that file")
    options.add_argument("--make", type=int, metavar="LAYERS", help="write such a checkpoint, and stop")
    options.add_argument("--one", help=argparse.SUPPRESS)
    options.add_argument("--share", type=float, help=argparse.SUPPRESS)
    add_work(options)
    add_output(options)
    add_page(options, "offload")
    chosen = options.parse_args()
    if chosen.make:
        chosen.work.mkdir(parents=True, exist_ok=True)
        return make(chosen)
    if not chosen.model or not chosen.trace:
        options.error("MODEL and TRACE, or --make LAYERS")
    if chosen.one:
        chosen.variant, chosen.trace = chosen.one, Path(chosen.trace)
        one = {"llama": measure_llama, RESIDENT: measure_resident}.get(chosen.one, measure)
        print(json.dumps(one(chosen)))
        return None
    kept = chosen.results is not None and chosen.results.exists()
    results = json.loads(chosen.results.read_text()) if kept else {"rows": {}}
    if not chosen.print:
        measure_all(chosen, results)
    publish(report(results), results, page=chosen.page, marker="offload", output=chosen.output)
    return None


if __name__ == "__main__":
    main()
