"""What of the vLLM plugin runs without vLLM: each rank's part of a layer, and the operators."""

import os
import subprocess
import sys

import pytest
import torch
from support.packing import packed_weight, relative_error
from torch import Tensor

from trilobite.errors import CheckpointError, ShapeError
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.integrations.vllm import layers
from trilobite.kernels.cpu import engine

CPU = torch.device("cpu")
FORMATS = ("int3-g64", "int4-g32-sym-dq", "int2-g16-super", "int8-channel")


def _linear(pieces: list[tuple[PackedWeight, tuple[int, int], tuple[int, int]]]) -> layers.Linear:
    return layers.Linear([layers.LinearPiece(w, row, column, CPU) for w, row, column in pieces])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_of_all_ranks_are_all_rows(fmt: str, rank: int, ranks: int) -> None:
    """Parts of 56 rows begin inside of bands and of factors' groups."""
    q, k = packed_weight(168, 192, fmt, rank=rank), packed_weight(84, 192, "int3-g32", rank=rank)
    x = torch.randn(3, 5, 192)
    made: list[Tensor] = []
    for r in range(ranks):
        both = [(w, (r * w.shape[0] // ranks, (r + 1) * w.shape[0] // ranks), (0, 192)) for w in (q, k)]
        made.append(_linear(both)(x))
    parts = [
        torch.cat([m[..., : 168 // ranks] for m in made], -1),
        torch.cat([m[..., 168 // ranks :] for m in made], -1),
    ]
    for part, w in zip(parts, (q, k), strict=True):
        assert relative_error(part, x @ dequantize(w).T) < 1e-5


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_columns_of_all_ranks_add_up(fmt: str, rank: int, ranks: int) -> None:
    """600 columns are filled up to 608 in the checkpoint, and parts of them begin inside of tiles."""
    packed = packed_weight(48, 608 if fmt != "int3-g64" else 640, fmt, rank=rank)
    x, width = torch.randn(4, 600), 600 // ranks
    total = sum(
        _linear([(packed, (0, 48), (r * width, (r + 1) * width))])(x[:, r * width : (r + 1) * width])
        for r in range(ranks)
    )
    assert relative_error(torch.as_tensor(total), x @ dequantize(packed)[:, :600].T) < 1e-5


def test_rows_that_a_head_does_not_have_are_zeros() -> None:
    w, x = packed_weight(250, 64, "int8-g64"), torch.randn(2, 64)
    last = layers.LinearPiece(w, (192, 384), (0, 64), CPU)(x)
    assert torch.allclose(last[:, :58], x @ dequantize(w)[192:].T, atol=1e-5)
    assert last.shape == (2, 192)
    assert not last[:, 58:].any()
    assert not layers.LinearPiece(w, (384, 576), (0, 64), CPU)(x).any()


def _experts(hidden: int, intermediate: int) -> layers.Experts:
    """Four that differ in format and rank."""
    return [
        (
            packed_weight(intermediate, hidden, f"int{bits}-g32", rank=2 * e, seed=e),
            packed_weight(intermediate, hidden, "int3-g64", seed=e + 9),
            packed_weight(hidden, intermediate, down, rank=e, seed=e + 5),
        )
        for e, (bits, down) in enumerate(
            [(2, "int3-g64"), (3, "int4-g16-sym"), (4, "int3-g32-dq"), (8, "int3-g16-super")]
        )
    ]


def _expected(experts: layers.Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros(x.shape)
    for e, (gate, up, down) in enumerate(experts):
        assert gate is not None
        hidden = torch.nn.functional.silu(x @ dequantize(gate).T) * (x @ dequantize(up).T)
        y += (hidden @ dequantize(down).T) * ((index == e) * weights).sum(-1, keepdim=True)
    return y


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_all_ranks_add_up(ranks: int) -> None:
    experts = _experts(64, 1024)
    x, weights = torch.randn(7, 64), torch.rand(7, 2)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(7)]).to(torch.int32)
    total = torch.zeros(7, 64)
    for rank in range(ranks):
        share = layers.Share(rank=rank, ranks=ranks)
        total += layers.RoutedExperts(experts, 64, "silu", share, CPU, "experts")(x, weights, index)
    assert relative_error(total, _expected(experts, x, index, weights)) < 1e-5


def test_experts_spread_over_ranks_add_up() -> None:
    """Each rank numbers its own from zero; those of others are none."""
    experts = _experts(64, 256)
    x, weights, index = torch.randn(7, 64), torch.rand(7, 2), torch.randint(0, 4, (7, 2), dtype=torch.int32)
    total = torch.zeros(7, 64)
    for mine in ((0, 2), (1, 3)):
        here = torch.tensor([mine.index(e) if e in mine else -1 for e in range(4)], dtype=torch.int32)
        share = layers.Share(rank=0, ranks=1, experts=here)
        made = layers.RoutedExperts([experts[e] for e in mine], 64, "silu", share, CPU, "experts")
        total += made(x, weights, index)
    assert relative_error(total, _expected(experts, x, index, weights)) < 1e-5


def test_sides_that_were_filled_up() -> None:
    """H = 70 was packed as 96."""
    experts, x = _experts(128, 64), torch.randn(5, 70)
    weights, index = torch.rand(5, 1), torch.randint(0, 4, (5, 1))
    made = layers.RoutedExperts(experts, 70, "silu", layers.Share(rank=0, ranks=1), CPU, "experts")
    expected = _expected(experts, torch.nn.functional.pad(x, (0, 58)), index, weights)[:, :70]
    assert relative_error(made(x, weights, index), expected) < 1e-5


def test_experts_that_cannot_be_split_are_refused_in_one_line() -> None:
    channel = [tuple(packed_weight(64, 64, "int4-channel") for _ in range(3))]
    with pytest.raises(
        ShapeError, match=r"layers\.3\.experts: 64 columns .* --enable-expert-parallel.*--recipe"
    ) as e:
        layers.RoutedExperts(channel, 64, "silu", layers.Share(rank=1, ranks=2), CPU, "layers.3.experts")
    assert "\n" not in str(e.value)


def test_a_part_that_did_not_come_is_missed() -> None:
    with pytest.raises(CheckpointError, match=r"a\.q_proj\.weight_packed is missing"):
        layers.whole_weight({}, (64, 64), "a.q_proj")
    w = packed_weight(64, 64, "int4-g32-dq")
    with pytest.raises(ShapeError, match=r"a\.q_proj"):
        layers.whole_weight({"packed": w.packed}, (64, 96), "a.q_proj")


def test_operators_find_layers_by_name_and_trace() -> None:
    w = packed_weight(64, 64, "int3-g64")
    linear = _linear([(w, (0, 64), (0, 64))])
    name, second = layers.keep("a.q_proj", linear), layers.keep("a.q_proj", _linear([(w, (0, 16), (0, 64))]))
    assert second == name + "'", "a second model in the process does not take the first one's place"
    share = layers.Share(rank=0, ranks=1)
    routed = layers.RoutedExperts(_experts(64, 128), 64, "silu", share, CPU, "a.experts")
    experts = layers.keep("a.experts", routed)
    weights, index = torch.rand(3, 2), torch.tensor([[0, 1], [2, 3], [1, 0]])

    def step(x: Tensor) -> Tensor:
        y = torch.ops.trilobite.vllm_linear(x, name, 64) * 2
        return torch.ops.trilobite.vllm_experts(y, weights, index, experts)  # type: ignore[no-any-return]

    x = torch.randn(3, 64)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), routed(linear(x) * 2, weights, index))


BOUND = """
import os, sys, threading, torch

def tasks():
    return {int(task) for task in os.listdir("/proc/self/task")}

first, second = map(int, sys.argv[1:])
torch.set_num_threads(2)
os.sched_setaffinity(0, {first})  # as libgomp binds the main thread, and each of its others
bound, stop = threading.Event(), threading.Event()
def other():
    os.sched_setaffinity(0, {second})
    bound.set()
    stop.wait()
threading.Thread(target=other, daemon=True).start()
bound.wait()
torch.ones(1 << 20).add_(1)  # torch's own thread has started
from trilobite.integrations.vllm.threads import share_cores
before = tasks()
share_cores()
from trilobite.kernels.cpu import engine
new = [os.sched_getaffinity(task) for task in tasks() - before]  # of libraries, too
print(engine.team(None), os.sched_getaffinity(0), {second} in new)
"""


def test_engine_gets_the_cores_that_openmp_is_bound_to() -> None:
    """A process whose main thread is bound to one core, as vLLM's workers are, counts both and uses the other one."""
    if not engine.available() or (os.cpu_count() or 1) < 2:
        pytest.skip("no native engine, or one core only")
    done = subprocess.run(
        [sys.executable, "-c", BOUND, "0", "1"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "2 {0} True\n", done.stdout + done.stderr
