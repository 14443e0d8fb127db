"""Measure the operators on random weights, and choose tiles: for `trilobite bench` and benchmarks/gpu.py."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from trilobite.errors import DeviceError
from trilobite.formats.affine import packed_shape
from trilobite.formats.weight import PackedWeight, encode_factor
from trilobite.kernels import triton_tuning
from trilobite.kernels.triton_experts import experts as run_experts
from trilobite.kernels.triton_layout import Pack, Place, repack
from trilobite.kernels.triton_linear import linear as run_linear
from trilobite.kernels.triton_tuning import CANDIDATES, Table, Tile
from trilobite.recipe import Format


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The routed experts of a model: E experts, A of them active, hidden size H, intermediate size I."""

    name: str
    experts: int
    active: int
    hidden: int
    intermediate: int


MIXTRAL = Layer(name="Mixtral-8x7B", experts=8, active=2, hidden=4096, intermediate=14336)
DEEPSEEK = Layer(name="DeepSeek-MoE-16B", experts=64, active=6, hidden=2048, intermediate=1408)
ROUTINGS = 8
"""Random routings that one measurement goes through, so that experts do not stay in the cache."""


def random_weight(n: int, k: int, fmt: Format, *, rank: int = 0, device: torch.device) -> PackedWeight:
    """Random codes with scales of an ordinary matrix: [n, k], standard deviation about 0.02."""
    tiles = torch.randint(0, 256, packed_shape(fmt, n, k), dtype=torch.uint8, device=device)
    scale = 0.07 / 2**fmt.bits
    meta = torch.full((16,), scale, device=device).half()
    if not fmt.symmetric:
        meta = torch.cat((meta, torch.full((16,), -scale * (2**fmt.bits - 1) / 2, device=device).half()))
    tiles[..., tiles.shape[2] - 2 * meta.numel() :] = meta.view(torch.uint8)
    if rank == 0:
        return PackedWeight(shape=(n, k), packed=tiles)
    factors = [
        encode_factor(
            torch.randn(rank, length, device=device) * 0.01,
            torch.full((rank, -(-length // 64)), 0.008, device=device),
            "int3",
        )
        for length in (n, k)
    ]
    return PackedWeight(shape=(n, k), packed=tiles, lra=factors[0], lrb=factors[1])


def random_layer(layer: Layer, fmt: Format, device: torch.device, rank: int = 0) -> Pack:
    """A layer of random experts in the GPU layout: copies of one expert, each in a place of its own."""
    h, i = layer.hidden, layer.intermediate
    one = repack([[random_weight(n, k, fmt, rank=rank, device=device) for n, k in ((i, h), (i, h), (h, i))]])
    table = one.table.repeat(layer.experts, 1, 1)
    places = table[..., Place.WORDS : Place.RANK]
    shift = torch.arange(layer.experts, device=device)[:, None, None] * one.slab.numel()
    table[..., Place.WORDS : Place.RANK] = torch.where(places < 0, places, places + shift)
    return Pack(slab=one.slab.repeat(layer.experts), table=table, codings=one.codings)


def routing(layer: Layer, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random distinct experts for every token, and weights."""
    index = torch.rand(tokens, layer.experts, device=device).topk(layer.active).indices
    return index, torch.rand(tokens, layer.active, device=device).bfloat16()


def seconds(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Median seconds of one call: all of them in one CUDA graph, replayed; without a GPU, called one by one."""
    for call in calls:
        call()
    if not torch.cuda.is_available():
        times = []
        for call in calls * max(1, repeats // len(calls)):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def expert_calls(layer: Layer, pack: Pack, tokens: int) -> list[Callable[[], object]]:
    """The operator on random activations, once for each of a few random routings."""
    device = pack.slab.device
    x = torch.randn(tokens, layer.hidden, device=device, dtype=torch.bfloat16)
    return [
        partial(
            run_experts,
            x,
            *routing(layer, tokens, device),
            pack.slab,
            pack.table,
            None,
            None,
            layer.intermediate,
            "silu",
            pack.spec,
        )
        for _ in range(ROUTINGS)
    ]


def linear_calls(packs: list[Pack], n: int, k: int, tokens: int) -> list[Callable[[], object]]:
    """The operator on random activations, once for each of several weights."""
    x = torch.randn(tokens, k, device=packs[0].slab.device, dtype=torch.bfloat16)
    return [partial(run_linear, x, p.slab, p.table, None, p.spec, n) for p in packs]


def hit_bytes(layer: Layer, pack: Pack, tokens: int) -> float:
    """Bytes of the experts that a random routing of so many tokens hits, on average."""
    missed = (1 - layer.active / layer.experts) ** tokens
    return 4 * pack.slab.numel() * (1 - missed)


def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * nbytes / seconds([lambda: target.copy_(source)])


def matmul_peak(device: torch.device, size: int = 8192) -> float:
    """Operations a second of a large bf16 product."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds([lambda: a @ a], 10)


def tune(device: torch.device, report: Callable[[str], None]) -> tuple[str, Table]:
    """The fastest tiles for this GPU: those of Mixtral's and DeepSeek-MoE's layers in INT3 g64, in sum.

    returns: the GPU's name, and its table. Raises DeviceError without a GPU.
    """
    if device.type != "cuda":
        raise DeviceError(
            "tuning measures on a GPU, and there is none; the tables of the package stay in use"
        )
    fmt = Format(bits=3, group=64)
    layers = [(layer, random_layer(layer, fmt, device)) for layer in (MIXTRAL, DEEPSEEK)]
    matrix = [repack([[random_weight(4096, 4096, fmt, device=device)]]) for _ in range(ROUTINGS)]
    table: Table = {}

    def experts_at(each: int) -> list[list[Callable[[], object]]]:
        tokens = [1 if each == 1 else max(2, each * la.experts // la.active) for la, _ in layers]
        return [expert_calls(la, pack, t) for (la, pack), t in zip(layers, tokens, strict=True)]

    def linear_at(each: int) -> list[list[Callable[[], object]]]:
        return [linear_calls(matrix, 4096, 4096, each)]

    for operation, sizes, calls_at in (
        ("linear", (1, 2, 8, 16, 32, 64, 256), linear_at),
        ("gate_up", (1, 4, 16, 32, 128), experts_at),
        ("down", (1, 4, 16, 32, 128), experts_at),
    ):
        found = []
        for each in sizes:
            best, took = _fastest(operation, each, calls_at(each), _chosen_gate_up(table, each))
            found.append(replace(best, tokens=(1 << 30) if each == sizes[-1] else each))
            report(f"{operation}, {each} rows: {took * 1e6:.1f} us with {best}")
        table[operation] = tuple(found)
    return torch.cuda.get_device_name(device), table


def _chosen_gate_up(table: Table, each: int) -> Tile | None:
    """The gate_up tile chosen before for so many rows: the down projection shares its slots a tile and its form."""
    tiles = table.get("gate_up", ())
    return next((t for t in tiles if each <= t.tokens), None)


def _fastest(
    operation: str, each: int, groups: list[list[Callable[[], object]]], gate_up: Tile | None
) -> tuple[Tile, float]:
    kinds = (
        ("lanes", "small")
        if each <= 2
        else ("small",)
        if each <= 8
        else ("small", "medium")
        if each <= 32
        else ("medium", "large")
    )
    tiles = [t for kind in kinds for t in CANDIDATES[kind]]
    if operation == "down" and gate_up is not None:
        tiles = list(dict.fromkeys(triton_tuning.fitted(t, gate_up.block_m) for t in tiles))
    timed = []
    for tile in tiles:
        forced = {operation: tile} | ({"gate_up": gate_up} if operation == "down" and gate_up else {})
        with triton_tuning.forcing(forced):
            try:
                timed.append((sum(seconds(calls, 10) for calls in groups), tile))
            except RuntimeError:  # more shared memory than this GPU has
                continue
    took, best = min(timed, key=lambda pair: pair[0])
    return best, took
