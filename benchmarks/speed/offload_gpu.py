"""Table 2 of arXiv:2312.17238 on paper: experts that stream from RAM to a GPU, over buses as fast as one likes.

    python -m benchmarks.speed.offload --make 6                      # Mixtral-8x7B's shapes, 6 layers, in --work
    trilobite trace ../shared/models/tiny-mixtral --text FILE --samples 4 -o trace.npz
    python -m benchmarks.speed.offload_gpu PACKED trace.npz --copy 12 25 50 --shares 25 40 60 80

Cache, queue of copies and threads are those of `--gpu-memory`, in real time; experts and guesses (`norm+1`) are those of
a trained model. Two things are only waited for: the bus moves no bytes, and the GPU computes an expert in the time in
which its memory is read once (`--device`, GB/s), so that this machine's memory bandwidth limits nothing. What the CPU
engine computes of the misses, it computes. The bound next to each speed is max(computing alone, bytes
missed / bandwidth of the bus).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.script import add_output, add_page, parser, publish
from benchmarks.speed.offload import TraceGuesser
from trilobite.evaluate.trace import Trace, load_trace, norm
from trilobite.kernels import ops
from trilobite.kernels.ops import BoundExperts
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import BIASES, PackedExperts
from trilobite.runtime.modules.residence import AsStored
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.copies import CopyEngine, HostCopies
from trilobite.runtime.offload.misses import TOKENS, HostShare, measure
from trilobite.runtime.offload.plan import GPU_STAGING, GpuMemory, Offload
from trilobite.runtime.offload.residence import ExpertsInSlots
from trilobite.runtime.offload.streaming import experts_of, streaming
from trilobite.runtime.routing import moe_layers

VARIANTS = {
    "shared": "full algorithm, misses shared with the CPU",
    "full": "full algorithm",
    "no speculation": "without speculation",
    "no cache": "without cache, only speculation",
    "neither": "neither",
    "whole layers": "whole layers, as accelerate does",
}
CACHED = 3
"""Of these, the first so many depend on how much fits; the others keep no more than one call needs."""
WARM = 8
"""Tokens before the clock starts."""
LATENCY = 10e-6
"""Seconds before the first byte of a copy."""


class Clock:
    """Waits; what it oversleeps it makes good for with its next wait."""

    def __init__(self) -> None:
        self._late = 0.0

    def wait(self, seconds: float) -> None:
        due = time.perf_counter() - self._late + seconds
        time.sleep(max(0.0, due - time.perf_counter()))
        self._late = min(time.perf_counter() - due, 1e-3)


class PaperBus(HostCopies):
    """A bus that takes its time and moves nothing."""

    def put(self, source: Tensor, target: Tensor) -> None:
        pass


class PaperGpu:
    """The experts of a layer, each in the time of one read."""

    sums_up = True

    def __init__(self, clock: Clock, each: float, experts: int) -> None:
        """each: seconds for an expert    experts: E."""
        self._clock, self._each, self._experts = clock, each, experts

    def __call__(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self._clock.wait(self._each * len({*top_k_index.flatten().tolist()} - {self._experts}))
        return x

    def parts(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> "PaperParts":
        return PaperParts(self, x)


class PaperParts:
    def __init__(self, call: PaperGpu, x: Tensor) -> None:
        self._call, self._x = call, x

    def add(self, index: Tensor) -> None:
        self._call(self._x, index, index)

    def result(self, others: Tensor | None = None) -> Tensor:
        return self._x


class Machine:
    """A model's experts on a GPU that there is not."""

    real = False

    def __init__(
        self, options: argparse.Namespace, found: Trace, variant: str, place: tuple[float, float]
    ) -> None:
        """place: share of the experts that fit, in per cent; GB/s of the bus."""
        share, gigabytes = place
        self.options = options
        each, active, staging = found.experts_of[0], found.experts.shape[2], GPU_STAGING
        self.variant, self.found = variant, found
        layers = options.layers
        fit = max(active + 1, int(share / 100 * layers * each) - staging)
        few = {"no cache": active, "neither": active, "whole layers": each}
        slots = few.get(variant, fit)
        self.bandwidth = gigabytes * 1e9
        self.engine = self.make_engine()
        gpu = GpuMemory(
            memory=2**50, engine=self.engine, slots=slots, share=self.real and variant == "shared"
        )
        wanted = Offload(memory=None, guesses=0, pool=slots != fit or slots < active * layers)
        model = load(options.model, memory=wanted, gpu_memory=gpu)
        stream = streaming(model)
        assert stream is not None
        assert stream.cache is not None
        self.cache: ExpertCache = stream.cache
        self.modules = [experts_of(layer) for layer in moe_layers(model)]
        self.clock = Clock()
        guesses = found.guesses[norm(1)] if variant in ("shared", "full", "no cache") else None
        self.guesser = TraceGuesser(guesses, len(self.modules))
        for module in self.modules:
            residence_of(module).guesser = self.guesser  # type: ignore[assignment]
        x = torch.randn(TOKENS[-1], self.modules[0].hidden_size, dtype=torch.bfloat16)
        self.x = x.to(self.engine.device)
        self.seconds = self.prepare()

    def make_engine(self) -> CopyEngine:
        """The bus."""
        return PaperBus(self.bandwidth, LATENCY)

    def prepare(self) -> float:
        """Let the GPU compute, and the host too where it shall; seconds for an expert."""
        seconds = self.cache.store.size((0, 0)) / (self.options.device * 1e9)
        for module in self.modules:
            self._equip(module, seconds)
        if self.variant == "shared":
            self._share(seconds)
        return seconds

    def _equip(self, module: PackedExperts, seconds: float) -> None:
        biases = [module._parameters[name] for name in BIASES]
        made = PaperGpu(self.clock, seconds, module.num_experts)
        residence_of(module).binding = ops.Binding(made, *biases)

    def _share(self, seconds: float) -> None:
        calls = []
        for module in self.modules:
            stored = residence_of(module)._stored
            assert isinstance(stored, AsStored)
            call = stored.bind(module)
            assert isinstance(call, BoundExperts)
            calls.append(call)

        def copy(expert: int, *inputs: Tensor) -> float:
            started = time.perf_counter()
            self.cache.ensure(0, [expert])
            self.clock.wait(seconds)
            ended = time.perf_counter()
            self.cache.drop((0, expert))
            return ended - started

        costs = measure(self.modules[0].num_experts, self.x, copy, calls[0])
        print(f"copied or computed: {costs}", file=sys.stderr)
        self.cache.slots.reset()
        for module in self.modules:
            residence_of(module).host = HostShare(costs, calls)

    def token(self, t: int) -> None:
        """Through all layers."""
        self.guesser.token = t
        for i, module in enumerate(self.modules):
            experts = self.found.experts[i % len(self.found.experts), t].astype(np.int64)
            index = torch.from_numpy(experts)[None].to(self.x.device)
            if self.variant == "whole layers":
                self.cache.ensure(i, range(module.num_experts))
            module(self.x[:1], index, torch.full(index.shape, 0.5, device=self.x.device))
        self.engine.wait()

    def run(self, tokens: int) -> dict[str, Any]:
        """Seconds of a token, and what was counted."""
        seconds = []
        with torch.inference_mode():
            for t in range(WARM):
                self.token(t)
            before = self.cache.counters
            for t in range(WARM, tokens):
                started = time.perf_counter()
                self.token(t)
                seconds.append(time.perf_counter() - started)
        counts = self.cache.counters - before
        alone = self.seconds * self.found.experts.shape[2] * len(self.modules)
        return {
            "seconds": statistics.mean(seconds),
            "alone": alone,
            "bound": max(alone, counts.bytes / len(seconds) / self.bandwidth),
            "hit_ratio": counts.hit_ratio,
            "bytes": counts.bytes / len(seconds),
            "stall": counts.stalled / len(seconds),
        }


def residence_of(module: PackedExperts) -> ExpertsInSlots:
    """Where a layer's experts live."""
    assert isinstance(module.residence, ExpertsInSlots)
    return module.residence


def table(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    found, names = load_trace(options.trace), list(VARIANTS)
    for gigabytes in options.copy:
        places = [(share, name) for share in options.shares for name in names[:CACHED]]
        for share, name in [*places, *((0.0, name) for name in names[CACHED:])]:
            print(f"{gigabytes} GB/s, {share} %: {name}", file=sys.stderr, flush=True)
            machine = Machine(options, found, name, (share, gigabytes))
            yield {"copy": gigabytes, "share": share, "variant": name, **machine.run(options.tokens)}
            machine.cache.close()


def report(rows: list[dict[str, Any]], device: float | None) -> str:
    """device: GB/s of a GPU on paper."""
    which = torch.cuda.get_device_name() if device is None else f"A GPU that reads {device:g} GB/s"
    lines = [
        f"{which}; its experts alone: {1 / rows[0]['alone']:.0f} tokens/s.",
        "",
        "| bus, GB/s | on the GPU | variant | tokens/s | of the bound | hits | MB per token | stall, ms per token |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        cells = (
            f"{r['copy']:.3g}",
            f"{r['share']:g} %" if r["share"] else "",
            VARIANTS[r["variant"]],
            f"{1 / r['seconds']:.1f}",
            f"{100 * r['bound'] / r['seconds']:.0f} %",
            f"{100 * r['hit_ratio']:.0f} %",
            f"{r['bytes'] / 1e6:.0f}",
            f"{1e3 * r['stall']:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=str, help="a packed checkpoint")
    options.add_argument("trace", type=Path, help="of `trilobite trace`: how its experts are routed")
    options.add_argument("--copy", type=float, nargs="+", default=[12, 25, 50], help="GB/s of the bus")
    options.add_argument("--device", type=float, default=400, help="GB/s of the GPU's memory")
    options.add_argument(
        "--shares", type=float, nargs="+", default=[25, 40, 60, 80], help="per cent of the experts"
    )
    options.add_argument("--tokens", type=int, default=60)
    add_output(options)
    add_page(options, "offload-gpu")
    chosen = options.parse_args()
    chosen.layers = len(moe_layers(load(chosen.model)))
    rows = list(table(chosen))
    summary = {"device": chosen.device, "rows": rows}
    publish(
        report(rows, chosen.device), summary, page=chosen.page, marker="offload-gpu", output=chosen.output
    )


if __name__ == "__main__":
    main()
