import pytest
import torch
from support.packing import lattice_weight, packed_weight

from trilobite.errors import ShapeError
from trilobite.formats.slicing import (
    columns,
    columns_fit,
    covering_columns,
    covering_rows,
    even_split,
    rows,
    rows_fit,
)
from trilobite.formats.weight import PackedWeight, check, decode_factor, dequantize

FORMATS = (
    "int2-g16",
    "int3-g64",
    "int4-g128-sym",
    "int8-g32",
    "int4-channel",
    "int3-g32-dq",
    "int4-g16-sym-dq",
    "int2-g16-super",
    "int3-g32-super",
)


def same(part: PackedWeight, whole: PackedWeight, at: tuple[slice, slice]) -> bool:
    """Whether a part stands for that part of the whole: bit for bit, products of factors up to their order of sums."""
    check(part)
    if part.lra is None or part.lrb is None or whole.lra is None or whole.lrb is None:
        return torch.equal(dequantize(part), dequantize(whole)[at])
    n, k = whole.shape
    factors = [(decode_factor(w.lra, w.shape[0]), decode_factor(w.lrb, w.shape[1])) for w in (part, whole)]
    exact = torch.equal(factors[0][0], factors[1][0][:, :n][:, at[0]]) and torch.equal(
        factors[0][1], factors[1][1][:, :k][:, at[1]]
    )
    return exact and torch.allclose(dequantize(part), dequantize(whole)[at], atol=1e-6)


@pytest.mark.parametrize("kind", [None, "int3", "int8", "fp16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_parts_stand_for_parts_of_the_dequantized_matrix(fmt: str, kind: str | None) -> None:
    w = packed_weight(200, 1024, fmt, rank=5 if kind else 0, kind=kind or "int3")
    for start, stop in ((0, 64), (64, 192), (128, 200)):
        assert same(rows(w, start, stop), w, (slice(start, stop), slice(None)))
    for start, stop in ((0, 1024), (0, 512), (512, 1024)):
        if fmt == "int4-channel" and stop - start < 1024:
            assert not columns_fit(w, start, stop)
        else:
            assert same(columns(w, start, stop), w, (slice(None), slice(start, stop)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("k", [1024, 1056, 96])
def test_what_does_not_fit_is_covered_by_what_does(fmt: str, k: int) -> None:
    """1056 and 96 are no multiples of 64, which other super-scales' tiles and the last groups of factors show."""
    if k % 64 and any(g in fmt for g in ("g64", "g128")):
        pytest.skip("no matrix of this format has such columns")
    for rank in (0, 3):
        w = packed_weight(112, k, fmt, rank=rank)
        for start, stop in ((0, k), (0, k // 2), (k // 2, k), (k // 4, k // 2), (5, 6)):
            a, b = covering_columns(w, start, stop)
            assert a <= start < stop <= b
            assert same(columns(w, a, b), w, (slice(None), slice(a, b)))
        for start, stop in ((0, 112), (0, 56), (56, 112), (17, 18)):
            a, b = covering_rows(w, start, stop)
            assert a <= start < stop <= b
            assert b - a < 112 or stop - start > 48 or rank
            assert same(rows(w, a, b), w, (slice(a, b), slice(None)))


def test_covers_are_no_larger_than_they_must_be() -> None:
    plain, double = packed_weight(112, 1024, "int3-g32"), packed_weight(112, 1024, "int3-g32-dq")
    assert covering_columns(plain, 256, 288) == (256, 288)
    assert covering_columns(double, 0, 128) == (0, 128), (
        "all columns of the part share their second-level scales"
    )
    assert covering_columns(double, 128, 384) == (0, 512), "else it begins where they do"
    assert covering_columns(packed_weight(16, 512, "int3-g16-super"), 64, 320) == (0, 384)
    assert covering_rows(plain, 20, 30) == (16, 32)
    assert covering_rows(packed_weight(112, 1024, "int3-g32", rank=2), 70, 80) == (64, 112)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "int4-channel"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_splits_leave_nothing_out(fmt: str, parts: int) -> None:
    up, down = packed_weight(1536, 128, "int3-g32", rank=3), packed_weight(48, 1536, fmt, rank=2)
    ranges = even_split([up], [down], parts)
    assert ranges is not None
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == 1536
    x = torch.randn(3, 1536)
    whole = x @ dequantize(down).T
    pieces = sum(x[:, slice(*r)] @ dequantize(columns(down, *r)).T for r in ranges)
    assert torch.allclose(whole, torch.as_tensor(pieces), atol=1e-4)
    assert all(rows_fit(up, *r) for r in ranges)


def test_uneven_and_impossible_splits() -> None:
    up = packed_weight(1408, 64, "int3-g64")
    assert even_split([up], [packed_weight(32, 1408, "int3-g64")], 2) == [(0, 704), (704, 1408)]
    assert even_split([up], [packed_weight(32, 1408, "int3-g128")], 2) == [(0, 640), (640, 1408)]
    assert even_split([up], [packed_weight(32, 1408, "int4-channel")], 2) is None
    small = packed_weight(64, 64, "int3-g64")
    assert even_split([small], [small], 2) is None


def test_what_cannot_be_cut_is_refused() -> None:
    w = packed_weight(64, 256, "int3-g64")
    for start, stop in ((8, 32), (0, 24), (0, 80), (32, 32)):
        with pytest.raises(ShapeError, match="rows"):
            rows(w, start, stop)
    for start, stop in ((32, 64), (0, 96), (0, 320)):
        with pytest.raises(ShapeError, match="columns"):
            columns(w, start, stop)
    with pytest.raises(ShapeError, match="e8p-2"):
        columns(lattice_weight(64, 64), 0, 32)
