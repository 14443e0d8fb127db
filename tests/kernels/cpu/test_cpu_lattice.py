"""The CPU engine's lattice formats against the reference, on every instruction-set tier that this machine has."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.packing import lattice_weight, packed_weight, relative_error, stored_layer
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats import lattice
from trilobite.formats.incoherence import draw_signs, read_signs, store_signs
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops, reference
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.expert_table import Column, has_gates
from trilobite.kernels.layer import CpuSettings, ExpertsLayer
from trilobite.recipe import LatticeFormat, parse_format

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")

# fp32 sums in another order, some of them of 2048 terms; rounding of the result to 16 bits.
EXACT = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def _tiers() -> list[str]:
    if not cpu.available():
        return []
    names = [cpu.set_tier(name) for name in cpu.TIERS]
    cpu.set_tier(os.environ.get("TRILOBITE_ISA"))
    return list(dict.fromkeys(names))


@pytest.fixture(params=_tiers())
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield cpu.set_tier(request.param)
    cpu.set_tier(os.environ.get("TRILOBITE_ISA"))


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def native_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators fail where they would take the reference."""
    monkeypatch.setattr(ops, "reference", None)


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("n", [1, 2, 8, 12, 16, 28, 64, 96, 144, 336, 1408, 2048])
def test_rotations(tier: str, n: int, tuned: bool) -> None:
    """All forms: powers of two below and above a register, one core and two, columns that fill no register."""
    signs = store_signs(1 + _x(n) / 4) if tuned else draw_signs("hadamard", n, 3)
    spin, x = read_signs(signs, "hadamard", n), _x(3, n)
    assert relative_error(cpu.rotate(x, signs), spin.forward(x)) < 1e-6
    assert relative_error(cpu.rotate(x, signs, adjoint=True), spin.adjoint(x)) < 1e-6


def test_a_rotation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ShapeError, match="order 6"):
        cpu.rotate(_x(2, 6), torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="3 bytes of signs"):
        cpu.rotate(_x(2, 8), torch.zeros(3, dtype=torch.uint8))


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("name", ["e8p-1", "e8p-2", "e8p-3", "e8p-4"])
@pytest.mark.parametrize(
    ("n", "k"), [(72, 96), (2, 32), (28, 288), (448, 2048), (112, 1536)], ids=lambda v: str(v)
)
def test_linear(tier: str, name: str, n: int, k: int) -> None:
    w = lattice_weight(n, k, name)
    for tokens in (1, 2, 5, 17):
        x = _x(tokens, k)
        assert relative_error(ops.linear(x, w), reference.linear(x, w)) < EXACT[torch.float32]


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("dtype", list(EXACT), ids=str)
@pytest.mark.parametrize("tuned", [False, True])
def test_linear_of_every_type_with_all_parts(tier: str, dtype: torch.dtype, tuned: bool) -> None:
    w, bias = lattice_weight(80, 320, "e8p-3", rank=5, tuned=tuned), _x(80, dtype=dtype)
    for tokens in (1, 3, 8, 40):
        x = _x(tokens, 320, dtype=dtype)
        assert relative_error(ops.linear(x, w, bias), reference.linear(x, w, bias)) < EXACT[dtype]


def test_every_codeword(tier: str) -> None:
    """65536 E8P codewords, and 256 of the 1-bit codebook, one by one: the unit vectors pick their lanes."""
    codes = torch.arange(1 << 16).view(-1, 4) | (torch.arange(1 << 16).view(-1, 4).flip(0) << 16)
    for bits, scale, second in ((1, 4.0, 0.0), (2, 4.0, 0.0), (4, 4.0, 2.0), (3, 4.0, 2.0)):
        fmt = LatticeFormat(codebook="e8p", bits=bits, transform="hadamard")
        record = lattice.LatticeRecord(format=fmt, scale=scale, second=second)
        w = PackedWeight(
            shape=(len(codes), 32),
            packed=lattice.pack(codes & ((1 << 8 * bits) - 1), fmt),
            lattice=record.to_tensor(),
            signs_in=draw_signs("hadamard", 32, 1),
            signs_out=draw_signs("hadamard", len(codes), 2),
        )
        x = torch.eye(32)[::5]  # which the rotation spreads over all lanes
        # One wrong lane in one codeword is an error of 1e-3 or more.
        assert relative_error(ops.linear(x, w), reference.linear(x, w)) < 1e-5


# Experts.

HIDDEN, INTERMEDIATE, EXPERTS = 192, 96, 5
Expert = tuple[PackedWeight | None, PackedWeight, PackedWeight]


def _expert(e: int, name: str, *, rank: int = 0, tuned: bool = False) -> Expert:
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    if name.startswith("int"):
        gate, up, down = (packed_weight(n, k, name, seed=9 * e + i) for i, (n, k) in enumerate(shapes))
    else:
        gate, up, down = (
            lattice_weight(n, k, name, seed=9 * e + i, rank=rank, tuned=tuned)
            for i, (n, k) in enumerate(shapes)
        )
    return gate, up, down


def _layer(kind: str) -> ExpertsLayer:
    """All alike; with compensators; affine, tuned and residual ones in one layer; without gates."""
    if kind == "mixed":
        rows = [
            _expert(0, "e8p-3"),
            _expert(1, "int3-g32"),
            _expert(2, "e8p-4", tuned=True),
            _expert(3, "e8p-2", rank=3),
            (*_expert(4, "e8p-2")[:2], _expert(4, "int4-g32")[2]),
        ]
        return stored_layer(rows)
    rank = 4 if kind == "compensated" else 0
    rows = [_expert(e, "e8p-2", rank=rank) for e in range(EXPERTS)]
    return stored_layer([(None, *row[1:]) if kind == "no gates" else row for row in rows])


def _routing(tokens: int) -> tuple[Tensor, Tensor]:
    """Two of the experts; index EXPERTS, and one far above, mean none."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:2] for _ in range(tokens)])
    index[index == EXPERTS] = EXPERTS + 7 * (tokens % 2)
    return index, torch.rand(tokens, 2, generator=generator)


def _both(x: Tensor, layer: ExpertsLayer, bias: bool = False) -> tuple[Tensor, Tensor]:
    index, weights = _routing(len(x))
    if bias:
        gate_up = _x(EXPERTS, (1 + has_gates(layer.table)) * INTERMEDIATE, seed=3)
        layer = replace(layer, gate_up_bias=gate_up, down_bias=_x(EXPERTS, HIDDEN, seed=4))
    return ops.experts(x, index, weights, layer), reference.experts(x, index, weights, layer)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("kind", ["alike", "compensated", "mixed", "no gates"])
def test_experts(tier: str, kind: str) -> None:
    layer = _layer(kind)
    for tokens in (1, 2, 7, 60):
        assert relative_error(*_both(_x(tokens, HIDDEN), layer)) < 2 * EXACT[torch.float32]


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("kind", ["mixed", "no gates"])
@pytest.mark.parametrize("dtype", list(EXACT), ids=str)
def test_experts_of_every_type_with_biases(tier: str, dtype: torch.dtype, kind: str) -> None:
    for tokens in (1, 30):
        error = relative_error(*_both(_x(tokens, HIDDEN, dtype=dtype), _layer(kind), bias=True))
        assert error < 2 * EXACT[dtype]


@pytest.mark.usefixtures("native_only")
def test_one_bad_token_leaves_the_others(tier: str) -> None:
    layer, w, x = _layer("alike"), lattice_weight(64, HIDDEN, "e8p-3"), _x(12, HIDDEN)
    x[4, 100] = torch.nan
    rest = [t for t in range(12) if t != 4]
    for found, expected in (_both(x, layer), (ops.linear(x, w), reference.linear(x, w))):
        assert found[4].isnan().all() == expected[4].isnan().all()
        assert relative_error(found[rest], expected[rest]) < 2 * EXACT[torch.float32]


@pytest.mark.usefixtures("native_only")
def test_threads_and_passes_agree() -> None:
    """The result does not depend on the threads."""
    layer, x = _layer("mixed"), _x(40, HIDDEN)
    routing = _routing(len(x))
    one = ops.experts(x, *routing, layer, CpuSettings(threads=1))
    assert torch.equal(one, ops.experts(x, *routing, layer))


@pytest.mark.usefixtures("native_only")
def test_int8_activations_cost_precision_and_little_of_it(tier: str) -> None:
    w, x = lattice_weight(64, 512), _x(20, 512)
    error = relative_error(ops.linear(x, w, settings=CpuSettings("int8")), reference.linear(x, w))
    assert 1e-3 < error < 2e-2


@pytest.mark.parametrize("name", ["e8p-2-fourier", "grid-3", "e8p-2"])
def test_what_the_library_does_not_run_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = parse_format(name)
    assert isinstance(fmt, LatticeFormat)
    n, k = (32, 40) if name == "e8p-2" else (32, 64)  # 40 is no multiple of 32
    assert not cpu.runs(fmt, n, k)
    signs = [draw_signs(fmt.transform, m, m) for m in (k, n)]
    record = lattice.LatticeRecord(format=fmt, scale=0.03)
    w = PackedWeight(
        shape=(n, k),
        packed=torch.zeros(lattice.packed_shape(fmt, n, k), dtype=torch.uint8),
        lattice=record.to_tensor(),
        signs_in=signs[0],
        signs_out=signs[1],
    )
    assert torch.equal(ops.linear(_x(3, k), w), reference.linear(_x(3, k), w))


def test_a_table_that_does_not_fit_is_refused() -> None:
    layer = _layer("alike")
    slab, table = layer.slab, layer.table
    index, weights = torch.ones(2, 1, dtype=torch.int64), torch.ones(2, 1)
    wrong = {
        Column.PACKED: slab.numel() - 10,
        Column.LATTICE: slab.numel() - 3,
        Column.SIGNS_IN: slab.numel(),
        Column.SIGNS_OUT: -2,
        Column.BITS: 3,
    }
    for column, value in wrong.items():
        bad = table.clone()
        bad[1, :, column] = value
        with pytest.raises(ShapeError, match=r"does not fit|record says"):
            cpu.experts(_x(2, HIDDEN), index, weights, replace(layer, table=bad))
    grid = slab.clone()
    grid[table[1, 1, Column.LATTICE]] = 1
    with pytest.raises(ShapeError, match="codebook 1"):
        cpu.experts(_x(2, HIDDEN), index, weights, replace(layer, slab=grid))
