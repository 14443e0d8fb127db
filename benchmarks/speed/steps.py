"""Steps of decoding, replayed and as transformers runs them, in turns in one process: what lies between the products.

    python -m benchmarks.speed.steps PACKED.. --page docs/performance.md

PACKED are folders that `trilobite compress` wrote. Every round runs a probe of the memory, some steps each way over the
same cache, random tokens, and once more with a clock around the packed matrices: "outside" is what of a step's time is
not theirs. All logits are compared bit by bit. The bound is the longer of two times: that of the bytes that one step
reads, by the probe, and that of its products with packed matrices, by the peak of the arithmetic, measured beside it.
`--texts 8 32` has steps of as many texts, each of a length of its own, filled up in front. The last line is JSON.
"""

import argparse
import copy
import statistics
import time
from ctypes import sizeof
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.loading import in_small_pages
from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from benchmarks.lib.whole_models import step_bytes, step_macs
from benchmarks.speed.peers import read_prompt
from trilobite.huge_pages import ones
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load
from trilobite.runtime.modules.swap import configure
from trilobite.runtime.step.step_list import COMPARED, RECORDED
from trilobite.runtime.step.texts import WORTH

MARKER, OF_TEXTS = "speed-steps", "speed-steps-texts"
PROBED = 512 << 20
"""Bytes that the probe reads."""
MAPPED = 512
"""Tokens of a prompt that brings all experts into memory."""
MATRICES = (ops.step.Kind.LINEAR, ops.step.Kind.EXPERTS)
HEADER = (
    "model",
    "activations",
    "packed matrices, ms",
    "before, ms",
    "outside",
    "now, ms",
    "outside",
    "of the bound, before",
    "now",
    "tokens/s",
    "probe GB/s",
    "peak GMAC/s",
)


class Cut:
    """The calls of a step that is replayed, packed matrices apart, whose seconds are added up."""

    def __init__(self, ready: Any) -> None:
        """ready: what `step.ready` is."""
        self.seconds = 0.0
        self.steps = [part for call in ready.steps for part in self._parts(*call)]

    def _parts(self, call: Any, args: Any, kwargs: Any) -> list[Any]:
        if call is not ops.step.run_nodes:
            return [(call, args, kwargs)]
        parts: list[Any] = []
        first = 0
        for matrices, nodes in groupby(args[0], lambda node: node.kind in MATRICES):
            count = len(list(nodes))
            # The same memory: where the logits go is written there.
            part = (type(args[0][0]) * count).from_buffer(args[0], first * sizeof(type(args[0][0])))
            parts.append((self._clocked if matrices else call, (part, count), {}))
            first += count
        return parts

    def _clocked(self, nodes: Any, count: int) -> None:
        started = time.perf_counter()
        ops.step.run_nodes(nodes, count)
        self.seconds += time.perf_counter() - started


def begin(model: Any, prompt: Tensor) -> Any:
    """A cache of prompts [texts, S], each a token shorter than the next one."""
    return model(prompt, use_cache=True, **_beside(len(prompt), 0, prompt.shape[1]))[CACHE]


def _beside(texts: int, first: int, end: int) -> dict[str, Tensor]:
    """What goes with tokens of texts, from one to the last; nothing with one text."""
    if texts == 1:
        return {}
    padding = torch.arange(texts).flip(0)[:, None]
    places = torch.arange(end) - padding
    return {"attention_mask": (places >= 0).long(), "position_ids": places[:, first:].clamp_min(0)}


def timed(model: Any, cache: Any, tokens: Tensor) -> tuple[list[float], list[Tensor]]:
    """Seconds of each step, and its logits. tokens: [steps, texts]"""
    seconds, logits = [], []
    for token in tokens:
        length = cache.get_seq_length()
        given = {"input_ids": token[:, None], **_beside(len(token), length, length + 1)}
        started = time.perf_counter()
        made = model(use_cache=True, **given, **{CACHE: cache}).logits
        seconds.append(time.perf_counter() - started)
        logits.append(made)
    return seconds, logits


@torch.inference_mode()
def measure(model: Any, mode: str, texts: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians over all steps, in seconds, of the probe in GB/s and of the peak in GMAC/s."""
    configure(model, CpuSettings(mode))
    step, vocabulary = model.forward, model.config.vocab_size
    memory = ones(PROBED)
    read_prompt(model, MAPPED)
    cache = begin(model, torch.randint(vocabulary, (texts, options.prompt)))
    timed(model, cache, torch.randint(vocabulary, (WORTH * (texts > 1) + RECORDED + COMPARED, texts)))
    several = step if texts == 1 else step.others.steps[texts]
    if not several.right:
        raise SystemExit(f"error: {model.name_or_path}: steps are not replayed: {several.why}")
    whole, cut = several.ready.steps, Cut(several.ready)
    found: dict[str, list[float]] = {"before": [], "now": [], "matrices": [], "probe": [], "peak": []}
    for _ in range(options.rounds):
        tokens = torch.randint(vocabulary, (options.tokens, texts))
        found["probe"].append(cpu.measure_read_bandwidth(memory, 1))
        found["peak"].append(cpu.measure_peak(mode, repeats=1))
        seconds, ours = timed(model, copy.deepcopy(cache), tokens)
        found["now"] += seconds
        several.ready.steps, again = cut.steps, copy.deepcopy(cache)
        for token in tokens:
            cut.seconds = 0.0
            timed(model, again, token[None])
            found["matrices"].append(cut.seconds)
        several.ready.steps = whole
        del model.forward
        seconds, theirs = timed(model, copy.deepcopy(cache), tokens)
        found["before"] += seconds
        model.forward = step
        if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            raise SystemExit("error: logits differ")
    return {name: statistics.median(values) for name, values in found.items()}


def row(title: str, mode: str, found: dict[str, float], bound: float, texts: int) -> tuple[str, ...]:
    """Of the table. bound: seconds that a step takes at least"""
    ways = [found["before"], found["now"]]
    times = [cell for t in ways for cell in (f"{t * 1e3:.2f}", f"{1 - found['matrices'] / t:.0%}")]
    shares = [f"{bound / t:.0%}" for t in ways]
    rates = f"{texts / ways[0]:.1f} -> {texts / ways[1]:.1f}"
    limits = f"{found['probe']:.1f}", f"{found['peak']:.0f}"
    return (title, mode, f"{found['matrices'] * 1e3:.2f}", *times, *shares, rates, *limits)


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("packed", type=Path, nargs="+", help="packed models")
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--texts", type=int, nargs="+", default=[1])
    options.add_argument("--tokens", type=int, default=16, help="steps of a round, each way")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--modes", nargs="+", default=["exact", "int8"])
    options.add_argument(
        "--small-pages", action="store_true", help="weights mapped without asking for huge pages"
    )
    add_page(options, MARKER)
    add_machine(options)
    add_output(options)
    args = options.parse_args()
    if args.small_pages:
        in_small_pages()
    rows, summary = [], []
    for folder in args.packed:
        model = load(str(folder))
        layers = model.config.num_hidden_layers
        for texts, mode in product(args.texts, args.modes):
            found = measure(model, mode, texts, args)
            beside = "" if texts == 1 else f", {texts} texts"
            title = f"{folder.name}, {layers} layers{beside}"
            work = {"bytes": step_bytes(model, texts), "macs": step_macs(model, texts)}
            bound = max(work["bytes"] / found["probe"], work["macs"] / found["peak"]) / 1e9
            rows.append(row(title, mode, found, bound, texts))
            case = {"model": folder.name, "layers": layers, "mode": mode, "texts": texts}
            summary.append({**case, **work, **found, "bound": bound})
            print("  ".join(rows[-1]), flush=True)
    publish(
        table(HEADER, rows),
        {"rows": summary},
        page=args.page,
        marker=of_machine(MARKER if args.texts == [1] else OF_TEXTS, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
