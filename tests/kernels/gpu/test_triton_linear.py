"""The GPU kernels of `linear`, interpreted on the CPU, against the reference. Awkward shapes first."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.packing import packed_weight, relative_error

pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl
from support import triton_interpreter

from trilobite.errors import DeviceError, ShapeError
from trilobite.formats.weight import PackedWeight
from trilobite.kernels import ops, reference
from trilobite.kernels.gpu.device import decode as triton_decode
from trilobite.kernels.gpu.launch import check_together, scratch
from trilobite.kernels.gpu.tuning import Tile, forcing
from trilobite.kernels.layer import spec_of

pytestmark = pytest.mark.skipif(
    not triton_interpreter.available(), reason="Triton was imported without TRITON_INTERPRET"
)
triton_interpreter.install()

# fp32: sums in another order. fp16: one rounding of the result. bf16: the interpreter rounds towards zero.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 6e-3}
DOT = Tile(tokens=1, form="factored", block_n=64, block_m=16, splits=1, stages=1)
FOUR = replace(DOT, chunks=4)
"""Four chunks of columns at a time: the last step of most of these matrices is only partly there."""
SCALED = replace(DOT, form="scaled", block_n=64, block_m=64)


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _linear(x: torch.Tensor, w: PackedWeight, tile: Tile, bias: torch.Tensor | None = None) -> torch.Tensor:
    with forcing({"linear": tile, "rank": replace(tile, block_n=16)}):
        return ops.linear_gpu(x, ops.repack([[w]]), bias)


def _error(x: torch.Tensor, w: PackedWeight, tile: Tile, bias: torch.Tensor | None = None) -> float:
    return relative_error(_linear(x, w, tile, bias), reference.linear(x, w, bias))


@pytest.mark.parametrize("tile", [DOT, FOUR, SCALED], ids=["factored", "four", "scaled"])
@pytest.mark.parametrize(
    ("fmt", "k", "kind"), [("int3-g32", 224, "int3"), ("int8-g64", 192, "fp16"), ("int2-g16", 160, "int3")]
)
def test_columns_in_the_order_of_older_tritons(
    fmt: str, k: int, kind: str, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton before 3.8: operands, activations and ranks change places together."""
    monkeypatch.setattr(triton_decode, "NEIGHBOURS", tl.constexpr(True))
    w = packed_weight(40, k, fmt, rank=37, kind=kind)
    for dtype in (torch.float32, torch.bfloat16):
        assert _error(_x(9, k, dtype=dtype), w, tile) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("tile", [DOT, FOUR, SCALED], ids=["factored", "four", "scaled"])
@pytest.mark.parametrize(
    ("fmt", "k"),
    [
        *((f"int{b}-g64", 192) for b in (2, 3, 4, 8)),
        ("int3-g64-sym", 320),  # an odd number of groups, two of which share a word
        ("int3-g32", 96),
        ("int2-g16", 96),
        ("int8-g16-sym", 160),
        ("int4-g32-sym", 160),
        ("int2-g128", 256),
        ("int4-g128-sym", 384),  # groups that share a word lie in different chunks
        ("int8-channel-sym", 96),
        ("int4-channel-sym", 256),
        ("int3-g64-dq", 192),
        ("int2-g16-super", 160),
        ("int3-g16-super", 352),
        ("int3-g32-super", 544),
        ("int4-g32-super", 96),
    ],
)
def test_every_format(fmt: str, k: int, tile: Tile) -> None:
    w = packed_weight(50, k, fmt)
    # dq: its scales are rounded to fp16 when they are repacked.
    assert _error(_x(1, k), w, tile) < (1e-3 if fmt.endswith("dq") else TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        (1, DOT),
        (5, DOT),
        (17, DOT),
        (9, replace(FOUR, block_m=8)),
        (70, SCALED),
    ],
    ids=["1", "5", "17", "9-four", "70"],
)
@pytest.mark.parametrize("fmt", ["int3-g64", "int8-g32-sym"])
def test_every_type_and_size(dtype: torch.dtype, tokens: int, tile: Tile, fmt: str) -> None:
    w = packed_weight(50, 192, fmt)
    assert _error(_x(tokens, 192, dtype=dtype), w, tile, _x(50, dtype=dtype, seed=2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("tile", [DOT, FOUR, SCALED], ids=["factored", "four", "scaled"])
@pytest.mark.parametrize(("rank", "kind"), [(1, "int3"), (37, "int3"), (5, "int8"), (3, "fp16")])
def test_compensators(rank: int, kind: str, tile: Tile) -> None:
    w = packed_weight(72, 96, "int3-g32", rank=rank, kind=kind)
    x = _x(2, 96)
    assert _error(x, w, tile) < TOLERANCE[torch.float32]
    plain = PackedWeight(shape=w.shape, packed=w.packed)
    assert relative_error(_linear(x, plain, tile), reference.linear(x, w)) > 1e-3  # the compensator matters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compensators_of_16_bit_activations(dtype: torch.dtype) -> None:
    w = packed_weight(144, 128, "int3-g64", rank=20)
    assert _error(_x(9, 128, dtype=dtype), w, DOT) < TOLERANCE[dtype]
    # The scaled form rounds weights, too.
    assert _error(_x(9, 128, dtype=dtype), w, replace(SCALED, block_n=128)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [2, 4])
def test_split_k_changes_nothing_but_the_order(splits: int) -> None:
    """Ranges of chunks and of ranks: with 4 splits, the last ones have ranks only or nothing at all."""
    w = packed_weight(40, 576, "int3-g64", rank=37)
    x, bias = _x(2, 576), _x(40, seed=2)
    tile = replace(DOT, splits=splits)
    assert _error(x, w, tile, bias) < TOLERANCE[torch.float32]
    assert torch.equal(_linear(x, w, tile, bias), _linear(x, w, tile, bias))


@pytest.mark.parametrize("tile", [DOT, SCALED], ids=["factored", "scaled"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_stay_with_their_token(tile: Tile, bad: float) -> None:
    w, x = packed_weight(20, 128, "int3-g64"), _x(3, 128, dtype=torch.float16)
    x[1, 5] = bad
    y = _linear(x, w, tile)
    assert not y[1].isfinite().any()
    assert relative_error(y[::2], reference.linear(x[::2], w)) < TOLERANCE[torch.float16]


def test_large_activations_do_not_drown_in_the_bias() -> None:
    """The magic number adds 2^bits to each code and takes it off again: with one sign, the two sums nearly cancel."""
    w, x = packed_weight(20, 256, "int3-g64"), _x(4, 256, dtype=torch.float16).abs() + 8
    assert _error(x, w, DOT) < TOLERANCE[torch.float16]


def test_leading_dimensions_and_no_rows_at_all() -> None:
    w = packed_weight(20, 64, "int3-g64")
    x = _x(2, 2, 64)
    assert _linear(x, w, DOT).shape == (2, 2, 20)
    assert relative_error(_linear(x.transpose(0, 1), w, DOT), reference.linear(x.transpose(0, 1), w)) < 3e-6
    assert _linear(x[:0], w, DOT).shape == (0, 2, 20)


def test_the_tables_tiles_run() -> None:
    """Whatever the shipped defaults choose."""
    w = packed_weight(20, 128, "int3-g64", rank=2)
    for tokens in (1, 2, 40):
        x = _x(tokens, 128, dtype=torch.float16)
        y = ops.linear_gpu(x, ops.repack([[w]]))
        assert relative_error(y, reference.linear(x, w)) < TOLERANCE[torch.float16]


def test_a_flipped_bit_changes_the_result() -> None:
    w, x = packed_weight(16, 128, "int3-g64"), _x(1, 128)
    pack = ops.repack([[w]])
    pack.slab[5] ^= 1 << 17
    assert relative_error(ops.linear_gpu(x, pack), reference.linear(x, w)) > 1e-3


def test_opcheck() -> None:
    w = packed_weight(20, 64, "int3-g64", rank=2)
    pack = ops.repack([[w]])
    arguments = (_x(1, 64), pack.slab, pack.table, _x(20), spec_of(pack.codings), 20)
    torch.library.opcheck(torch.ops.trilobite.linear_gpu.default, arguments)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    w = packed_weight(20, 64, "int3-g64")
    pack = ops.repack([[w]])
    with pytest.raises(ShapeError, match="float64"):
        ops.linear_gpu(_x(1, 64).double(), pack)
    with pytest.raises(ShapeError, match=r"bias is \[3\], expected \[20\]"):
        ops.linear_gpu(_x(1, 64), pack, _x(3))
    with pytest.raises(ShapeError, match="cpu and meta; move all to one device"):
        check_together("linear", _x(1), _x(1).to("meta"))
    monkeypatch.setattr("trilobite.kernels.gpu.launch.interpreting", lambda: False)
    with pytest.raises(DeviceError, match="CUDA devices only"):
        ops.linear_gpu(_x(1, 64), pack)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(DeviceError, match=r"Tesla T4 has compute capability 7.5.*8.0.*device='cpu'"):
        ops.gpu_layout([SimpleNamespace(packed=SimpleNamespace(device=torch.device("cuda")), lattice=None)])  # type: ignore[list-item]


def test_out_of_memory_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    x = _x(1, 64)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceError, match=r"1000 tokens need 4\.00 GB.*1\.00 GB.*about 125 tokens at a time"):
        scratch((1000, 10**6), torch.float32, x, 1000)
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(DeviceError, match=r"need 0\.00 GB.*free.*device='cpu'"):
        ops.repack([[packed_weight(20, 64, "int3-g64")]])
