"""How close does the CPU engine come to what this machine can do?

    python -m benchmarks.speed.cpu [--quick] [--only experts,tiers,tokens,lattice,model,step,overhead,routers,int8]
                             [--markdown docs/performance.md] [--machine NAME]

Every figure stands beside the limit measured in the same moment: the rate at which the same threads read the same
memory, before and after each run of a kernel. The sets of weights exceed what a core's caches hold (Mixtral's layer:
0.6 GB). Medians. Tables of another machine stand beside those of the first, between markers that end with its NAME. The
last line is JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# torch's OpenMP threads would spin for milliseconds after each small operator, on the cores that the engine needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from benchmarks.lib.layers import DEEPSEEK, MIXTRAL, make_lattice_layer, make_layer, routing
from benchmarks.lib.markdown import insert, table
from benchmarks.lib.script import SHARED, TEXT, add_machine, of_machine
from benchmarks.lib.tiers import in_turn
from benchmarks.lib.whole_models import clock_modules, packed_models, step_bytes
from trilobite.evaluate.perplexity import score, tokenize_file
from trilobite.formats.incoherence import draw_signs
from trilobite.huge_pages import ones
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.layer import CpuSettings, ExpertsLayer
from trilobite.measure.shapes import ExpertsShape
from trilobite.quantize.run.compress import compress
from trilobite.recipe import Format, LatticeFormat, load_recipe
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load, load_tokenizer
from trilobite.runtime.modules.swap import configure

TOKENS = (1, 2, 4, 8, 16, 32, 128, 512)
UNDER_SUPER_SCALES = [
    Format(bits=b, group=g, super_scales=True) for b, g in ((3, 16), (3, 32), (4, 32), (2, 16))
]


def rotations(layer: ExpertsShape, tokens: int, active: int) -> float:
    """Milliseconds that one thread needs for the rotations of a layer: x and the sum; gate, up and h of each pair."""
    milliseconds = 0.0
    for n, count in ((layer.hidden, 2 * tokens), (layer.intermediate, 3 * tokens * active)):
        x, signs = torch.randn(8, n), draw_signs("hadamard", n, 0)
        milliseconds += _clock(lambda x=x, signs=signs: cpu.rotate(x, signs), 20) / 8e3 * count  # type: ignore[misc]
    return milliseconds


def lattice_layers(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """QuIP#'s formats, exact mode: packed bytes a second, and what of the time rotations would be on one thread."""
    rows, data = [], []
    for bits in (2,) if quick else (1, 2, 3, 4):
        experts, per_expert = make_lattice_layer(
            MIXTRAL, LatticeFormat(codebook="e8p", bits=bits, transform="hadamard")
        )
        for tokens in (1, 8, 32, 512):
            r = measure(MIXTRAL, experts, per_expert, tokens, 3 if tokens > 64 else 7)
            turning = rotations(MIXTRAL, tokens, MIXTRAL.active)
            name = f"{MIXTRAL.name}, e8p-{bits}"
            rates = (f"{r.gigabytes:.1f}", f"{r.probe:.1f}", f"{r.share:.0%}", f"{r.gmacs:.0f}")
            rows.append((name, str(tokens), f"{r.milliseconds:.2f}", *rates, f"{turning:.2f}"))
            data.append({"case": name, "tokens": tokens, "rotations": turning, **vars(r)})
            print("  ".join(rows[-1]), flush=True)
    head = ("one layer", "tokens", "ms", "GB/s", "probe GB/s", "share", "GMAC/s", "rotations, ms of a thread")
    return table(head, rows), data


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians of one case; `share` is the median of the per-run quotients."""

    milliseconds: float
    gigabytes: float
    probe: float
    share: float
    gmacs: float


def measure(
    layer: ExpertsShape,
    experts: ExpertsLayer,
    per_expert: float,
    tokens: int,
    repeats: int,
    mode: str = "exact",
) -> Result:
    """Run a bound call, as models do, on fresh routing each time, with a probe of the same memory before and after."""
    times, probes, used = [], [], []
    call = ops.bind_experts(experts, CpuSettings(mode))
    assert call is not None
    probe = cpu.measure_read_bandwidth(experts.slab, 1)
    for _ in range(repeats):
        index, weights = routing(layer, tokens)
        x = torch.randn(tokens, layer.hidden, dtype=torch.bfloat16)
        start = time.perf_counter()
        call(x, index, weights)
        times.append(time.perf_counter() - start)
        used.append(per_expert * len(index.unique()))
        after = cpu.measure_read_bandwidth(experts.slab, 1)
        probes.append((probe + after) / 2)
        probe = after
    rates = [u / t / 1e9 for u, t in zip(used, times, strict=True)]
    macs = 3 * tokens * layer.active * layer.hidden * layer.intermediate
    return Result(
        milliseconds=statistics.median(times) * 1e3,
        gigabytes=statistics.median(rates),
        probe=statistics.median(probes),
        share=statistics.median(r / p for r, p in zip(rates, probes, strict=True)),
        gmacs=macs / statistics.median(times) / 1e9,
    )


def experts_of_one_token(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """One token, both modes."""
    cases = [
        *((MIXTRAL, Format(bits=b, group=64), r) for b, r in ((3, 0), (4, 0), (2, 0), (3, 16))),
        *((MIXTRAL, fmt, 0) for fmt in UNDER_SUPER_SCALES),
        *((DEEPSEEK, Format(bits=3, group=64), r) for r in (0, 16)),
    ]
    rows, data = [], []
    for layer, fmt, rank in cases:
        experts, per_expert = make_layer(layer, fmt, rank)
        for mode in ("exact", "int8"):
            r = measure(layer, experts, per_expert, 1, 9 if quick else 25, mode)
            name = f"{layer.name} {fmt}" + (f" + rank {rank}" if rank else "")
            rows.append(
                (
                    name,
                    mode,
                    f"{r.milliseconds:.2f}",
                    f"{r.gigabytes:.1f}",
                    f"{r.probe:.1f}",
                    f"{r.share:.0%}",
                )
            )
            data.append({"case": name, "mode": mode, **vars(r)})
            print("  ".join(rows[-1]), flush=True)
    return table(("one layer, one token", "activations", "ms", "GB/s", "probe GB/s", "share"), rows), data


def tiers(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """One token on every instruction set that this machine has, in turn."""
    cases = [(MIXTRAL, Format(bits=b, group=64)) for b in (2, 3, 4)] + [(DEEPSEEK, Format(bits=3, group=64))]
    layers = [(layer, fmt, *make_layer(layer, fmt)) for layer, fmt in cases]
    rows, data = [], []
    for tier in in_turn():
        for mode in ("exact", "int8"):
            found = [measure(layer, e, size, 1, 9 if quick else 25, mode) for layer, _, e, size in layers]
            cells = (f"{r.gigabytes:.1f} ({r.share:.0%})" for r in found)
            probe = statistics.median(r.probe for r in found)
            rows.append((tier, mode, *cells, f"{probe:.1f}"))
            data += [
                {"tier": tier, "case": f"{layer.name} {fmt}", "mode": mode, **vars(r)}
                for (layer, fmt), r in zip(cases, found, strict=True)
            ]
            print("  ".join(rows[-1]), flush=True)
    names = [f"{layer.name} {fmt}" for layer, fmt in cases]
    return table(("tier", "activations", *names, "probe GB/s"), rows), data


def experts_of_many_tokens(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """Throughput by number of tokens, random routing, beside what the arithmetic units reach alone."""
    rows, data = [], []
    peaks = {mode: cpu.measure_peak(mode) for mode in ("exact", "int8")}
    plain = Format(bits=3, group=64)
    for layer, fmt in ((MIXTRAL, plain), (DEEPSEEK, plain), (MIXTRAL, UNDER_SUPER_SCALES[0])):
        experts, per_expert = make_layer(layer, fmt)
        for tokens in (1, 8, 32, 512) if quick else TOKENS:
            cells = [f"{layer.name} {fmt}", str(tokens)]
            for mode in ("exact", "int8"):
                r = measure(layer, experts, per_expert, tokens, 3 if tokens > 64 else 7, mode)
                cells += [f"{r.milliseconds:.1f}", f"{r.gmacs:.0f}", f"{r.gmacs / peaks[mode]:.1%}"]
                data.append(
                    {"case": cells[0], "tokens": tokens, "mode": mode, "peak": peaks[mode], **vars(r)}
                )
            rows.append((*cells, f"{r.probe:.1f}"))
            print("  ".join(rows[-1]), flush=True)
    each = ("ms", "GMAC/s", "of peak")
    names = [f"{mode} {what}" for mode in peaks for what in each]
    peak = f"peak: exact {peaks['exact']:.0f} GMAC/s, int8 {peaks['int8']:.0f}"
    return f"{table(('one layer', 'tokens', *names, 'probe GB/s'), rows)}\n\n{peak}", data


def _clock(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best * 1e6


def overhead(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """Microseconds of a call whose matrices are as good as empty."""
    tiny = ExpertsShape(name="tiny", experts=8, active=2, hidden=64, intermediate=64)
    experts, _ = make_layer(tiny, Format(bits=3, group=64))
    index, weights = routing(tiny, 1)
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    packed = experts.slab[: 4 * 448].view(4, 1, 448)
    linear = torch.ops.trilobite.linear
    with torch.inference_mode():
        rows = {
            "linear": _clock(lambda: linear(x, packed, None, None, None, None, 64), 500 if quick else 3000),
            "experts": _clock(
                lambda: ops.experts(x, index, weights, experts),
                500 if quick else 3000,
            ),
        }
    cells = [(name, f"{us:.1f}") for name, us in rows.items()]
    print(cells, flush=True)
    return table(("one call on 64 x 64 matrices", "us"), cells), [rows]


def _median(call: Callable[[], object], before: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call, without what runs before each."""
    times = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def routers(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """Microseconds of a router's products, its weight in the caches; torch's also while the engine's threads wait."""
    memory, rows, data = torch.ones(1 << 23, dtype=torch.uint8), [], []
    repeats = 100 if quick else 1000
    for dtype, n, k in ((torch.bfloat16, 128, 2048), (torch.bfloat16, 8, 4096), (torch.float32, 64, 2048)):
        w = torch.randn(n, k).to(dtype)
        for tokens in (1, 8, 16, 32, 64, 512):
            x = torch.randn(tokens, k).to(dtype)
            if not ops.multiplies(x, w):
                continue  # torch does
            ours, theirs = partial(ops.dense_linear, x, w), partial(torch.nn.functional.linear, x, w)
            busy = partial(cpu.measure_read_bandwidth, memory, 1)
            with torch.inference_mode():
                found = [
                    _median(ours, busy, repeats),
                    _median(theirs, int, repeats),
                    _median(theirs, busy, repeats),
                ]
            name = f"[{n}, {k}] {str(dtype).removeprefix('torch.')}"
            rows.append((name, str(tokens), *(f"{us:.0f}" for us in found)))
            data.append({"case": name, "tokens": tokens, "us": found})
            print("  ".join(rows[-1]), flush=True)
    head = ("router", "tokens", "engine, us", "torch", "torch, behind a call of the engine")
    return table(head, rows), data


def whole_models(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """Decoding steps of models with true layers, INT3 body, INT8 head; and loading them."""
    rows, data = [], []
    for title, packed in packed_models():
        load(str(packed))
        start = time.perf_counter()
        model = load(str(packed))
        seconds = time.perf_counter() - start
        size = sum(f.stat().st_size for f in packed.glob("*.safetensors"))
        for mode in ("exact", "int8"):
            configure(model, CpuSettings(mode))
            for batch in (1, 8) if quick else (1, 8, 32):
                rate, probe = _generate(model, batch, 8 if quick else 24)
                bound = batch * probe * 1e9 / step_bytes(model, batch)
                cells = (f"{rate:.1f}", f"{bound:.1f}", f"{rate / bound:.0%}", f"{probe:.1f}")
                rows.append((title, mode, str(batch), *cells))
                case = {"case": title, "mode": mode, "batch": batch}
                data.append({**case, "tokens/s": rate, "bound": bound, "probe": probe})
                print("  ".join(rows[-1]), flush=True)
        data.append({"case": title, "load seconds": seconds, "bytes": size})
        print(f"{title}: {size / 1e9:.2f} GB load in {seconds:.2f} s", flush=True)
    header = ("model", "activations", "batch", "tokens/s", "bound", "share", "probe GB/s")
    return table(header, rows), data


def steps(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """Where the time of one token goes: milliseconds by kind of module, batch 1, exact mode."""
    rows, data = [], []
    for title, packed in packed_models():
        model = load(str(packed))
        spent = clock_modules(model)
        cache = model(torch.randint(0, 32000, (1, 16)), use_cache=True)[CACHE]
        times: list[dict[str, float]] = []
        for _ in range(30 if quick else 100):
            spent.clear()
            start = time.perf_counter()
            with torch.inference_mode():
                model(torch.randint(0, 32000, (1, 1)), use_cache=True, **{CACHE: cache})
            whole = time.perf_counter() - start
            times.append({"token": whole, **spent, "rest": whole - sum(spent.values())})
        medians = {kind: 1e3 * statistics.median(t[kind] for t in times) for kind in times[-1]}
        for kind, ms in medians.items():
            rows.append((title, kind, f"{ms:.2f}", f"{ms / medians['token']:.0%}"))
        data.append({"case": title, **medians})
        print(title, medians, flush=True)
    return table(("model", "part", "ms", "share"), rows), data


def _generate(model: Any, batch: int, length: int) -> tuple[float, float]:
    ids = torch.randint(0, 32000, (batch, 16))
    probe_memory = ones(512 << 20)
    rates, probes = [], []
    with torch.inference_mode():
        for _ in range(3):
            times = []
            past = model(ids, use_cache=True)
            cache, token = past[CACHE], torch.randint(0, 32000, (batch, 1))
            for _ in range(length):
                start = time.perf_counter()
                past = model(token, use_cache=True, **{CACHE: cache})
                token = past.logits[:, -1:].argmax(-1)
                times.append(time.perf_counter() - start)
                token = torch.randint(0, 32000, (batch, 1))  # random tokens, or the routing degenerates
            rates.append(batch / statistics.median(times))
            probes.append(cpu.measure_read_bandwidth(probe_memory, 1))
    return statistics.median(rates), statistics.median(probes)


def int8_quality(quick: bool) -> tuple[str, list[dict[str, Any]]]:
    """What one-digit activations cost: perplexity of the small trained models of ../shared."""
    rows, data = [], []
    for name in ("tiny-mixtral", "tiny-mixtral-outliers", "tiny-deepseek"):
        source = SHARED / "models" / name
        if not source.is_dir() or not TEXT.exists():
            print(f"{source} or {TEXT} is not here; skipped")
            continue
        ids = tokenize_file(load_tokenizer(str(source)), TEXT)[: 4096 if quick else 32768]
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            compress(str(source), Path(folder, "packed"), load_recipe("search3"))
            model = load(str(Path(folder, "packed")))
            found = {}
            for mode in ("exact", "int8"):
                configure(model, CpuSettings(mode))
                found[mode] = score({mode: model}, ids, context=512, batch=1)[mode].perplexity
        change = f"{found['int8'] / found['exact'] - 1:+.2%}"
        rows.append((name, f"{found['exact']:.3f}", f"{found['int8']:.3f}", change))
        data.append({"case": name, **found})
        print("  ".join(rows[-1]), flush=True)
    return table(("search3, context 512", "exact", "int8", "change"), rows), data


PARTS = {
    "int8": int8_quality,
    "experts": experts_of_one_token,
    "tiers": tiers,
    "tokens": experts_of_many_tokens,
    "lattice": lattice_layers,
    "model": whole_models,
    "step": steps,
    "overhead": overhead,
    "routers": routers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--markdown", type=Path, help="page whose marked tables are replaced")
    add_machine(parser)
    options = parser.parse_args()
    facts = cpu.info()
    memory = ones(1 << 30)
    print(
        f"{facts['tier']}, {facts['threads']} threads; read {cpu.measure_read_bandwidth(memory):.1f} GB/s (1 GiB)"
    )
    del memory
    for mode in ("exact", "int8"):
        print(f"peak of the arithmetic in {mode} mode {cpu.measure_peak(mode):.0f} GMAC/s", flush=True)
    results: dict[str, Any] = {"info": facts}
    for name in options.only.split(","):
        text, results[name] = PARTS[name](options.quick)
        print(text, flush=True)
        if options.markdown:
            insert(options.markdown, of_machine(f"cpu-{name}", options.machine), text)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
