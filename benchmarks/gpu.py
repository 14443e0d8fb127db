"""How close do the GPU kernels come to what this GPU can do?

    python benchmarks/gpu.py [--quick] [--only linear,experts,model] [--markdown docs/gpu.md]

Unattended, in less than 8 minutes on a GPU with 80 GB; the whole model is left out where memory does not suffice. The
limits come first: bandwidth of a large copy (bytes read and written), and a large bf16 product. Every figure is the
median of replays of one CUDA graph that goes through eight routings (or weights), so that nothing stays in the cache.
`floor` is the time at which the copy's bandwidth would deliver the packed bytes. The last line is JSON.

Whole model: 32 layers of Mixtral-8x7B's shape, INT3 g64, random weights, INT8 head; milliseconds of one decoding step
behind 128 tokens at batch 1, 16 and 32, as MiLo's Table 6 (seconds a step on an A100-40GB: 0.088, 0.102, 0.105).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _markdown import insert, table
from torch import Tensor, nn

from trilobite.kernels.triton_bench import (
    DEEPSEEK,
    MIXTRAL,
    ROUTINGS,
    Layer,
    copy_bandwidth,
    expert_calls,
    hit_bytes,
    linear_calls,
    matmul_peak,
    random_layer,
    random_weight,
    routing,
    seconds,
)
from trilobite.kernels.triton_layout import repack
from trilobite.recipe import Format
from trilobite.runtime.experts import PackedExperts
from trilobite.runtime.linear import PackedLinear

TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
FORMATS = {bits: Format(bits=bits, group=64) for bits in (3, 4)}
MILO = {1: 0.088, 16: 0.102, 32: 0.105}
PROMPT, STEPS = 128, 32
Rows = list[dict[str, Any]]


def bf16_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same layer in bf16: torch's grouped_mm over sorted tokens.

    gate_up: [E, 2I, H]    down: [E, H, I]
    """
    experts, active = gate_up.shape[0], index.shape[1]
    slots = index.flatten().argsort(stable=True)
    counts = F.one_hot(index.flatten(), experts).sum(0)
    ends = counts.cumsum(0).to(torch.int32)
    rows = x[slots // active]
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, slots // active, (y * weights.flatten()[slots, None]).float()).to(x.dtype)


def bf16_calls(layer: Layer, gate_up: Tensor, down: Tensor, tokens: int) -> list[Callable[[], object]]:
    x = torch.randn(tokens, layer.hidden, device=gate_up.device, dtype=torch.bfloat16)
    return [
        partial(bf16_experts, x, *routing(layer, tokens, x.device), gate_up, down) for _ in range(ROUTINGS)
    ]


def row(
    case: str, tokens: int, times: dict[int | str, float], nbytes: float, bandwidth: float
) -> dict[str, Any]:
    """One line of a table. times: seconds by bits, and of bf16; nbytes: of the 3-bit weights that are read."""
    return {
        "case": case,
        "tokens": tokens,
        "us": times[3] * 1e6,
        "GB/s": nbytes / times[3] / 1e9,
        "of copy": nbytes / times[3] / bandwidth,
        "x floor": times[3] * bandwidth / nbytes,
        "4-bit / 3-bit": times[4] / times[3],
        "bf16 / 3-bit": times["bf16"] / times[3],
    }


def experts(
    device: torch.device, bandwidth: float, tokens: tuple[int, ...], layers: tuple[Layer, ...]
) -> Rows:
    rows = []
    for layer in layers:
        packs = {bits: random_layer(layer, fmt, device) for bits, fmt in FORMATS.items()}
        shape = (layer.experts, 2 * layer.intermediate, layer.hidden)
        gate_up = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
        shape = (layer.experts, layer.hidden, layer.intermediate)
        down = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
        for t in tokens:
            times: dict[int | str, float] = {
                bits: seconds(expert_calls(layer, p, t)) for bits, p in packs.items()
            }
            times["bf16"] = seconds(bf16_calls(layer, gate_up, down, t))
            rows.append(row(f"{layer.name} experts", t, times, hit_bytes(layer, packs[3], t), bandwidth))
            show(rows[-1])
    return rows


def linear(
    device: torch.device, bandwidth: float, tokens: tuple[int, ...], shapes: tuple[tuple[str, int, int], ...]
) -> Rows:
    rows = []
    for name, n, k in shapes:
        packs = {
            bits: [repack([[random_weight(n, k, fmt, device=device)]]) for _ in range(ROUTINGS)]
            for bits, fmt in FORMATS.items()
        }
        full = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(ROUTINGS)]
        for t in tokens:
            x = torch.randn(t, k, device=device, dtype=torch.bfloat16)
            times: dict[int | str, float] = {
                bits: seconds(linear_calls(p, n, k, t)) for bits, p in packs.items()
            }
            times["bf16"] = seconds([partial(F.linear, x, w) for w in full])
            rows.append(row(f"{name} [{n}, {k}]", t, times, 4 * packs[3][0].slab.numel(), bandwidth))
            show(rows[-1])
    return rows


SHAPES = (
    ("Mixtral up", 14336, 4096),
    ("Mixtral attention", 4096, 4096),
    ("DeepSeek-MoE shared up", 2816, 2048),
    ("DeepSeek-MoE attention", 2048, 2048),
)


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
            experts_.gather()
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
    """Bytes of all packed weights, and of the experts alone."""
    total = sum(p.nbytes for n, p in model.named_parameters() if "embed" not in n)
    for module in model.modules():
        pack = getattr(module, "pack", None)
        total += 4 * pack.slab.numel() if pack is not None else 0
    return float(total)


def expert_bytes(model: nn.Module) -> float:
    packs = [m.pack for m in model.modules() if isinstance(m, PackedExperts) and m.pack is not None]
    return float(sum(4 * p.slab.numel() for p in packs))


def decode_seconds(
    model: nn.Module, config: Any, batch: int, device: torch.device, steps: int
) -> tuple[float, str]:
    """Median seconds of a decoding step with a static cache: replayed as one CUDA graph, or eagerly if that fails."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=PROMPT + 2 * steps + 8)
    ids = torch.randint(0, config.vocab_size, (batch, PROMPT), device=device)
    tokens = torch.randint(0, config.vocab_size, (batch, 1), device=device)
    with torch.inference_mode():
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

        def step() -> Tensor:
            return model(tokens, past_key_values=cache, use_cache=True).logits

        for _ in range(3):
            step()
        if device.type == "cuda":
            try:
                return _graph_seconds(step, steps), "CUDA graph"
            except RuntimeError as e:
                print(f"no CUDA graph of the whole step: {str(e).splitlines()[0]}", flush=True)
        return _eager_seconds(step, steps, device), "eager"


def _graph_seconds(step: Callable[[], object], steps: int) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def _eager_seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def whole_model(device: torch.device, bandwidth: float, config: Any, batches: tuple[int, ...]) -> Rows:
    model, rows = random_mixtral(config, device), []
    everything, of_experts = packed_bytes(model), expert_bytes(model)
    share = config.num_experts_per_tok / config.num_local_experts
    for batch in batches:
        took, how = decode_seconds(model, config, batch, device, STEPS)
        bound = (everything - of_experts * (1 - share) ** batch) / bandwidth
        rows.append(
            {
                "batch": batch,
                "ms a step": took * 1e3,
                "tokens/s": batch / took,
                "bound ms": bound * 1e3,
                "of bound": bound / took,
                "MiLo, A100, ms": MILO.get(batch, float("nan")) * 1e3,
                "run as": how,
            }
        )
        show(rows[-1])
    return rows


def show(values: dict[str, Any]) -> None:
    print("  ".join(cells(values)), flush=True)


def cells(values: dict[str, Any]) -> list[str]:
    """Numbers with few digits; shares as percentages."""
    shares = ("of copy", "of bound")
    return [
        v
        if isinstance(v, str)
        else f"{v:.0%}"
        if k in shares
        else str(v)
        if isinstance(v, int)
        else f"{v:.2f}"
        for k, v in values.items()
    ]


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1, 16 and 128 tokens")
    parser.add_argument("--only", default="linear,experts,model")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "error: no CUDA device; this script measures one (tests/test_gpu_benchmark.py runs its parts on the CPU)"
        )
    from transformers import MixtralConfig

    started, device = time.perf_counter(), torch.device("cuda")
    bandwidth, peak = copy_bandwidth(device), matmul_peak(device)
    rates = f"copy {bandwidth / 1e9:.0f} GB/s, bf16 {peak / 1e12:.0f} TFLOP/s"
    limits = f"{torch.cuda.get_device_name()}, commit {_commit()}: {rates}"
    print(limits, flush=True)
    tokens = (1, 16, 128) if arguments.quick else TOKENS
    mixtral = MixtralConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    parts: dict[str, Callable[[], Rows]] = {
        "linear": lambda: linear(device, bandwidth, tokens, SHAPES),
        "experts": lambda: experts(device, bandwidth, tokens, (MIXTRAL, DEEPSEEK)),
        "model": lambda: whole_model(device, bandwidth, mixtral, (1, 16, 32)),
    }
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "copy": bandwidth,
        "peak": peak,
        "commit": _commit(),
    }
    for name in arguments.only.split(","):
        if name == "model" and torch.cuda.mem_get_info()[0] < 32e9:
            print("model: left out, it takes 32 GB of free memory")
            continue
        rows = found[name] = parts[name]()
        torch.cuda.empty_cache()
        if arguments.markdown:
            text = table(tuple(rows[0]), [cells(r) for r in rows])
            insert(arguments.markdown, f"gpu-{name}", f"{limits}\n\n{text}")
    found["seconds"] = time.perf_counter() - started
    print(json.dumps(found))


if __name__ == "__main__":
    main()
