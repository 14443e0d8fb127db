"""Lattice formats in the GPU layout: bit for bit the stored codewords, and kernels (interpreted) like the reference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import gpu_layer, lattice_weight, packed_weight, relative_error, stored_layer

pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl
from support import triton_interpreter

from trilobite.errors import ShapeError
from trilobite.formats import lattice
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops, reference
from trilobite.kernels.gpu import rotated as triton_rotated
from trilobite.kernels.gpu.device import decode as triton_decode
from trilobite.kernels.gpu.layout.codewords import column_of, pack_codewords, tables, unpack_codewords
from trilobite.kernels.gpu.layout.pack import arrange, repack, restore
from trilobite.kernels.gpu.tuning import Tile, forcing
from trilobite.kernels.layer import PackColumn

interpreted = pytest.mark.skipif(
    not triton_interpreter.available(), reason="Triton was imported without TRITON_INTERPRET"
)
triton_interpreter.install()

TOLERANCE = {
    torch.float32: 3e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}  # rotated activations are rounded too
TILE = Tile(tokens=1, form="factored", block_n=64, block_m=16, splits=1, stages=1)
H, I = 64, 96  # noqa: E741
Weights = list[tuple[PackedWeight | None, PackedWeight, PackedWeight]]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 20), st.integers(1, 40), st.integers(0, 9))
def test_codewords_come_back(bits: int, n: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << 8 * bits, (n, blocks), generator=generator)
    words = pack_codewords(codes, bits)
    assert words.shape == (-(-blocks // 16), bits, n, 4)
    assert torch.equal(unpack_codewords(words, 8 * blocks), codes)


def test_every_codeword_is_the_word_that_tables_and_signs_make() -> None:
    """By the definition in docs/gpu.md, bit by bit: all 65536 points, and all of the 1-bit E8 codebook."""
    codes = torch.arange(1 << 16)
    words = pack_codewords(codes.view(-1, 16), 2).long()  # [1, 2, 4096, 4]
    patterns, signs = words[0, 0], words[0, 1]
    table = tables(torch.device("cpu")).long()
    found = torch.empty(4096, 4, 4, 8)
    for j in range(4):
        bits = [signs >> (4 * nibble + j) & 1 for nibble in range(8)]
        for nibble in range(8):
            lane = 2 * nibble if nibble < 4 else 2 * nibble - 7
            code = table[0][patterns >> 8 * j & 255] >> 4 * nibble & 15
            negative = bits[nibble] if nibble else torch.stack(bits[1:]).sum(0) & 1
            found[:, j, :, lane] = ((code ^ 14 * negative ^ bits[0]) - 7.5) / 2
    expected = lattice.e8p_points(torch.device("cpu")).view(4096, 4, 4, 8)  # codeword 4 j + t
    assert torch.equal(found, expected)
    lanes = torch.stack([table[1] >> 4 * (e // 2 + 4 * (e % 2)) & 15 for e in range(8)], -1)
    assert torch.equal((lanes - 8) / 2, lattice.e8_points(torch.device("cpu")))


def test_columns_are_permuted_within_32() -> None:
    position = torch.arange(256)
    column = column_of(position)
    assert torch.equal(column.sort().values, position)
    assert torch.equal(column // 32, position // 32)
    # Thread t of a quad holds columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of each product: one codeword of each two.
    held = [column[[16 * i + 8 * h + 2 * 3 + p for i in (0, 1) for h in (0, 1) for p in (0, 1)]]]
    assert held[0].tolist() == list(range(24, 32))


@pytest.mark.parametrize("name", ["e8p-1", "e8p-2", "e8p-3", "e8p-4"])
@pytest.mark.parametrize(("rank", "tuned"), [(0, False), (3, True)])
def test_stored_bytes_come_back(name: str, rank: int, tuned: bool) -> None:
    w = lattice_weight(50, 168, name, rank=rank, tuned=tuned)  # bits of signs that fill no word
    [[back]] = restore(repack([[w]]))
    assert back is not None
    assert back.tensors().keys() == w.tensors().keys()
    for suffix, tensor in w.tensors().items():
        assert torch.equal(back.tensors()[suffix], tensor), suffix


def test_a_flipped_bit_is_noticed() -> None:
    w = lattice_weight(16, 128)
    pack = repack([[w]])
    pack.slab[7] ^= 1 << 20
    [[back]] = restore(pack)
    assert back is not None
    assert not torch.equal(back.packed, w.packed)


def test_hardly_a_byte_is_wasted() -> None:
    w = lattice_weight(128, 1024, "e8p-3")
    assert 4 * arrange([[w]])[2] - w.packed.nbytes == 128 + 128 + 128  # scales, signs of both sides


def test_other_lattice_formats_are_left_to_the_reference() -> None:
    w = lattice_weight(16, 32, "grid-2")
    with pytest.raises(ShapeError, match=r"grid-2.*e8p with Hadamard"):
        repack([[w]])


def _linear(x: torch.Tensor, w: PackedWeight, tile: Tile = TILE, bias: torch.Tensor | None = None) -> float:
    with forcing({"linear": tile, "lattice": tile, "rank": replace(tile, block_n=16)}):
        y = ops.linear_gpu(x, ops.repack([[w]]), bias)
    assert y.dtype == x.dtype
    return relative_error(y, reference.linear(x, w, bias))


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@interpreted
@pytest.mark.parametrize("name", ["e8p-1", "e8p-2", "e8p-3", "e8p-4"])
@pytest.mark.parametrize(
    ("n", "k", "tokens"),
    [
        (12, 24, 1),  # one Paley matrix a side, R = 1 and 2
        (48, 168, 3),  # 12 x 4; 84 x 2: R below the tensor core's least tile, columns that fill no chunk
        (128, 256, 1),  # powers of two; two blocks of L
        (80, 160, 17),  # 20 x 4
    ],
)
def test_linear(name: str, n: int, k: int, tokens: int) -> None:
    assert _linear(_x(tokens, k), lattice_weight(n, k, name)) < TOLERANCE[torch.float32]


@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("tokens", [1, 65])
def test_types(dtype: torch.dtype, tokens: int) -> None:
    w = lattice_weight(64, 384, "e8p-3", tuned=True)
    tile = replace(TILE, block_m=8 if tokens == 1 else 64)
    error = _linear(_x(tokens, 384, dtype=dtype), w, tile, _x(64, dtype=dtype, seed=2))
    assert error < TOLERANCE[dtype]


@interpreted
def test_columns_in_the_order_of_older_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "NEIGHBOURS", tl.constexpr(True))
    w = lattice_weight(40, 384, "e8p-3", rank=20)
    for dtype in (torch.float32, torch.bfloat16):
        assert _linear(_x(3, 384, dtype=dtype), w, replace(TILE, chunks=4)) < TOLERANCE[dtype]


@interpreted
def test_split_k_and_several_chunks() -> None:
    w, x = lattice_weight(40, 512), _x(2, 512)
    assert _linear(x, w, replace(TILE, splits=2)) < TOLERANCE[torch.float32]
    assert (
        _linear(x[:, :384].contiguous(), lattice_weight(40, 384), replace(TILE, chunks=4))
        < TOLERANCE[torch.float32]
    )


@interpreted
def test_a_compensator_is_added_in_plain_coordinates() -> None:
    w, x = lattice_weight(96, 128, rank=20), _x(2, 128)
    assert _linear(x, w) < TOLERANCE[torch.float32]
    without = reference.linear(x, replace(w, lra=None, lrb=None))
    assert relative_error(without, reference.linear(x, w)) > 1e-3


@interpreted
@pytest.mark.parametrize("few", [64, 1])
def test_large_cores_are_cut(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """L = 76 and 152 take several blocks both ways: the sums and the rows of the result, for few slots and for many."""
    monkeypatch.setattr(triton_rotated, "FEW_SLOTS", few)
    assert _linear(_x(2, 608), lattice_weight(152, 608)) < TOLERANCE[torch.float32]


def make(count: int, name: str = "e8p-2", rank: int = 0, gated: bool = True) -> Weights:
    def one(n: int, k: int, seed: int) -> PackedWeight:
        return lattice_weight(n, k, name, rank=rank, seed=seed)

    return [
        (one(I, H, 3 * e) if gated else None, one(I, H, 3 * e + 1), one(H, I, 3 * e + 2))
        for e in range(count)
    ]


def compare(
    weights: Weights, index: list[list[int]], *, activation: str = "silu", biases: bool = False
) -> float:
    generator = torch.Generator().manual_seed(0)
    at = torch.tensor(index)
    x, share = torch.randn(len(index), H, generator=generator), torch.rand(at.shape, generator=generator)
    width = I if weights[0][0] is None else 2 * I
    gate_up = torch.randn(len(weights), width, generator=generator) if biases else None
    down = torch.randn(len(weights), H, generator=generator) if biases else None
    expected = reference.experts(x, at, share, stored_layer(weights, activation, gate_up, down))
    down_tile = replace(TILE, splits=2)
    with forcing({"gate_up": TILE, "down": down_tile, "lattice": TILE, "rank": replace(TILE, block_n=16)}):
        y = ops.experts(x, at, share, gpu_layer(weights, activation, gate_up, down))
    return relative_error(y, expected)


ROUTINGS = {
    "one token": [[2, 0]],
    "empty experts": [[3, 0], [0, 3], [3, 0]],
    "no expert for some": [[4, 1], [4, 4], [0, 9], [-1, 2]],
}


@interpreted
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing: str) -> None:
    assert compare(make(4), ROUTINGS[routing]) < TOLERANCE[torch.float32]


@interpreted
@pytest.mark.parametrize(
    ("activation", "gated"), [("silu", True), ("relu", False), ("leaky_relu", True), ("leaky_relu", False)]
)
def test_activations_and_biases(activation: str, gated: bool) -> None:
    error = compare(make(2, gated=gated), [[0, 1], [1, 0]], activation=activation, biases=True)
    assert error < TOLERANCE[torch.float32]


@interpreted
def test_experts_with_compensators() -> None:
    """Ranks enough that an affine down projection would be split, which one in rotated coordinates is not."""
    assert compare(make(2, "e8p-3", rank=40), [[0, 1], [1, 0]]) < TOLERANCE[torch.float32]


@interpreted
def test_lattice_and_affine_formats_in_one_layer() -> None:
    """Classes of experts; in one of them gate, up and down each have a format of their own."""
    plain = (
        packed_weight(I, H, "int3-g32"),
        packed_weight(I, H, "int3-g32"),
        packed_weight(H, I, "int3-g32"),
    )
    mixed = (lattice_weight(I, H, "e8p-4", tuned=True), packed_weight(I, H, "int4-g32", rank=2), plain[2])
    third = (plain[0], plain[1], lattice_weight(H, I, "e8p-3", rank=2))
    weights = [*make(1), plain, mixed, third]
    assert compare(weights, [[0, 1], [2, 3], [3, 0]]) < TOLERANCE[torch.float32]
    assert compare(weights, [[0, 1], [2, 3]], activation="leaky_relu") < TOLERANCE[torch.float32]


@interpreted
def test_a_lost_sign_is_noticed() -> None:
    w, x = lattice_weight(64, 128), _x(1, 128)
    pack = ops.repack([[w]])
    pack.slab[int(pack.table[0, 0, PackColumn.SIGNS_IN])] ^= 1 << 5
    with forcing({"linear": TILE, "lattice": TILE}):
        y = ops.linear_gpu(x, pack)
    assert relative_error(y, reference.linear(x, w)) > 1e-2
