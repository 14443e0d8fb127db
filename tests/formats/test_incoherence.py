import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracle_lattice import HADAMARD, matrix, paley
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats.incoherence import (
    GOETHALS_SEIDEL,
    Spin,
    draw_signs,
    factors,
    fitting_transform,
    hadamard,
    hadamard_matrix,
    read_signs,
    signs_bytes,
    store_signs,
)

MODELS = {
    "Mixtral": (4096, 14336, 1024),
    "DeepSeek-MoE": (2048, 1408, 2816, 10944),
    "DeepSeek-V2 and V3": (5120, 1536, 12288, 7168, 18432, 24576, 576, 512, 16384, 32768, 6144),
    "Qwen-MoE": (2048, 768, 1408, 5632, 2560, 4096, 1536, 3584, 18944, 25600, 9728),
    "OLMoE": (2048, 1024),
    "gpt-oss": (2880, 512, 4096),
    "Llama": (4096, 11008, 13824, 14336, 28672, 5120, 8192, 16384),
    "others": (6400, 10752, 17408, 8960, 4864, 896, 14848, 2944, 5888, 4992),
}
DIMENSIONS = sorted({n for sizes in MODELS.values() for n in sizes})
ORDERS = (
    12,
    20,
    24,
    28,
    36,
    44,
    52,
    60,
    68,
    76,
    84,
    92,
    100,
    108,
    116,
    124,
    140,
    156,
    164,
    172,
    180,
    244,
    252,
    684,
)
"""All constructions: Paley I and II, over GF(p), GF(9), 25, 27, 49, 81, 121, 125, and the four arrays."""


def test_every_dimension_of_real_models_has_a_hadamard_matrix() -> None:
    assert [n for n in DIMENSIONS if factors(n) is None] == []
    assert all(math.prod(factors(n) or ()) == n for n in DIMENSIONS)


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_matrices_are_orthogonal(order: int) -> None:
    h = hadamard_matrix(order).double()
    assert set(h.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64))


def test_every_core_of_every_dimension_is_orthogonal() -> None:
    for order in {f for n in DIMENSIONS for f in factors(n) or ()}:
        h = hadamard_matrix(order).double()
        assert torch.equal(h @ h.T, order * torch.eye(order, dtype=torch.float64)), order


@pytest.mark.parametrize("field", [(11, 1), (3, 3), (7, 2), (5, 2), (17, 1)])
def test_paley_matrices_are_those_of_the_specification(field: tuple[int, int]) -> None:
    expected = paley(*field)
    assert np.array_equal(hadamard_matrix(len(expected)).numpy(), expected)


def test_arrays_are_needed() -> None:
    """Orders that neither of Paley's constructions gives."""
    assert sorted(GOETHALS_SEIDEL) == [92, 116, 156, 172]
    broken = hadamard_matrix(92).clone().double()
    broken[3, 5] *= -1
    assert not torch.equal(broken @ broken.T, 92 * torch.eye(92, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2, 4, 24, 36, 48, 144, 1408])
def test_fast_transform_is_the_kronecker_product(n: int) -> None:
    dense = torch.ones(1, 1, dtype=torch.float64)
    for order in factors(n) or ():
        dense = torch.kron(dense, hadamard_matrix(order).double())
    x = torch.randn(3, n, dtype=torch.float64).float()
    expected = x.double() @ dense.T / n**0.5
    assert (hadamard(x) - expected).abs().max() < 1e-5
    assert (hadamard(hadamard(x), transpose=True) - x).abs().max() < 1e-5


@pytest.mark.parametrize("n", [n for n in DIMENSIONS if n <= 14336])
def test_transform_is_orthogonal_at_full_size(n: int) -> None:
    x = torch.randn(2, n)
    y = hadamard(x)
    assert (hadamard(y, transpose=True) - x).abs().max() < 1e-5
    assert torch.allclose(y @ y.T, x @ x.T, rtol=1e-4, atol=1e-2)
    spike = torch.zeros(1, n)
    spike[0, n // 3] = 1
    assert torch.allclose(hadamard(spike).abs(), torch.full((1, n), n**-0.5), rtol=1e-4)


@pytest.mark.parametrize("n", [3, 6, 7, 10, 1002, 13696, 188])
def test_dimensions_without_a_hadamard_matrix(n: int) -> None:
    assert factors(n) is None
    assert fitting_transform("hadamard", n, 64) == fitting_transform("hadamard", 64, n) == "fourier"
    with pytest.raises(ShapeError, match=f"order {n}"):
        hadamard(torch.zeros(n))
    with pytest.raises(ShapeError, match=f"order {n}"):
        hadamard_matrix(n)


def test_where_there_is_one_the_wish_is_kept() -> None:
    assert fitting_transform("hadamard", 1, 64) == "hadamard"
    assert fitting_transform("fourier", 64, 64) == "fourier"


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize(
    ("transform", "n"), [*(("hadamard", n) for n in HADAMARD), *(("fourier", n) for n in (1, 2, 7, 8, 30))]
)
def test_transforms_are_those_of_the_specification(transform: str, n: int, tuned: bool) -> None:
    stored = store_signs(torch.randn(n)) if tuned else draw_signs(transform, n, n)
    assert stored.numel() == signs_bytes(transform, n, tuned=tuned)
    spin = read_signs(stored, transform, n)
    expected = torch.from_numpy(matrix(transform, n, stored.numpy())).float()
    assert torch.allclose(spin.forward(torch.eye(n)).T, expected, atol=1e-6)
    assert torch.allclose(spin.adjoint(torch.eye(n)), expected, atol=1e-6)
    if not tuned:
        assert torch.allclose(expected @ expected.T, torch.eye(n), atol=1e-6)


def test_tuned_signs_need_no_alignment() -> None:
    stored = store_signs(torch.randn(8))
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), stored))[1:]
    assert shifted.data_ptr() % 2
    assert torch.equal(read_signs(shifted, "hadamard", 8).s, read_signs(stored, "hadamard", 8).s)


def test_signs_are_drawn_from_the_seed_alone() -> None:
    assert torch.equal(draw_signs("hadamard", 100, 5), draw_signs("hadamard", 100, 5))
    assert not torch.equal(draw_signs("hadamard", 100, 5), draw_signs("hadamard", 100, 6))
    assert draw_signs("hadamard", 100, 5)[-1] < 16  # bits past the end are zero
    signs = read_signs(draw_signs("hadamard", 4096, 1), "hadamard", 4096).s
    assert abs(float(signs.mean())) < 0.06


@pytest.mark.parametrize(
    ("transform", "n", "size"), [("hadamard", 16, 3), ("fourier", 16, 2), ("fourier", 7, 7)]
)
def test_bytes_that_are_no_signs_are_refused(transform: str, n: int, size: int) -> None:
    with pytest.raises(ShapeError, match=f"{size} bytes of signs"):
        read_signs(torch.zeros(size, dtype=torch.uint8), transform, n)


def coherent(kind: str, m: int, n: int) -> Tensor:
    """Matrices with all their weight in few places, or in one pattern."""
    w = torch.zeros(m, n)
    if kind == "spike":
        w[m // 2, n // 3] = 5
    elif kind == "column":
        w[:, n // 3] = torch.randn(m)
    elif kind == "constant":
        w += 1
    elif kind == "checkers":
        w += torch.tensor([1.0, -1.0]).repeat(n // 2)
    return w


def largest(w: Tensor) -> float:
    """mu of a matrix (Definition 2.1)."""
    return float(w.abs().max() * math.sqrt(w.numel()) / w.norm())


@given(
    st.sampled_from(("spike", "column", "constant", "checkers")),
    st.sampled_from(("hadamard", "fourier")),
    st.sampled_from(((64, 96), (12, 128), (160, 8))),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_any_matrix_becomes_incoherent(kind: str, transform: str, shape: tuple[int, int], seed: int) -> None:
    """Lemma 3.1 and A.4: mu_W = 2 log(4 m n / delta) with probability 1 - delta, here a billionth."""
    m, n = shape
    w = coherent(kind, m, n)
    t_in = read_signs(draw_signs(transform, n, seed), transform, n)
    t_out = read_signs(draw_signs(transform, m, seed + 1), transform, m)
    rotated = t_out.forward(t_in.forward(w).T).T
    assert torch.allclose(rotated.norm(), w.norm(), rtol=1e-5)
    assert largest(rotated) <= 2 * math.log(4 * m * n / 1e-9)
    # Without the random signs some matrix of the kind stays as bad as it can be.
    if kind == "constant" and transform == "hadamard" and factors(n) == (8, 16):
        plain = Spin(transform=transform, s=torch.ones(n))
        assert largest(plain.forward(w)) > 0.99 * math.sqrt(n)


@pytest.mark.parametrize("transform", ["hadamard", "fourier"])
def test_hessians_become_incoherent(transform: str) -> None:
    """Lemma 3.1 and A.3: mu_H = sqrt(2 log(2 n^2 / delta)), for eigenvectors that are single inputs."""
    n = 192
    hessian = torch.diag(torch.linspace(1, 50, n))
    bound = math.sqrt(2 * math.log(2 * n * n / 1e-9))
    for seed in range(5):
        spin = read_signs(draw_signs(transform, n, seed), transform, n)
        rotated = spin.forward(spin.forward(hessian).T)
        vectors = torch.linalg.eigh(rotated.double()).eigenvectors
        assert float(vectors.abs().max()) * math.sqrt(n) <= bound
        assert float(torch.linalg.eigh(hessian.double()).eigenvectors.abs().max()) * math.sqrt(n) > bound
