"""The GPU kernels of `experts`, interpreted on the CPU, against the reference. Awkward routing first."""

from dataclasses import replace

import pytest
import torch
from support.packing import gpu_layer, packed_weight, relative_error, stored_layer

pytest.importorskip("triton", reason="Triton is not installed")
from support import triton_interpreter

from trilobite.errors import ArchitectureError, ShapeError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops, reference
from trilobite.kernels.gpu import experts as triton_experts
from trilobite.kernels.gpu.experts import ACTIVATIONS, make_rows
from trilobite.kernels.gpu.tuning import Tile, forcing
from trilobite.kernels.layer import spec_of

pytestmark = pytest.mark.skipif(
    not triton_interpreter.available(), reason="Triton was imported without TRITON_INTERPRET"
)
triton_interpreter.install()

TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # h is rounded too
DOT = Tile(tokens=1, form="factored", block_n=64, block_m=16, splits=1, stages=1)
FOUR = replace(DOT, chunks=4)
SCALED = replace(DOT, form="scaled", block_m=64)
H, I = 64, 96  # noqa: E741
Weights = list[tuple[PackedWeight | None, PackedWeight, PackedWeight]]


def make(count: int, fmt: str = "int3-g32", rank: int = 0, kind: str = "int3", gated: bool = True) -> Weights:
    def one(n: int, k: int, seed: int) -> PackedWeight:
        return packed_weight(n, k, fmt, rank=rank, kind=kind, seed=seed)

    return [
        (one(I, H, 3 * e) if gated else None, one(I, H, 3 * e + 1), one(H, I, 3 * e + 2))
        for e in range(count)
    ]


def compare(
    weights: Weights,
    index: torch.Tensor,
    tile: Tile,
    *,
    dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    biases: bool = False,
) -> float:
    """Relative error of the kernels on random activations with this routing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(index.shape[0], H, generator=generator).to(dtype)
    share = torch.rand(index.shape, generator=generator).to(dtype)
    width = I if weights[0][0] is None else 2 * I
    gate_up = 5 * torch.randn(len(weights), width, generator=generator).to(dtype) if biases else None
    down = torch.randn(len(weights), H, generator=generator).to(dtype) if biases else None
    expected = reference.experts(x, index, share, stored_layer(weights, activation, gate_up, down))
    with forcing({"gate_up": tile, "down": tile, "rank": replace(tile, block_n=16)}):
        found = ops.experts(x, index, share, gpu_layer(weights, activation, gate_up, down))
    assert found.dtype == dtype
    return relative_error(found, expected)


ROUTINGS = {
    "one token": [[2, 0]],
    "empty experts": [[3, 0], [0, 3], [3, 0]],
    "all on one expert": [[1]] * 5,
    "no expert for some": [[4, 1], [4, 4], [0, 9], [-1, 2]],
    "ragged": [[0, 1], [0, 2], [0, 3], [0, 1], [0, 2], [3, 0], [0, 1]],
}


@pytest.mark.parametrize("tile", [DOT, FOUR, SCALED], ids=["factored", "four", "scaled"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing: str, tile: Tile) -> None:
    if routing == "one token":
        tile = replace(tile, block_n=32)  # several blocks of rows, the last one partial
    assert compare(make(4), torch.tensor(ROUTINGS[routing]), tile) < TOLERANCE[torch.float32]


def test_nobody_has_an_expert() -> None:
    layer = gpu_layer(make(2))
    x, index = torch.randn(3, H), torch.full((3, 2), 2)
    y = ops.experts(x, index, torch.rand(3, 2), layer)
    assert torch.equal(y, torch.zeros(3, H))
    y = ops.experts(x[:0], index[:0], torch.rand(0, 2), layer)
    assert y.shape == (0, H)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_types(dtype: torch.dtype, tokens: int) -> None:
    index = torch.randint(0, 3, (tokens, 2), generator=torch.Generator().manual_seed(1))
    tile = FOUR if tokens == 1 else SCALED
    rounded = 1 if tokens == 1 else 2  # the scaled form rounds weights too
    assert compare(make(3), index, tile, dtype=dtype) < rounded * TOLERANCE[dtype]


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "leaky_relu"])
def test_activations(activation: str) -> None:
    index = torch.tensor([[0, 1], [1, 2]])
    error = compare(make(2), index, replace(DOT, block_n=64), activation=activation, biases=True)
    # silu's exponential and the like differ in the last bits; quick_gelu and gpt-oss multiply that by 1.7.
    assert error < 4 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "leaky_relu"])
def test_experts_without_gates(activation: str, biases: bool) -> None:
    index, tile = torch.tensor([[0, 1], [1, 2]]), replace(DOT, block_n=64)
    error = compare(make(2, gated=False), index, tile, activation=activation, biases=biases)
    assert error < 4 * TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "fmt", ["int4-channel-sym", "int8-channel-sym", "int2-g32", "int2-g16", "int3-g16-super"]
)
def test_formats(fmt: str) -> None:
    assert compare(make(2, fmt), torch.tensor([[0, 1]]), DOT) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", ["int3", "int8", "fp16"])
def test_compensators(kind: str) -> None:
    index = torch.tensor([[0, 1]])
    assert compare(make(2, rank=3, kind=kind), index, DOT) < TOLERANCE[torch.float32]


@pytest.mark.long
def test_experts_that_differ_in_format_and_rank() -> None:
    """Four classes: bits, groups, kinds of compensators; gate and up unlike each other; ranks 0 to 40."""
    plain, wide, low, lower = make(1), make(1, "int4-g32-sym"), make(1, rank=40), make(1, rank=2)
    mixed = (wide[0][0], low[0][1], packed_weight(H, I, "int8-channel", rank=3, kind="int8", seed=9))
    weights = [plain[0], wide[0], low[0], lower[0], mixed]
    index = torch.tensor([[0, 1], [2, 3], [4, 0], [4, 2], [5, 1]])
    assert compare(weights, index, DOT) < TOLERANCE[torch.float32]
    assert compare(weights, index[:1], FOUR) < TOLERANCE[torch.float32]
    assert compare(weights, index, DOT, activation="leaky_relu") < 4 * TOLERANCE[torch.float32]


def test_a_split_down_projection() -> None:
    weights = make(3)
    index = torch.tensor([[0, 1], [1, 2], [1, 0]])
    assert compare(weights, index, replace(DOT, splits=2)) < TOLERANCE[torch.float32]


def test_many_tokens_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "MOST_SLOTS", 5)
    index = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    assert compare(make(3), index, replace(DOT, block_n=64)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("most", [pytest.param(5, marks=pytest.mark.long), 32768])
def test_a_call_in_several_has_the_bits_of_one(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Its memory is filled with NaN: nothing may come of slots that a part does not compute."""
    real = triton_experts.scratch
    monkeypatch.setattr(triton_experts, "scratch", lambda *sizes: real(*sizes).fill_(torch.nan))
    monkeypatch.setattr(triton_experts, "MOST_SLOTS", most)
    index = torch.tensor([[0, 1], [3, 2], [2, 0], [4, 2], [1, -1], [3, 0]])
    x, share = torch.randn(6, H), torch.rand(6, 2)
    layer = gpu_layer(make(4))
    parts = ops.experts_in_parts(x, index, share, layer)
    for group in ([0, 1], [2], [3]):
        parts.add(index.where(torch.isin(index, torch.tensor(group)), 4))
    whole = ops.experts(x, index, share, layer)
    assert bool(whole.isfinite().all())
    assert torch.equal(parts.result(), whole)


@pytest.mark.parametrize("tokens", [2, 150])
@pytest.mark.parametrize("experts", [1, 5, 8])
def test_routing_is_a_stable_sort(tokens: int, experts: int) -> None:
    """150 tokens are three blocks of slots."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(-1, experts + 2, (tokens, 2), generator=generator)
    rows = make_rows(index, experts, 16)
    assert rows.order is not None
    assert rows.ends is not None
    assert rows.tile_ends is not None
    flat = index.flatten()
    counts = [int((flat == e).sum()) for e in range(experts)]
    expected = [s for e in range(experts) for s in torch.where(flat == e)[0].tolist()]
    assert rows.order[: len(expected)].tolist() == expected
    assert rows.ends.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert rows.tile_ends.tolist() == torch.tensor([-(-c // 16) for c in counts]).cumsum(0).tolist()
    assert rows.tile_ends[-1] <= rows.tiles


@pytest.mark.parametrize("counts", [[32] * 4, [1] * 7, [128, 0, 0], [17, 1, 1, 1, 1]])
def test_the_grid_is_never_too_small(counts: list[int]) -> None:
    index = torch.cat([torch.full((c,), e) for e, c in enumerate(counts)])[:, None]
    rows = make_rows(index, len(counts), 16)
    assert sum(-(-c // 16) for c in counts) <= rows.tiles


def test_tokens_do_not_touch_each_other() -> None:
    layer, index = gpu_layer(make(3)), torch.tensor([[0, 1], [1, 2], [2, 0]])
    x = torch.randn(3, H, generator=torch.Generator().manual_seed(0))
    share = torch.ones(3, 2)
    good = ops.experts(x, index, share, layer)
    x[1] = torch.nan
    y = ops.experts(x, index, share, layer)
    assert y[1].isnan().all()
    assert torch.equal(y[::2], good[::2])


def test_a_lost_expert_is_noticed() -> None:
    weights = make(2)
    x, index, share = torch.randn(1, H), torch.tensor([[0, 1]]), torch.ones(1, 2)
    expected = reference.experts(x, index, share, stored_layer(weights))
    lost = torch.tensor([[0, 2]])
    y = ops.experts(x, lost, share, gpu_layer(weights))
    assert relative_error(y, expected) > 0.1


def _arguments() -> tuple[object, ...]:
    pack = ops.repack(make(2))
    index = torch.tensor([[0, 1]])
    weights = pack.slab, pack.table, None, None, I, "silu", spec_of(pack.codings)
    return torch.randn(1, H), index, torch.rand(1, 2), *weights


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.trilobite.experts_gpu.default, _arguments())


@pytest.mark.long
def test_compile_without_graph_breaks() -> None:
    layer, index, share = gpu_layer(make(2)), torch.tensor([[0, 1]]), torch.rand(1, 2)

    def run(x: torch.Tensor) -> torch.Tensor:
        return ops.experts(x + 1, index, share, layer) * 2

    x = torch.randn(1, H)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


def test_what_does_not_fit_is_refused() -> None:
    x, index, share, slab, table, *_, spec = _arguments()
    run = torch.ops.trilobite.experts_gpu
    with pytest.raises(ShapeError, match="top_k_weights"):
        run(x, index, share[:, :1], slab, table, None, None, I, "silu", spec)  # type: ignore[index]
    with pytest.raises(ShapeError, match="expected int64 or int32"):
        run(x, index.to(torch.int16), share, slab, table, None, None, I, "silu", spec)  # type: ignore[attr-defined]
    with pytest.raises(ShapeError, match=r"down_bias is \[1\]"):
        run(x, index, share, slab, table, None, torch.zeros(1), I, "silu", spec)
    with pytest.raises(ArchitectureError, match="no-such-activation"):
        run(x, index, share, slab, table, None, None, I, "no-such-activation", spec)
