"""Sides that are no multiple of a block."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trilobite.formats.padding import fill_up, filled_up, whole_blocks
from trilobite.recipe import parse_format


@given(st.integers(1, 200), st.integers(1, 200))
def test_sides(n: int, k: int) -> None:
    fmt = parse_format("int3-g32")
    assert filled_up((n, k), fmt, expert=False) == (n, whole_blocks(k))
    rows, columns = filled_up((n, k), fmt, expert=True)
    assert rows % 32 == 0
    assert columns % 32 == 0
    assert 0 <= rows - n < 32
    assert 0 <= columns - k < 32
    x = torch.ones(2, n, k)
    y = fill_up(x, rows, columns)
    assert y.shape == (2, rows, columns)
    assert torch.equal(y[:, :n, :k], x)
    assert float(y.sum()) == x.numel()


def test_lattice_formats_take_any_length() -> None:
    assert filled_up((88, 72), parse_format("e8p-2"), expert=True) == (88, 72)


def test_what_fits_is_not_copied() -> None:
    x = torch.ones(2, 64)
    assert fill_up(x, 64) is x
