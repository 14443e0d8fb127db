"""Measure the operators on random weights: for `trilobite bench`, the search for tiles, and benchmarks/gpu."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from trilobite.formats.affine import packed_shape
from trilobite.formats.incoherence import draw_signs
from trilobite.formats.lattice import LatticeRecord
from trilobite.formats.weight import PackedWeight, encode_factor, stored_shapes
from trilobite.kernels.expert_table import DOWN
from trilobite.kernels.gpu.experts import experts as run_experts
from trilobite.kernels.gpu.layout.pack import repack
from trilobite.kernels.gpu.linear import linear as run_linear
from trilobite.kernels.layer import ExpertsLayer, Pack, PackColumn
from trilobite.measure.shapes import ExpertsShape
from trilobite.recipe import AnyFormat, Format, LatticeFormat

ROUTINGS = 8
"""Weights, or random routings, that one measurement goes through at least."""
INTERVAL = 8
"""Replays of a graph between two events: the gap before the first one, which the host makes, counts an eighth."""
FAILURES = (RuntimeError, TritonError)
"""What a launch may raise: out of memory or shared memory, an assembler that fails. Triton's are no RuntimeErrors."""


def spread_bytes(device: torch.device) -> int:
    """Bytes that calls shall read before they read any again: several times the largest L2. Nothing off the GPU."""
    return 1 << 28 if device.type == "cuda" else 0


def random_weight(n: int, k: int, fmt: AnyFormat, *, rank: int = 0, device: torch.device) -> PackedWeight:
    """Random codes with scales of an ordinary matrix, which differ: [n, k], standard deviation about 0.02."""
    w = (
        _random_lattice(n, k, fmt, device)
        if isinstance(fmt, LatticeFormat)
        else _random_affine(n, k, fmt, device)
    )
    if rank == 0:
        return w
    factors = [
        encode_factor(
            torch.randn(rank, length, device=device) * 0.01,
            0.008 * _around_one(rank, -(-length // 64), device=device),
            "int3",
        )
        for length in (n, k)
    ]
    return replace(w, lra=factors[0], lrb=factors[1])


def _random_affine(n: int, k: int, fmt: Format, device: torch.device) -> PackedWeight:
    tiles = torch.randint(0, 256, packed_shape(fmt, n, k), dtype=torch.uint8, device=device)
    scale = 0.07 / 2**fmt.bits * _around_one(*tiles.shape[:2], 16, device=device)
    offset = () if fmt.symmetric else (-scale * (2**fmt.bits - 1) / 2,)
    meta = torch.cat((scale, *offset), -1).half().view(torch.uint8)
    tiles[..., tiles.shape[2] - meta.shape[2] :] = meta
    return PackedWeight(shape=(n, k), packed=tiles)


def _around_one(*shape: int, device: torch.device) -> Tensor:
    return 0.75 + 0.5 * torch.rand(shape, device=device)


def _random_lattice(n: int, k: int, fmt: LatticeFormat, device: torch.device) -> PackedWeight:
    """Any byte is a codeword; entries of a codebook have a variance of about one."""
    shape = stored_shapes(fmt, n, k)["packed"]
    record = LatticeRecord(format=fmt, scale=0.02, second=0.006 if fmt.two_stages else 0.0)
    return PackedWeight(
        shape=(n, k),
        packed=torch.randint(0, 256, shape, dtype=torch.uint8, device=device),
        lattice=record.to_tensor().to(device),
        signs_in=draw_signs(fmt.transform, k, 0).to(device),
        signs_out=draw_signs(fmt.transform, n, 1).to(device),
    )


def random_layer(layer: ExpertsShape, fmt: AnyFormat, device: torch.device, rank: int = 0) -> Pack:
    """A layer of random experts in the GPU layout: copies of one expert, each in a place of its own."""
    h, i = layer.hidden, layer.intermediate
    one = repack([[random_weight(n, k, fmt, rank=rank, device=device) for n, k in ((i, h), (i, h), (h, i))]])
    table = one.table.repeat(layer.experts, 1, 1)
    places = table[..., PackColumn.WORDS : PackColumn.RANK]
    shift = torch.arange(layer.experts, device=device)[:, None, None] * one.slab.numel()
    table[..., PackColumn.WORDS : PackColumn.RANK] = torch.where(places < 0, places, places + shift)
    return replace(one, slab=one.slab.repeat(layer.experts), table=table)


def routing(layer: ExpertsShape, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random distinct experts for every token, and weights."""
    index = torch.rand(tokens, layer.experts, device=device).topk(layer.active).indices
    return index, torch.rand(tokens, layer.active, device=device).bfloat16()


def routings(layer: ExpertsShape, tokens: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Routings for calls that follow each other, at least `ROUTINGS`.

    While a call needs no expert twice, experts are dealt from one shuffled pack, round and round: so a call meets those
    that no call has met for longest. Two bits a weight, the least of any format, decide how many calls it takes to read
    `spread_bytes`.
    """
    each = hit_experts(layer, tokens) * 3 * layer.hidden * layer.intermediate / 4
    count = max(ROUTINGS, math.ceil(spread_bytes(device) / each))
    if tokens * layer.active > layer.experts:
        return [routing(layer, tokens, device) for _ in range(count)]
    shuffled = torch.randperm(layer.experts, device=device)
    hands = torch.arange(count * tokens * layer.active, device=device) % layer.experts
    dealt = shuffled[hands].view(count, tokens, layer.active)
    return [(index, routing(layer, tokens, device)[1]) for index in dealt]


def copies(pack: Pack, least: int = 1) -> list[Pack]:
    """The pack, and so many copies of it that calls on all of them in turn find nothing in the cache."""
    count = max(least, -(-spread_bytes(pack.slab.device) // (4 * pack.slab.numel())))
    return [pack, *(replace(pack, slab=pack.slab.clone()) for _ in range(count - 1))]


def seconds(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median seconds of one call: all of them in one CUDA graph, replayed; without a GPU, called one by one."""
    for call in calls:
        call()
    if not torch.cuda.is_available():
        times = []
        for call in list(calls) * max(1, repeats // len(calls)):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    graph = captured(lambda: [call() for call in calls])
    one = _warm_up(graph.replay)
    # Where one replay takes milliseconds, the host's gap is nothing, and eight would take long.
    inner = max(1, min(INTERVAL, int(0.01 / one)))
    return statistics.median(interval(graph.replay, inner) for _ in range(repeats)) / len(calls)


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A step as a CUDA graph; where capturing fails, this stream is the current one again."""
    torch.cuda.synchronize()
    before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except BaseException:
        torch.cuda.set_stream(before)  # torch leaves its own
        raise
    return graph


def _warm_up(replay: Callable[[], object], least: float = 0.05) -> float:
    """Replay until the clocks are up. returns: seconds of one replay, the host's part included."""
    start, count = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < least:
        replay()
        torch.cuda.synchronize()
        count += 1
    return took / count


def interval(replay: Callable[[], object], inner: int = INTERVAL) -> float:
    """Seconds of one of `inner` replays in a row, between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(inner):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / inner


def expert_calls(
    layer: ExpertsShape, pack: Pack, tokens: int, routed: Sequence[tuple[Tensor, Tensor]] | None = None
) -> list[Callable[[], object]]:
    """The operator on random activations, once for each routing (default: those of `routings`)."""
    device = pack.slab.device
    x = torch.randn(tokens, layer.hidden, device=device, dtype=torch.bfloat16)
    layers = [experts_layer(p) for p in copies(pack)]
    return [
        partial(run_experts, x, index, weights, layers[i % len(layers)])
        for i, (index, weights) in enumerate(routed or routings(layer, tokens, device))
    ]


def experts_layer(pack: Pack, activation: str = "silu") -> ExpertsLayer:
    """Experts in the GPU layout as the operator takes them, without biases."""
    hidden, intermediate = pack.shapes[DOWN]
    return ExpertsLayer(
        slab=pack.slab,
        table=pack.table,
        codings=pack.codings,
        hidden=hidden,
        intermediate=intermediate,
        activation=activation,
    )


def linear_calls(packs: list[Pack], tokens: int) -> list[Callable[[], object]]:
    """The operator on random activations, once for each of several weights."""
    ((_, k),) = packs[0].shapes
    x = torch.randn(tokens, k, device=packs[0].slab.device, dtype=torch.bfloat16)
    return [partial(run_linear, x, p, None) for p in packs]


def hit_experts(layer: ExpertsShape, tokens: int) -> float:
    """Experts that one of the `routings` of so many tokens hits, on average."""
    if tokens * layer.active <= layer.experts:
        return tokens * layer.active
    return layer.experts * (1 - (1 - layer.active / layer.experts) ** tokens)


def hit_bytes(layer: ExpertsShape, pack: Pack, tokens: int) -> float:
    """Bytes of those experts."""
    return 4 * pack.slab.numel() * hit_experts(layer, tokens) / layer.experts


def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Bytes a second that a kernel reads and writes; copies in graphs go to the copy engines, which are slower."""
    source = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds([lambda: torch.add(source, 1, out=target)])


def matmul_peak(device: torch.device, size: int = 8192) -> float:
    """Operations a second of a large bf16 product."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds([lambda: a @ a], 10)
