"""Table 2 of arXiv:2312.17238 on the GPU at hand: experts that stream from RAM over its own bus.

    python -m benchmarks.speed.offload --make 6                      # Mixtral-8x7B's shapes, 6 layers, in --work
    trilobite trace ../shared/models/tiny-mixtral --text FILE --samples 4 -o trace.npz
    python -m benchmarks.gpu.offload PACKED trace.npz --shares 25 40 60 80

As `benchmarks/speed/offload_gpu.py`, but nothing is on paper: the bound has the measured bandwidth of copies of whole
experts, and the measured time of a token whose experts are all there.
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.script import add_output, add_page, parser, publish
from benchmarks.speed.offload_gpu import CACHED, VARIANTS, Machine, report
from trilobite.evaluate.trace import load_trace
from trilobite.runtime.load import load
from trilobite.runtime.offload.copies import CopyEngine
from trilobite.runtime.offload.cuda import CudaCopies
from trilobite.runtime.routing import moe_layers

ROUNDS = 20


class Real(Machine):
    """A model's experts on the GPU that there is."""

    real = True

    def make_engine(self) -> CopyEngine:
        """Its own."""
        return CudaCopies()

    def prepare(self) -> float:
        """Nothing to do: what was loaded runs. Measures the bus, and an expert that is there."""
        store, arena = self.cache.store, self.cache.arena
        sizes = [store.size((0, e)) for e in range(self.modules[0].num_experts)]
        started = time.perf_counter()
        for e in range(len(sizes)):
            store.fetch((0, e), arena, arena.slots - 1, urgent=True).wait()
        self.bandwidth = sum(sizes) / (time.perf_counter() - started)
        index, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        inputs = self.x[:1], index.to(self.x.device), weights.to(self.x.device)
        with torch.inference_mode():
            for i in range(2 * ROUNDS):  # the first ones compile
                if i == ROUNDS:
                    self.engine.wait()
                    started = time.perf_counter()
                self.modules[0](*inputs)
            self.engine.wait()
        seconds = (time.perf_counter() - started) / ROUNDS
        self.cache.slots.reset()
        return seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=str, help="a packed checkpoint")
    options.add_argument("trace", type=Path, help="of `trilobite trace`: how its experts are routed")
    options.add_argument(
        "--shares", type=float, nargs="+", default=[25, 40, 60, 80], help="per cent of the experts"
    )
    options.add_argument("--tokens", type=int, default=200)
    add_output(options)
    add_page(options, "offload-real-gpu")
    chosen = options.parse_args()
    chosen.layers = len(moe_layers(load(chosen.model)))
    found, names, rows = load_trace(chosen.trace), list(VARIANTS), list[dict[str, Any]]()
    places = [(share, name) for share in chosen.shares for name in names[:CACHED]]
    for share, name in [*places, *((0.0, name) for name in names[CACHED:])]:
        machine = Real(chosen, found, name, (share, 1.0))
        rows.append(
            {"copy": machine.bandwidth / 1e9, "share": share, "variant": name, **machine.run(chosen.tokens)}
        )
        machine.cache.close()
    publish(
        report(rows, None), {"rows": rows}, page=chosen.page, marker="offload-real-gpu", output=chosen.output
    )


if __name__ == "__main__":
    main()
