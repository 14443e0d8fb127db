"""Layers that keep a state of a fixed size, on the CPU: the engine beside functions of transformers that it replaces.

    python -m benchmarks.speed.states --machine zen4 --page docs/performance.md

Shapes of Qwen3-Next-80B-A3B, Kimi-Linear-48B-A3B and Nemotron-3-Nano-30B-A3B, bfloat16, states in fp32. One token, with
the states of so many layers in turns that they come from memory, as in a model; its bound is the probe, by which a state
is read once and written once. Then a prompt from its beginning. Medians, transformers and the engine in turns.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from trilobite.kernels.cpu.engine import measure_read_bandwidth
from trilobite.runtime.recurrent import FUNCTIONS

MARKER = "states"
FROM_MEMORY = 96 << 20
"""Bytes of states that do not stay in caches."""
Call = Callable[..., Any]


@dataclass(frozen=True)
class Layer:
    """module: of transformers    names: its functions for a token and for a prompt    state: [H, K or P, V or N]

    shared: heads of keys, or groups
    """

    title: str
    module: str
    names: tuple[str, str]
    state: tuple[int, int, int]
    shared: int

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """Of one text, as a model calls the function for a prompt."""
        heads, width, size = self.state
        if self.module == "nemotron_h":
            groups = {name: torch.randn(1, tokens, self.shared, size).bfloat16() for name in "BC"}
            numbers = {"A": -torch.rand(heads), "D": torch.rand(heads), "dt_bias": torch.rand(heads)}
            x, dt = torch.randn(1, tokens, heads, width).bfloat16(), torch.rand(1, tokens, heads).bfloat16()
            return {"hidden_states": x, "dt": dt, **groups, **numbers}
        wide = (width,) if self.module == "kimi_linear" else ()
        keys = {name: torch.randn(1, tokens, self.shared, width).bfloat16() for name in ("query", "key")}
        decay, beta = -torch.rand(1, tokens, heads, *wide), torch.rand(1, tokens, heads).bfloat16()
        return {**keys, "value": torch.randn(1, tokens, heads, size).bfloat16(), "g": decay, "beta": beta}

    def token(self, call: Call) -> Callable[[Tensor], None]:
        """One token that reads and changes a state, as a model's cache has it changed."""
        x = self.inputs(1)
        if self.module == "nemotron_h":
            heads, width, size = self.state
            of_heads = {name: x[name][:, None].expand(heads, width) for name in ("D", "dt_bias")}
            decay = x["A"][:, None, None].expand(heads, width, size)
            step = x["dt"][0, 0][None, :, None].expand(1, heads, width)
            inputs = x["hidden_states"][:, 0], step, decay, x["B"][:, 0], x["C"][:, 0]
            return lambda state: call(state, *inputs, **of_heads, dt_softplus=True)

        def run(state: Tensor) -> None:
            _, made = call(**x, initial_state=state, **ASKED)
            state.copy_(made)

        return run

    def prompt(self, call: Call, tokens: int) -> Callable[[], Any]:
        """A prompt."""
        x = self.inputs(tokens)
        if self.module == "nemotron_h":
            return lambda: call(**x, chunk_size=128, dt_softplus=True, return_final_states=True)
        return lambda: call(**x, initial_state=None, **ASKED)


ASKED = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
LAYERS = (
    Layer(
        "Qwen3-Next-80B-A3B",
        "qwen3_next",
        ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"),
        (32, 128, 128),
        16,
    ),
    Layer(
        "Kimi-Linear-48B-A3B",
        "kimi_linear",
        ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"),
        (32, 128, 128),
        32,
    ),
    Layer(
        "Nemotron-3-Nano-30B-A3B",
        "nemotron_h",
        ("mamba2_selective_state_update", "mamba2_chunk_scan"),
        (64, 64, 128),
        8,
    ),
)


def in_turns(ways: list[Callable[[], Any]], repeats: int) -> Iterator[float]:
    """Median seconds of each way."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats + 2):
        for way, found in zip(ways, seconds, strict=True):
            started = time.perf_counter()
            way()
            found.append(time.perf_counter() - started)
    return (statistics.median(found[2:]) for found in seconds)


@torch.inference_mode()
def measure(layer: Layer, tokens: int, repeats: int) -> dict[str, float]:
    """Seconds by transformers and by the engine, of a token and of a prompt; and the probe, GB/s."""
    module = importlib.import_module(f"transformers.models.{layer.module}.modeling_{layer.module}")
    pairs = [(theirs, FUNCTIONS[name](theirs)) for name in layer.names for theirs in [getattr(module, name)]]
    size = 4 * layer.state[0] * layer.state[1] * layer.state[2]
    states = cycle([torch.randn(1, *layer.state) for _ in range(FROM_MEMORY // size)])
    probe = measure_read_bandwidth()
    steps = [layer.token(call) for call in pairs[0]]
    found = in_turns([lambda s=step: s(next(states)) for step in steps], repeats)  # type: ignore[misc]
    prompts = in_turns([layer.prompt(call, tokens) for call in pairs[1]], max(2, repeats // 10))
    names = "token by transformers", "token", "prompt by transformers", "prompt"
    return dict(zip(names, (*found, *prompts), strict=True)) | {"probe": probe, "bytes": 2 * size}


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512, help="of a prompt")
    options.add_argument("--repeats", type=int, default=60)
    add_page(options, MARKER)
    add_machine(options)
    add_output(options)
    args = options.parse_args()
    rows, found = [], []
    for layer in LAYERS:
        made = measure(layer, args.tokens, args.repeats)
        found.append({"layer": layer.title, **made})
        rate = made["bytes"] / made["token"] / 1e9
        token = [f"{1e6 * made[name]:,.0f}" for name in ("token by transformers", "token")]
        prompt = [f"{1e3 * made[name]:.1f}" for name in ("prompt by transformers", "prompt")]
        share = f"{rate:.1f} of {made['probe']:.1f} ({rate / made['probe']:.0%})"
        rows.append([layer.title, *token, share, *prompt])
    header = ["one layer", "one token, us", "engine", "GB/s of the probe"]
    header += [f"{args.tokens} tokens, ms", "engine"]
    publish(
        table(header, rows),
        {"tokens": args.tokens, "rows": found},
        page=args.page,
        marker=of_machine(MARKER, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
