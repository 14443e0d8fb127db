"""A whole Mixtral of random packed weights, and the time of its decoding steps: for benchmarks/gpu/measure.py."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trilobite.measure.ahead import reason
from trilobite.measure.gpu import FAILURES, captured, interval, random_weight
from trilobite.recipe import Format
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.residence import OnGpu, PackedModule

PROMPT, WARM = 128, 3


def random_mixtral(config: Any, device: torch.device) -> nn.Module:
    """A transformers model with random packed weights in its linear layers and experts; the router stays bf16."""
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    body, head = Format(bits=3, group=64), Format(bits=8, group=64)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            fmt = head if path == "lm_head" else body
            shape = (module.out_features, module.in_features)
            packed = PackedLinear(shape, random_weight(*shape, fmt, device=device).tensors(), None)
            model.set_submodule(path, packed)
            packed.settle()
        elif isinstance(module, MixtralExperts):
            h, i = config.hidden_size, config.intermediate_size
            shapes = {"w1": (i, h), "w3": (i, h), "w2": (h, i)}
            parts = {
                e: {name: random_weight(*s, body, device=device).tensors() for name, s in shapes.items()}
                for e in range(config.num_local_experts)
            }
            experts_ = PackedExperts(module, parts)
            model.set_submodule(path, experts_)
            experts_.settle()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                noise = torch.randn(parameter.shape, device=device, dtype=torch.bfloat16)
                filled = torch.ones_like(noise) if parameter.dim() == 1 else noise * 0.02
                module._parameters[name] = nn.Parameter(filled, requires_grad=False)
        if hasattr(module, "inv_freq"):
            module.__init__(config=config)
            module.to(device)
    return model.eval()


def packed_bytes(model: nn.Module) -> float:
    """Bytes of all weights that a step reads when it meets all experts."""
    total = sum(p.nbytes for n, p in model.named_parameters() if "embed" not in n)
    return float(total) + _pack_bytes(model, PackedModule)


def expert_bytes(model: nn.Module) -> float:
    """Bytes of the experts among them."""
    return _pack_bytes(model, PackedExperts)


def _pack_bytes(model: nn.Module, kind: type) -> float:
    """Bytes in the GPU layout of modules of a kind."""
    residences = [m.residence for m in model.modules() if isinstance(m, kind)]
    return float(sum(r.pack.slab.nbytes for r in residences if isinstance(r, OnGpu)))


class Stepper:
    """A static cache behind a prompt, with room for `room` steps; `step` decodes one token and counts it."""

    def __init__(self, model: nn.Module, config: Any, batch: int, device: torch.device, room: int) -> None:
        from transformers import StaticCache

        self.model, self.room = model, room
        self.cache = StaticCache(config=config, max_cache_len=PROMPT + room)
        ids = torch.randint(0, config.vocab_size, (batch, PROMPT), device=device)
        self.tokens = torch.randint(0, config.vocab_size, (batch, 1), device=device)
        with torch.inference_mode():
            model(ids, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})

    def step(self) -> Tensor:
        logits: Tensor = self.model(self.tokens, use_cache=True, **{CACHE: self.cache}).logits
        return logits


def decode_seconds(
    model: nn.Module, config: Any, batch: int, device: torch.device, steps: int
) -> tuple[float, str]:
    """Median seconds of a decoding step with a static cache: replayed as one CUDA graph, or eagerly if that fails.

    steps: 0 = one step, without measuring
    """
    # The step runs WARM times, then `steps` times as a graph and, should the graph fail, `steps` times eagerly.
    made = Stepper(model, config, batch, device, 2 * (WARM + steps))
    with torch.inference_mode():
        for _ in range(WARM if steps else 1):
            made.step()
        if not steps:
            return 1.0, "not measured"
        if device.type == "cuda":
            try:
                return _graph_seconds(made.step, steps), "CUDA graph"
            except FAILURES as e:
                print(f"no CUDA graph of the whole step: {reason(e)}", flush=True)
        return _eager_seconds(made.step, steps, device), "eager"


def _graph_seconds(step: Callable[[], object], steps: int) -> float:
    """`WARM` + `steps` replays, each of which moves the cache on: a token must not come to lie behind its end."""
    graph = captured(step)
    for _ in range(WARM):
        graph.replay()
    return statistics.median(_intervals(graph.replay, steps))


def _intervals(step: Callable[[], object], steps: int) -> list[float]:
    """Seconds of a step, over intervals of at most 8, `steps` in all."""
    counts = [min(8, steps - at) for at in range(0, steps, 8)]
    return [interval(step, count) for count in counts]


def compiled_seconds(
    model: nn.Module, config: Any, batch: int, device: torch.device, steps: int
) -> tuple[float, str]:
    """Median seconds of a decoding step by torch.compile without graph breaks, in CUDA graphs of its own."""
    if not steps:
        return decode_seconds(model, config, batch, device, 0)
    made = Stepper(model, config, batch, device, 4 * WARM + steps)
    compiled = torch.compile(made.step, fullgraph=True, mode="reduce-overhead", dynamic=False)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled()

    start = time.perf_counter()
    with torch.inference_mode():
        for _ in range(2 * WARM):  # compiles, runs, records, replays
            step()
        if device.type != "cuda":
            return _eager_seconds(step, steps, device), "torch.compile"
        torch.cuda.synchronize()
        print(f"torch.compile of a whole step: {time.perf_counter() - start:.0f} s", flush=True)
        return statistics.median(_intervals(step, steps)), "torch.compile"


def _eager_seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
