"""Attention on the CPU, of one new token of each text or of a prompt: the engine beside torch's, on transformers' input.

    python -m benchmarks.speed.attention --page docs/performance.md
    python -m benchmarks.speed.attention --prompts 64 512 2048 --page docs/performance.md

"generate" is torch's product as transformers' `sdpa` calls it on its own cache, one text or 16 of them; "pages" is what
continuous batching does: gather the keys and values of all texts, then one product of torch's for each text. The probe
is the bandwidth of memory, which keys and values come from once. Of prompts, every token looks at itself and all before
it. Bfloat16, medians. The last line is JSON.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_output, add_page, parser, publish
from trilobite.kernels.cpu.engine import measure_read_bandwidth
from trilobite.kernels.ops import attend

HEADS = ((16, 16), (32, 8))
"""Of queries, and of keys: DeepSeek-MoE's and Mixtral's."""
WIDTH = 128
LATENT = 192
"""Width of queries and keys that are made of latents, DeepSeek-V2's; values have WIDTH."""


def median(run: Callable[[], object], repeats: int) -> float:
    """Seconds."""
    seconds = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def measure(heads: int, kv_heads: int, texts: int, length: int, repeats: int) -> dict[str, float]:
    """Seconds of each way."""
    query = torch.randn(texts, heads, 1, WIDTH).bfloat16()
    key, value = (torch.randn(texts, kv_heads, length, WIDTH).bfloat16() for _ in range(2))
    keys, values = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (key, value))
    rows, starts = torch.arange(texts * length), torch.arange(texts + 1) * length
    gqa = heads > kv_heads

    def paged() -> list[Tensor]:
        found = [t.index_select(0, rows) for t in (keys, values)]
        made = []
        for t in range(texts):
            k, v = (x[t * length : (t + 1) * length].transpose(0, 1)[None] for x in found)
            made.append(sdpa(query[t].view(1, kv_heads, heads // kv_heads, WIDTH), k, v))
        return made

    engine = query[:, :, 0].contiguous()
    return {
        "generate": median(lambda: sdpa(query, key, value, enable_gqa=gqa), repeats),
        "pages": median(paged, repeats),
        "engine": median(lambda: attend(engine, keys, values, rows, starts), repeats),
    }


def measure_prompt(heads: int, kv_heads: int, width: int, length: int, repeats: int) -> dict[str, float]:
    """Seconds of each way. width: of queries and keys"""
    query = torch.randn(1, heads, length, width).bfloat16()
    key, value = (torch.randn(1, kv_heads, length, wide).bfloat16() for wide in (width, WIDTH))
    rows, starts = torch.arange(length), torch.zeros(length, dtype=torch.int64)
    gqa = heads > kv_heads

    def engine() -> Tensor:
        wide = pad(value, (0, width - WIDTH)) if width > WIDTH else value
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, wide))
        return attend(q, k, v, rows, starts, rows + 1)

    return {
        "torch": median(lambda: sdpa(query, key, value, is_causal=True, enable_gqa=gqa), repeats),
        "engine": median(engine, repeats),
    }


def prompts(chosen: argparse.Namespace) -> None:
    """The table of prompts."""
    rows, found = [], []
    for heads, kv_heads, width in (*((*h, WIDTH) for h in HEADS), (*HEADS[0], LATENT)):
        for length in chosen.prompts:
            seconds = measure_prompt(heads, kv_heads, width, length, chosen.repeats)
            found.append({"heads": heads, "kv_heads": kv_heads, "width": width, "length": length, **seconds})
            cells = [f"{1e3 * seconds[name]:.2f}" for name in ("torch", "engine")]
            ratio = f"{seconds['torch'] / seconds['engine']:.2f}"
            rows.append([f"{heads} on {kv_heads}", str(width), f"{length:,}", *cells, ratio])
    header = ["heads", "width", "tokens", "torch, ms", "engine, ms", "torch / engine"]
    publish(
        table(header, rows),
        {"rows": found},
        page=chosen.page,
        marker="attention-prompts",
        output=chosen.output,
    )


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--texts", type=int, nargs="+", default=[1, 16])
    options.add_argument("--lengths", type=int, nargs="+", default=[192, 1024, 4096])
    options.add_argument("--prompts", type=int, nargs="*", help="tokens of prompts to measure in their place")
    options.add_argument("--repeats", type=int, default=30)
    add_page(options, "attention")
    add_output(options)
    chosen: argparse.Namespace = options.parse_args()
    if chosen.prompts:
        return prompts(chosen)
    rows, found = [], []
    for heads, kv_heads in HEADS:
        for texts in chosen.texts:
            for length in chosen.lengths:
                probe = measure_read_bandwidth()
                seconds = measure(heads, kv_heads, texts, length, chosen.repeats)
                rate = 4 * texts * length * kv_heads * WIDTH / seconds["engine"] / 1e9
                found.append(
                    {"heads": heads, "kv_heads": kv_heads, "texts": texts, "length": length, **seconds}
                )
                found[-1] |= {"probe": probe, "rate": rate}
                cells = [f"{1e6 * seconds[name]:,.0f}" for name in ("generate", "pages", "engine")]
                rows.append(
                    [
                        f"{heads} on {kv_heads}",
                        str(texts),
                        f"{length:,}",
                        *cells,
                        f"{rate:.1f} of {probe:.1f}",
                    ]
                )
    header = ["heads", "texts", "tokens", "generate, us", "pages, us", "engine, us", "engine, GB/s of probe"]
    publish(table(header, rows), {"rows": found}, page=chosen.page, marker="attention", output=chosen.output)


if __name__ == "__main__":
    main()
