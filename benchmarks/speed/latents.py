"""Steps of a model with latent attention, by how much it remembers: keys and values made anew, and attention to latents.

    python -m benchmarks.speed.latents [--page docs/performance.md]

One step of DeepSeek-V2-Lite's shape (two of its 27 layers, INT3 g64, random weights) over a cache of so many latents.
"transformers" is its own attention, which makes the keys and values of all tokens for every new one; "latents" is
`trilobite.load`'s, run by transformers' forward, and "replayed" the same without Python. In turns, medians; the least
that a step over latents has to read, packed weights and cache, by the probe of the memory in the same round, is the
bound. The last line is JSON.
"""

import argparse
import copy
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from benchmarks.lib.whole_models import packed_models, step_bytes
from trilobite.huge_pages import ones
from trilobite.kernels.cpu import engine as cpu
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load
from trilobite.runtime.step.step_list import COMPARED, RECORDED

MARKER = "speed-latents"
PROBED = 512 << 20
"""Bytes that the probe reads."""
WAYS = ("transformers", "latents", "replayed")
HEADER = ("tokens remembered", *(f"{way}, ms" for way in WAYS), "bound, ms", "of the bound", "probe GB/s")


def remembered(model: Any, tokens: int) -> DynamicCache:
    """A cache of random latents."""
    config, cache = model.config, DynamicCache(config=model.config)
    for layer in range(config.num_hidden_layers):
        widths = config.kv_lora_rank, config.qk_rope_head_dim
        cache.update(*(torch.randn(1, 1, tokens, width).to(model.dtype) for width in widths), layer)
    return cache


def milliseconds(model: Any, cache: DynamicCache, steps: int) -> list[float]:
    """Of each of some steps, after those in which the first way records and compares."""
    found = []
    for token in torch.randint(model.config.vocab_size, (RECORDED + COMPARED + 1 + steps,)):
        started = time.perf_counter()
        model(input_ids=token.view(1, 1), use_cache=True, **{CACHE: cache})
        found.append(1e3 * (time.perf_counter() - started))
    return found[-steps:]


@torch.inference_mode()
def measure(model: Any, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians in milliseconds, and of the probe in GB/s."""
    step, memory = model.forward, ones(PROBED)
    found: dict[str, list[float]] = defaultdict(list)
    cache = remembered(model, tokens)
    for _ in range(options.rounds):
        found["probe"].append(cpu.measure_read_bandwidth(memory, 1))
        found["replayed"] += milliseconds(model, copy.deepcopy(cache), options.steps)
        if step.ready is None:
            raise SystemExit(f"error: steps are not replayed: {step.why}")
        del model.forward
        found["latents"] += milliseconds(model, copy.deepcopy(cache), options.steps)
        implementation = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        found["transformers"] += milliseconds(model, copy.deepcopy(cache), options.steps)
        model.set_attn_implementation(implementation)
        model.forward = step
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096, 16384])
    options.add_argument("--steps", type=int, default=4, help="of a round, each way")
    options.add_argument("--rounds", type=int, default=3)
    add_page(options, MARKER)
    add_machine(options)
    add_output(options)
    args = options.parse_args()
    rows, summary = [], []
    for title, folder in packed_models(("deepseek-v2",)):
        model = load(str(folder))
        config = model.config
        row = 2 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
        for tokens in args.tokens:
            found = measure(model, tokens, args)
            bound = (step_bytes(model, 1) + row * tokens) / found["probe"] / 1e6
            shown = [f"{found[way]:.1f}" for way in WAYS]
            share = bound / found["replayed"]
            rows.append((f"{tokens:,}", *shown, f"{bound:.1f}", f"{share:.0%}", f"{found['probe']:.1f}"))
            print("  ".join(rows[-1]), flush=True)
            summary.append({"model": title, "tokens": tokens, "bound": bound, **found})
    publish(
        table(HEADER, rows),
        {"latents": summary},
        page=args.page,
        marker=of_machine(MARKER, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
