"""Where the microseconds of a token go as transformers runs it: products, and everything between them by kind.

    python -m benchmarks.speed.step_parts PACKED.. --page docs/performance.md

PACKED are folders that `trilobite compress` wrote. Every kind's own time, without that of the kinds within it; medians
over the steps, after a prompt. The clocks themselves take a few percent. The last line is JSON.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_output, add_page, parser, publish
from trilobite.kernels.cpu import attention as native_attention
from trilobite.kernels.cpu import engine
from trilobite.runtime.attention import ATTENTION, attention
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear

MARKER = "speed-step-parts"
LEFT_OUT = 5
"""Steps that warm up."""
NATIVE = {"linear": "packed matrices", "experts": "packed matrices", "attention": "attention over the cache"}


class Clocks:
    """Sums of each kind's own time."""

    def __init__(self) -> None:
        """Nothing has run."""
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.inner: list[float] = []

    def on(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that adds to its kind."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self.inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self.spent[kind] += took - self.inner.pop()
                if self.inner:
                    self.inner[-1] += took

        return timed


class _Library:
    """The native library, some of whose functions are clocked."""

    def __init__(self, library: Any, clocks: Clocks) -> None:
        self._library = library
        for name, kind in NATIVE.items():
            setattr(self, f"trilobite_{name}", clocks.on(kind, getattr(library, f"trilobite_{name}")))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def kind_of(name: str, module: nn.Module) -> str | None:
    """Under which kind the time of a module goes."""
    of_class = type(module).__name__
    if isinstance(module, PackedLinear | PackedExperts):
        return "Python around packed matrices"
    for ending, kind in (
        ("RMSNorm", "norms"),
        ("RotaryEmbedding", "rotary positions"),
        ("Router", "router"),
        ("Attention", "attention's module: views"),
        ("DecoderLayer", "layers: residuals, calls"),
    ):
        if of_class.endswith(ending):
            return kind
    if name.endswith("act_fn"):
        return "activation of shared experts"
    if "embed_tokens" in name:
        return "embedding"
    return "model: mask, positions, wrappers" if name in ("", "model") else None


def clock(model: nn.Module) -> Clocks:
    """Clocks on all of a model, and on what transformers calls in between."""
    clocks = Clocks()
    native = _Library(engine.library(), clocks)
    engine._lib = native_attention._lib = native  # type: ignore[assignment]
    for name, module in model.named_modules():
        if kind := kind_of(name, module):
            module.forward = clocks.on(kind, module.forward)  # type: ignore[method-assign]
    modeling = {sys.modules[type(m).__module__] for m in model.modules()}
    for code in modeling:
        if rotate := getattr(code, "apply_rotary_pos_emb", None):
            code.apply_rotary_pos_emb = clocks.on("rotary positions", rotate)  # type: ignore[attr-defined]
    AttentionInterface.register(ATTENTION, clocks.on("Python around attention", attention))
    DynamicLayer.update = clocks.on("rows of the cache", DynamicLayer.update)
    return clocks


@torch.inference_mode()
def measure(folder: Path, prompt: int, steps: int) -> dict[str, float]:
    """Microseconds of a token, by kind."""
    model = load(str(folder))
    vocabulary = model.config.vocab_size
    cache = model(torch.randint(vocabulary, (1, prompt)), use_cache=True)[CACHE]
    clocks = clock(model)
    found = []
    for _ in range(steps + LEFT_OUT):
        clocks.spent.clear()
        started = time.perf_counter()
        model(input_ids=torch.randint(vocabulary, (1, 1)), use_cache=True, **{CACHE: cache})
        whole = time.perf_counter() - started
        found.append({"a token": whole, **clocks.spent, "other modules": whole - sum(clocks.spent.values())})
    return {kind: 1e6 * median(t.get(kind, 0.0) for t in found[LEFT_OUT:]) for kind in found[-1]}


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("packed", type=Path, nargs="+", help="packed models")
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--steps", type=int, default=50)
    add_page(options, MARKER)
    add_output(options)
    args = options.parse_args()
    found = {folder.name: measure(folder, args.prompt, args.steps) for folder in args.packed}
    rows = []
    for kind in dict.fromkeys(kind for times in found.values() for kind in times):
        cells = [(times.get(kind, 0.0), times["a token"]) for times in found.values()]
        rows.append((kind, *(c for t, whole in cells for c in (f"{t:,.0f}", f"{t / whole:.1%}"))))
    header = ("us of a token", *(cell for name in found for cell in (name, "share")))
    publish(table(header, rows), {"rows": found}, page=args.page, marker=MARKER, output=args.output)


if __name__ == "__main__":
    main()
