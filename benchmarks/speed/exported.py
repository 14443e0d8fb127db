"""A step of decoding exported and compiled ahead of time, beside transformers' own and the replayed one, in turns.

    python -m benchmarks.speed.exported PACKED.. --page docs/performance.md

PACKED are folders that `trilobite compress` wrote. The step is exported by `torch.export` over transformers' static
cache, attention by torch, packed matrices by the engine's operators, and compiled by AOTInductor into a package that
holds a copy of the weights. All three use one thread of torch, and --threads for packed matrices. The last line is JSON.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_output, add_page, parser, publish
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load

MARKER = "speed-exported"
WARM = 8
"""Steps that are not counted: those that are recorded and compared are among them."""
WAYS = ("transformers", "replayed", "AOTInductor")
HEADER = ("model", *(f"{way}, ms" for way in WAYS), "compiling, s", "package, MB", "largest difference")


class StaticStep(nn.Module):
    """Token and position -> logits, over a cache whose tensors are buffers of this module."""

    def __init__(self, model: Any, length: int) -> None:
        """length: rows of the cache."""
        super().__init__()
        self.model, config = model, model.config
        self.cache = StaticCache(config=config, max_cache_len=length)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(
            1, config.num_key_value_heads, width, torch.bfloat16, torch.device("cpu")
        )
        self.names = []
        for i, layer in enumerate(self.cache.layers):
            for name, value in vars(layer).items():
                if isinstance(value, Tensor):
                    self.register_buffer(f"{name}_{i}", value, persistent=False)
                    self.names.append((layer, name, f"{name}_{i}"))

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """ids, position: int64 [1, 1] -> [1, 1, vocabulary]."""
        kept = [(layer, name, getattr(layer, name)) for layer, name, _ in self.names]
        for layer, name, buffer in self.names:
            setattr(layer, name, getattr(self, buffer))
        try:
            forward = type(self.model).forward
            return forward(
                self.model, input_ids=ids, position_ids=position, use_cache=True, **{CACHE: self.cache}
            ).logits
        finally:
            for layer, name, value in kept:
                setattr(layer, name, value)


def steps(call: Callable[[Tensor, Tensor], Any], tokens: Tensor) -> list[float]:
    """Seconds of each step behind the first ones."""
    seconds = []
    for at, token in enumerate(tokens):
        ids, position = token.view(1, 1), torch.tensor([[at]])
        started = time.perf_counter()
        call(ids, position)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM:]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Medians of the ways in seconds, and what compiling costs."""
    ours, other = (load(str(folder), threads=options.threads) for _ in range(2))
    other.__dict__.pop("forward", None)
    other.set_attn_implementation("sdpa")
    static = StaticStep(other, options.length)
    first = torch.tensor([[5]]), torch.tensor([[3]])
    with torch.no_grad(), tempfile.TemporaryDirectory() as work:
        expected = static(*first)
        started = time.perf_counter()
        program = torch.export.export(static, first, strict=False)
        package = torch._inductor.aoti_compile_and_package(program, package_path=f"{work}/step.pt2")
        compiling = time.perf_counter() - started
        compiled = torch._inductor.aoti_load_package(package)
        difference = (compiled(*first) - expected).abs().max() / expected.abs().max()
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        with torch.inference_mode():
            for _ in range(options.rounds):
                tokens = torch.randint(ours.config.vocab_size, (WARM + options.tokens,))
                for way, call in (
                    ("transformers", _dynamic(ours, type(ours).forward.__get__(ours))),
                    ("replayed", _dynamic(ours, ours.forward)),
                    ("AOTInductor", compiled),
                ):
                    found[way] += steps(call, tokens)
        size = float(Path(package).stat().st_size)
    medians = {way: statistics.median(seconds) for way, seconds in found.items()}
    return {**medians, "compiling": compiling, "bytes": size, "difference": float(difference)}


def _dynamic(model: Any, forward: Callable[..., Any]) -> Callable[[Tensor, Tensor], Any]:
    """A step of the model over a cache of its own, which begins empty."""
    cache = DynamicCache(config=model.config)
    return lambda ids, _: forward(input_ids=ids, use_cache=True, **{CACHE: cache})


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("packed", type=Path, nargs="+", help="packed models")
    options.add_argument("--length", type=int, default=256, help="rows of the static cache")
    options.add_argument("--tokens", type=int, default=32, help="steps of a round, each way")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of the packed matrices"
    )
    add_page(options, MARKER)
    add_output(options)
    args = options.parse_args()
    if args.rounds * (WARM + args.tokens) >= args.length:
        raise SystemExit("error: the static cache is shorter than all rounds together: raise --length")
    torch.set_num_threads(1)
    rows, summary = [], []
    for folder in args.packed:
        found = measure(folder, args)
        costs = f"{found['compiling']:.0f}", f"{found['bytes'] / 1e6:,.0f}", f"{found['difference']:.1%}"
        rows.append((folder.name, *(f"{1e3 * found[way]:.2f}" for way in WAYS), *costs))
        summary.append({"model": folder.name, **found})
        print("  ".join(rows[-1]), flush=True)
    publish(table(HEADER, rows), {"rows": summary}, page=args.page, marker=MARKER, output=args.output)


if __name__ == "__main__":
    main()
