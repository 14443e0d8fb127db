"""How close do the GPU kernels come to what this GPU can do?

    python benchmarks/gpu.py [--quick] [--only experts,model] [--minutes 8] [--markdown docs/gpu.md]

Unattended, on a GPU with 80 GB; the whole model is left out where memory does not suffice. The limits come first:
bandwidth of a large copy (bytes read and written), and a large bf16 product. Then all kernels that the cases need are
compiled in parallel. Then the parts, the most valuable first; no case begins when the minutes are over. What fails is
named and left out. A line of JSON with everything measured so far follows each part, so the last one says it all.

A figure is the median over intervals of eight replays of one CUDA graph, which goes through so many weights or routings
that none is still in the cache when it comes again. `floor` is the time at which the copy's bandwidth would deliver the
packed bytes. `bf16` is the layer with torch's grouped_mm and the routing that it takes, `grouped_mm` its two products
alone.

Whole model: 32 layers of Mixtral-8x7B's shape, INT3 g64, random weights, INT8 head; milliseconds of one decoding step
behind 128 tokens at batch 1, 16 and 32, as MiLo's Table 6 (seconds a step on an A100-40GB: 0.088, 0.102, 0.105).
"""

import argparse
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _ahead import compile_all, cores, noting, reason
from _decoding import compiled_seconds, decode_seconds, expert_bytes, packed_bytes, random_mixtral
from _markdown import insert, table
from torch import Tensor, nn

from trilobite.kernels.triton_bench import (
    DEEPSEEK,
    MIXTRAL,
    ROUTINGS,
    Layer,
    copies,
    copy_bandwidth,
    expert_calls,
    hit_bytes,
    linear_calls,
    matmul_peak,
    random_layer,
    random_weight,
    routings,
    seconds,
    spread_bytes,
)
from trilobite.kernels.triton_layout import Pack, repack
from trilobite.recipe import AnyFormat, Format, parse_format

TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
FEW_TOKENS = (1, 16, 128)
FORMATS = {bits: Format(bits=bits, group=64) for bits in (3, 4)}
LATTICE = "e8p-2"
MILO = {1: 0.088, 16: 0.102, 32: 0.105}
STEPS = 32
MODEL_BYTES = 32e9
"""Free memory that the whole model takes, with caches."""
MODEL_SECONDS, COMPILE_SECONDS = 30, 150
"""A case of the whole model begins only with so much time left: to make the weights; for torch.compile."""
Calls = Sequence[Callable[[], object]]
Times = dict[int | str, float]
Row = dict[str, Any]


@dataclass(kw_only=True)
class Clock:
    """Measures calls. dry: makes the first of them only, so that somebody can note what it launches.

    first: seconds of all first calls: what was not compiled ahead, and loading what was
    """

    dry: bool = False
    first: float = 0.0

    def __call__(self, calls: Calls) -> float:
        start = time.perf_counter()
        calls[0]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.first += time.perf_counter() - start
        return 1.0 if self.dry else seconds(calls)

    def baseline(self, name: str, calls: Calls) -> float:
        """Seconds of somebody else's kernels; NaN where they do not run."""
        if self.dry:
            return math.nan
        try:
            return self(calls)
        except Exception as e:
            print(f"{name}: {reason(e)}", flush=True)
            return math.nan


class LeftOutError(Exception):
    """A case that this GPU has no room for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table, not yet measured. least: seconds that it may take, else it does not begin."""

    name: str
    run: Callable[[Clock], Row]
    least: float = 0.0


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """torch's product by group: public since 2.10, private before. rows [S, K], matrices [E, K, N], ends [E] int32."""
    run = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return run(rows, matrices, offs=ends)


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """Slots in the order of their experts: what grouped_mm wants to have. slots [S], ends [E] int32."""

    slots: Tensor
    ends: Tensor


def sort_slots(index: Tensor, experts: int) -> Sorted:
    slots = index.flatten().argsort(stable=True)
    counts = (index.flatten()[:, None] == torch.arange(experts, device=index.device)).sum(0)
    return Sorted(slots=slots, ends=counts.cumsum(0).to(torch.int32))


def bf16_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same layer in bf16: torch's grouped_mm over sorted tokens.

    gate_up: [E, 2I, H]    down: [E, H, I]
    """
    active = index.shape[1]
    order = sort_slots(index, gate_up.shape[0])
    slots = order.slots
    gate, up = grouped_mm(x[slots // active], gate_up.transpose(1, 2), order.ends).chunk(2, -1)
    y = grouped_mm(F.silu(gate) * up, down.transpose(1, 2), order.ends)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return out.index_add_(0, slots // active, (y * weights.flatten()[slots, None]).float()).to(x.dtype)


def both_products(rows: Tensor, h: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """The two products of that layer alone. rows: [S, H] sorted    h: [S, I]."""
    grouped_mm(rows, gate_up.transpose(1, 2), ends)
    grouped_mm(h, down.transpose(1, 2), ends)


class ExpertLayer:
    """Random weights of one layer in every format, made when they are first needed."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        self.layer, self.device = layer, device
        self.packs: dict[str, Pack] = {}

    def pack(self, fmt: AnyFormat) -> Pack:
        if str(fmt) not in self.packs:
            self.packs[str(fmt)] = random_layer(self.layer, fmt, self.device)
        return self.packs[str(fmt)]

    @cached_property
    def full(self) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2I, H] and down [E, H, I] in bf16."""
        e, h, i = self.layer.experts, self.layer.hidden, self.layer.intermediate
        return self._noise(e, 2 * i, h) * 0.02, self._noise(e, h, i) * 0.02

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def times(self, clock: Clock, tokens: int) -> Times:
        """Seconds by bits, and of bf16 with its routing and without, all on the same routings."""
        routed = routings(self.layer, tokens, self.device)
        times: Times = {
            bits: clock(expert_calls(self.layer, self.pack(fmt), tokens, routed))
            for bits, fmt in FORMATS.items()
        }
        if clock.dry:
            return times | {"bf16": math.nan, "grouped_mm": math.nan}
        x = self._noise(tokens, self.layer.hidden)
        whole = [partial(bf16_experts, x, *r, *self.full) for r in routed]
        rows, h = (
            self._noise(tokens * self.layer.active, n) for n in (self.layer.hidden, self.layer.intermediate)
        )
        ends = [sort_slots(index, self.layer.experts).ends for index, _ in routed]
        alone = [partial(both_products, rows, h, e, *self.full) for e in ends]
        for name, calls in (("bf16", whole), ("grouped_mm", alone)):
            times[name] = clock.baseline(f"{self.layer.name}, {tokens} tokens, {name}", calls)
        return times

    def row(self, clock: Clock, tokens: int, bandwidth: float) -> Row:
        times = self.times(clock, tokens)
        nbytes = hit_bytes(self.layer, self.pack(FORMATS[3]), tokens)
        found = row(f"{self.layer.name} experts", tokens, times[3], nbytes, bandwidth)
        return found | ratios(times, 4, "bf16", "grouped_mm")

    def lattice_row(self, clock: Clock, tokens: int, bandwidth: float) -> Row:
        fmt, routed = parse_format(LATTICE), routings(self.layer, tokens, self.device)
        times: Times = {
            name: clock(expert_calls(self.layer, self.pack(f), tokens, routed))
            for name, f in ((3, FORMATS[3]), (LATTICE, fmt))
        }
        nbytes = hit_bytes(self.layer, self.pack(fmt), tokens)
        found = row(f"{self.layer.name} experts", tokens, times[LATTICE], nbytes, bandwidth)
        return found | ratios(times, LATTICE)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The shape of a linear layer."""

    name: str
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.name} [{self.n}, {self.k}]"


class LinearLayer:
    """Random weights of one shape in every format, made when they are first needed."""

    def __init__(self, shape: Matrix, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.packs: dict[str, list[Pack]] = {}

    def spread(self, fmt: AnyFormat) -> list[Pack]:
        if str(fmt) not in self.packs:
            one = repack([[random_weight(self.shape.n, self.shape.k, fmt, device=self.device)]])
            self.packs[str(fmt)] = copies(one, ROUTINGS)
        return self.packs[str(fmt)]

    @cached_property
    def full(self) -> list[Tensor]:
        n, k = self.shape.n, self.shape.k
        one = torch.randn(n, k, device=self.device, dtype=torch.bfloat16)
        return [one.clone() for _ in range(max(ROUTINGS, -(-spread_bytes(self.device) // one.nbytes)))]

    def time(self, clock: Clock, fmt: AnyFormat, tokens: int) -> float:
        return clock(linear_calls(self.spread(fmt), self.shape.n, self.shape.k, tokens))

    def row(self, clock: Clock, tokens: int, bandwidth: float) -> Row:
        times: Times = {bits: self.time(clock, fmt, tokens) for bits, fmt in FORMATS.items()}
        times["bf16"] = math.nan
        if not clock.dry:
            x = torch.randn(tokens, self.shape.k, device=self.device, dtype=torch.bfloat16)
            calls = [partial(F.linear, x, w) for w in self.full]
            times["bf16"] = clock.baseline(f"{self.shape}, {tokens} tokens, bf16", calls)
        nbytes = 4 * self.spread(FORMATS[3])[0].slab.numel()
        return row(str(self.shape), tokens, times[3], nbytes, bandwidth) | ratios(times, 4, "bf16")

    def lattice_row(self, clock: Clock, tokens: int, bandwidth: float) -> Row:
        fmt = parse_format(LATTICE)
        times: Times = {3: self.time(clock, FORMATS[3], tokens), LATTICE: self.time(clock, fmt, tokens)}
        nbytes = 4 * self.spread(fmt)[0].slab.numel()
        return row(str(self.shape), tokens, times[LATTICE], nbytes, bandwidth) | ratios(times, LATTICE)


def row(case: str, tokens: int, took: float, nbytes: float, bandwidth: float) -> Row:
    """One line of a table. nbytes: of the packed weights that are read."""
    return {
        "case": case,
        "tokens": tokens,
        "us": took * 1e6,
        "GB/s": nbytes / took / 1e9,
        "of copy": nbytes / took / bandwidth,
        "x floor": took * bandwidth / nbytes,
    }


def ratios(times: Times, *others: int | str) -> Row:
    """Seconds of others by those of 3 bits."""
    return {f"{o}-bit / 3-bit" if isinstance(o, int) else f"{o} / 3-bit": times[o] / times[3] for o in others}


def experts(
    device: torch.device, bandwidth: float, tokens: tuple[int, ...], layers: tuple[Layer, ...]
) -> Iterator[Case]:
    for layer in layers:
        made = ExpertLayer(layer, device)
        for t in tokens:
            yield Case(name=f"{layer.name}, {t} tokens", run=partial(made.row, tokens=t, bandwidth=bandwidth))


def linear(
    device: torch.device, bandwidth: float, tokens: tuple[int, ...], shapes: tuple[Matrix, ...]
) -> Iterator[Case]:
    for shape in shapes:
        made = LinearLayer(shape, device)
        for t in tokens:
            yield Case(name=f"{shape}, {t} tokens", run=partial(made.row, tokens=t, bandwidth=bandwidth))


def lattice(
    device: torch.device,
    bandwidth: float,
    tokens: tuple[int, ...],
    layers: tuple[Layer, ...],
    shapes: tuple[Matrix, ...],
) -> Iterator[Case]:
    """QuIP#'s codewords, beside 3 bits."""
    for layer in layers:
        made = ExpertLayer(layer, device)
        for t in tokens:
            run = partial(made.lattice_row, tokens=t, bandwidth=bandwidth)
            yield Case(name=f"{LATTICE} {layer.name}, {t} tokens", run=run)
    for shape in shapes:
        matrix = LinearLayer(shape, device)
        for t in tokens:
            run = partial(matrix.lattice_row, tokens=t, bandwidth=bandwidth)
            yield Case(name=f"{LATTICE} {shape}, {t} tokens", run=run)


SHAPES = (
    Matrix(name="Mixtral up", n=14336, k=4096),
    Matrix(name="Mixtral attention", n=4096, k=4096),
    Matrix(name="DeepSeek-MoE shared up", n=2816, k=2048),
    Matrix(name="DeepSeek-MoE attention", n=2048, k=2048),
)


class Decoding:
    """Decoding steps of a whole model, which is made when it is first needed."""

    def __init__(self, config: Any, device: torch.device, bandwidth: float) -> None:
        self.config, self.device, self.bandwidth = config, device, bandwidth

    @cached_property
    def model(self) -> nn.Module:
        return random_mixtral(self.config, self.device)

    def row(self, clock: Clock, batch: int, measure: Callable[..., tuple[float, str]]) -> Row:
        """measure: `decode_seconds` or `compiled_seconds`. Raises LeftOutError where memory does not suffice."""
        if not clock.dry and self.device.type == "cuda" and "model" not in vars(self):
            free = torch.cuda.mem_get_info()[0]
            if free < MODEL_BYTES:
                raise LeftOutError(
                    f"{MODEL_BYTES / 1e9:.0f} GB of memory are needed, {free / 1e9:.0f} GB are free"
                )
        took, how = measure(self.model, self.config, batch, self.device, 0 if clock.dry else STEPS)
        share = self.config.num_experts_per_tok / self.config.num_local_experts
        missed = expert_bytes(self.model) * (1 - share) ** batch
        bound = (packed_bytes(self.model) - missed) / self.bandwidth
        return {
            "batch": batch,
            "ms a step": took * 1e3,
            "tokens/s": batch / took,
            "bound ms": bound * 1e3,
            "of bound": bound / took,
            "MiLo, A100, ms": MILO.get(batch, math.nan) * 1e3,
            "run as": how,
        }


def whole_model(
    device: torch.device, bandwidth: float, config: Any, batches: tuple[int, ...]
) -> Iterator[Case]:
    made = Decoding(config, device, bandwidth)
    for batch in batches:
        run = partial(made.row, batch=batch, measure=decode_seconds)
        yield Case(name=f"whole model, batch {batch}", run=run, least=MODEL_SECONDS)


def compiled_model(device: torch.device, bandwidth: float, config: Any) -> Iterator[Case]:
    """The step at batch 1 by torch.compile, which takes minutes for 32 layers: the very last part."""
    made = Decoding(config, device, bandwidth)
    run = partial(made.row, batch=1, measure=compiled_seconds)
    yield Case(name="torch.compile of a whole step", run=run, least=COMPILE_SECONDS)


def release() -> None:
    """Give freed memory back. Raises RuntimeError where the GPU does not answer any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def show(values: Row) -> None:
    print("  ".join(cells(values)), flush=True)


def cells(values: Row) -> list[str]:
    """Numbers with few digits; shares as percentages; a dash for what was not measured."""
    return [_cell(key, value) for key, value in values.items()]


def _cell(key: str, value: Any) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        return f"{value:.0%}" if key in ("of copy", "of bound") else f"{value:.2f}"
    return str(value)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


class Run:
    """Goes through the cases of all parts within its time, whatever fails; keeps what was found."""

    def __init__(self, minutes: float) -> None:
        self.deadline = time.perf_counter() + 60 * minutes
        self.clock = Clock()
        self.left_out: list[str] = []
        self.failed: list[str] = []

    def part(self, cases: Iterable[Case]) -> list[Row]:
        """Measure the cases, and show their rows."""
        rows = []
        for case in cases:
            try:
                if time.perf_counter() + case.least > self.deadline:
                    raise LeftOutError("no time is left")
                rows.append(case.run(self.clock))
            except LeftOutError as e:
                self.left_out.append(case.name)
                print(f"left out: {case.name}: {e}", flush=True)
                continue
            except Exception as e:
                self.failed.append(f"{case.name}: {reason(e)}")
                print(f"failed: {self.failed[-1]}", flush=True)
                self.between_parts()
                continue
            show(rows[-1])
        return rows

    def between_parts(self) -> None:
        """Free memory. After a fault in a kernel no other runs in this process: then leave out what is left."""
        try:
            release()
        except RuntimeError as e:
            print(f"the GPU is lost, the rest is left out: {reason(e)}", flush=True)
            self.deadline = -math.inf

    def report(self) -> dict[str, Any]:
        return {"first_calls_s": self.clock.first, "left_out": self.left_out, "failed": self.failed}


def compile_ahead(cases: Iterable[Case], capability: int) -> float:
    """Compile what the cases will launch, on all cores. returns: seconds. What fails here will fail again, by name."""
    start, clock = time.perf_counter(), Clock(dry=True)
    try:
        with noting() as wanted:
            for case in cases:
                try:
                    case.run(clock)
                except Exception as e:
                    print(f"not compiled ahead: {case.name}: {reason(e)}", flush=True)
        release()
        count = compile_all(list(wanted), capability, cores(), partial(print, flush=True))
        took = time.perf_counter() - start
        print(
            f"{count} of {len(wanted)} kernels compiled ahead by {cores()} processes in {took:.0f} s",
            flush=True,
        )
    except Exception as e:
        print(f"nothing compiled ahead: {reason(e)}", flush=True)
    return time.perf_counter() - start


def parts_of(
    device: torch.device, bandwidth: float, tokens: tuple[int, ...], config: Any
) -> dict[str, Callable[[], Iterator[Case]]]:
    """All parts, the most valuable first; those whose kernels are the youngest, or that take longest, last."""
    layers = (MIXTRAL, DEEPSEEK)
    return {
        "experts": lambda: experts(device, bandwidth, tokens, layers),
        "model": lambda: whole_model(device, bandwidth, config, tuple(MILO)),
        "linear": lambda: linear(device, bandwidth, tokens, SHAPES),
        "lattice": lambda: lattice(device, bandwidth, FEW_TOKENS, layers, SHAPES[1:2]),
        "torch-compile": lambda: compiled_model(device, bandwidth, config),
    }


def mixtral_config() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_key_value_heads=8,
        vocab_size=32000,
    )


def parse_arguments() -> argparse.Namespace:
    """Raises SystemExit on names that are no part's, and on a page without their markers."""
    names = tuple(parts_of(torch.device("meta"), 1.0, (), None))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1, 16 and 128 tokens")
    parser.add_argument("--only", default=",".join(names), help="parts, in the order in which to run them")
    parser.add_argument("--minutes", type=float, default=8.0, help="no case begins after so many")
    parser.add_argument("--markdown", type=Path, help="a page to put the tables into")
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    if unknown := [name for name in arguments.only if name not in names]:
        parser.error(f"--only {unknown[0]}: no such part; known are {', '.join(names)}")
    if arguments.markdown:
        text = arguments.markdown.read_text(encoding="utf-8")
        if missing := [name for name in arguments.only if f"<!-- end gpu-{name} -->" not in text]:
            parser.error(
                f"{arguments.markdown}: no markers gpu-{missing[0]}; add them where the figures belong"
            )
    return arguments


def finite(value: Any) -> Any:
    """The same for JSON, which knows no NaN."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit(
            "error: no CUDA device; this script measures one (tests/test_gpu_benchmark.py runs its parts on the CPU)"
        )
    failed = measure(arguments, torch.device("cuda"))
    if failed:
        sys.exit(f"error: {len(failed)} cases failed; first: {failed[0]}")


def measure(arguments: argparse.Namespace, device: torch.device) -> list[str]:
    """Everything, as asked for. returns: what failed."""
    started, run = time.perf_counter(), Run(arguments.minutes)
    bandwidth, peak = copy_bandwidth(device), matmul_peak(device)
    rates = f"copy {bandwidth / 1e9:.0f} GB/s, bf16 {peak / 1e12:.0f} TFLOP/s"
    limits = f"{torch.cuda.get_device_name()}, commit {_commit()}: {rates}"
    print(limits, flush=True)
    tokens, config = FEW_TOKENS if arguments.quick else TOKENS, mixtral_config()
    parts = parts_of(device, bandwidth, tokens, config)
    one_layer = deepcopy(config)
    one_layer.num_hidden_layers = 1
    short = parts_of(device, bandwidth, tokens, one_layer)
    major, minor = torch.cuda.get_device_capability()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "copy": bandwidth,
        "peak": peak,
        "commit": _commit(),
        "compile_ahead_s": compile_ahead(
            (case for name in arguments.only for case in short[name]()), 10 * major + minor
        ),
    }
    for name in arguments.only:
        found[name] = rows = run.part(parts[name]())
        found |= run.report() | {"seconds": time.perf_counter() - started}
        if arguments.markdown and rows:
            text = table(tuple(rows[0]), [cells(r) for r in rows])
            insert(arguments.markdown, f"gpu-{name}", f"{limits}\n\n{text}")
        print(json.dumps(finite(found)), flush=True)
        run.between_parts()
    return run.failed


if __name__ == "__main__":
    main()
