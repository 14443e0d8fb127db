"""The native search for nearest lattice points against the reference in PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import tiers
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats import lattice as reference
from trilobite.kernels.cpu import lattice
from trilobite.recipe import LatticeFormat

pytestmark = pytest.mark.skipif(not tiers(), reason="no native library")
CPU = torch.device("cpu")
FAR = 1e6
"""Where distances are equal up to rounding."""
FORMATS = [LatticeFormat(codebook="e8p", bits=bits) for bits in (1, 2, 3, 4)]


def gauss(m: int, scale: float) -> Tensor:
    return torch.randn(m, 8, generator=torch.Generator().manual_seed(m)) * scale


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 0.6, 1.0, 1.3, 4.0, FAR])
def test_codes_are_those_of_the_reference(fmt: LatticeFormat, scale: float) -> None:
    x = gauss(3001, scale)
    expected, points = reference.nearest(x, fmt, 2.5)
    codes, found = lattice.nearest(x, fmt, 2.5)
    same = codes == expected
    # Where two points are equally near up to rounding, which adds up in another order on another machine.
    assert int((~same).sum()) <= 2 or scale == FAR
    assert torch.allclose(found[same], points[same], rtol=0, atol=1e-6)
    assert torch.allclose((x - found).norm(dim=-1), (x - points).norm(dim=-1), rtol=1e-6)


@given(
    st.lists(
        st.sampled_from([-2.75, -1.5, -0.75, -0.25, 0.0, 0.25, 0.5, 1.25, 2.0, 40.0]), min_size=8, max_size=8
    )
)
@settings(max_examples=80, deadline=None)
def test_points_at_ties_and_far_away_are_as_near(lanes: list[float]) -> None:
    x = torch.tensor([lanes])
    for fmt in FORMATS[:2]:
        near, far = (search.nearest(x, fmt, 1.0)[1] for search in (lattice, reference))
        assert torch.allclose((x - near).norm(), (x - far).norm(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_stand_for_the_points(fmt: LatticeFormat) -> None:
    codes, points = lattice.nearest(gauss(500, 1.1), fmt, 3.0)
    assert torch.allclose(reference.points(codes, fmt, 3.0), points, rtol=0, atol=1e-6)


def test_points_of_the_codebooks_are_their_own_nearest() -> None:
    large, small = reference.e8p_points(CPU), reference.e8_points(CPU)
    assert torch.equal(lattice.nearest(large, FORMATS[1], 1.0)[0], torch.arange(1 << 16))
    assert torch.equal(lattice.nearest(small, FORMATS[0], 1.0)[0], torch.arange(256))


def test_strided_vectors_and_none() -> None:
    x = gauss(40, 1.0)
    codes, _ = lattice.nearest(x.T.contiguous().T, FORMATS[1], 1.0)
    assert torch.equal(codes, reference.nearest_e8p(x))
    assert len(lattice.nearest(x[:0], FORMATS[1], 1.0)[0]) == 0


def test_damaged_vectors_get_some_point() -> None:
    """Weights are checked before; a search must not read outside of its tables."""
    x = gauss(64, 1.0)
    x[::3, 2], x[1::3, 5], x[0] = torch.nan, torch.inf, torch.nan
    for fmt in FORMATS:
        assert bool(lattice.nearest(x, fmt, 2.0)[1].isfinite().all()) or fmt.bits > 2


def test_a_ratio_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ShapeError, match="nearest points"):
        lattice.nearest(gauss(1, 1.0), FORMATS[2], 0.0)


def test_only_codebooks_that_need_a_search() -> None:
    assert lattice.supports(gauss(1, 1.0), FORMATS[0])
    assert not lattice.supports(gauss(1, 1.0), LatticeFormat(codebook="grid", bits=3))
