import pytest
import torch
from torch import Tensor

from trilobite.formats.weight import decode_factor
from trilobite.quantize.methods import lowrank
from trilobite.quantize.methods.bands import bands
from trilobite.quantize.methods.compensator import quantize_factor, quantize_factors
from trilobite.quantize.methods.lowrank import followed_svd, truncated_svd


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def decaying() -> Tensor:
    """1500 x 1200: singular values 1/sqrt(i), as residuals of trained matrices have, over noise."""
    u = torch.linalg.qr(normal(1500, 200, seed=1)).Q
    v = torch.linalg.qr(normal(1200, 200, seed=2)).Q
    return (u * torch.arange(1, 201).pow(-0.5)) @ v.T + normal(1500, 1200, seed=3) * 1e-3


@pytest.fixture(scope="module")
def optimal(decaying: Tensor) -> Tensor:
    """Its squared singular values, largest first."""
    return torch.linalg.eigvalsh((decaying.T @ decaying).double()).flip(0)


@pytest.mark.parametrize(("n", "k"), [(1, 32), (32, 1), (40, 70), (70, 40), (64, 64)])
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_small_matrices_are_exact(n: int, k: int, rank: int) -> None:
    e = normal(n, k)
    u, v, energy = truncated_svd(e, rank, seed=0)
    left, sigma, right = torch.linalg.svd(e.double(), full_matrices=False)
    r = min(rank, n, k)
    best = (left[:, :r] * sigma[:r]) @ right[:r]
    assert u.shape == (n, r)
    assert v.shape == (r, k)
    assert torch.allclose((u @ v).double(), best, atol=1e-5)
    assert energy == pytest.approx(float(sigma[:r].square().sum()), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_square_root_of_sigma_is_on_both_sides(seed: int) -> None:
    e = normal(50, 30, seed=seed)
    u, v, _ = truncated_svd(e, 4, seed=0)
    sigma = torch.linalg.svdvals(e)[:4]
    assert torch.allclose(u.T @ u, torch.diag(sigma), atol=1e-4)
    assert torch.allclose(v @ v.T, torch.diag(sigma), atol=1e-4)


def test_energy_identity(decaying: Tensor) -> None:
    """|E - U V|^2 = |E|^2 - energy: MiLo measures eq. 14 by it."""
    for e in (normal(60, 90), decaying):
        u, v, energy = truncated_svd(e, 8, seed=0)
        residual = float((e - u @ v).double().square().sum())
        assert residual == pytest.approx(float(e.double().square().sum()) - energy, rel=1e-5)


@pytest.mark.parametrize("rank", [4, 32])
def test_randomised_is_within_a_percent_of_optimal(decaying: Tensor, optimal: Tensor, rank: int) -> None:
    assert min(decaying.shape) > lowrank.EXACT
    best = float(optimal[:rank].sum())
    _, _, energy = truncated_svd(decaying, rank, seed=0)
    assert 0.99 * best <= energy <= best * (1 + 1e-5)


def test_without_power_iterations_it_would_be_worse(
    decaying: Tensor, optimal: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure above measures something."""
    monkeypatch.setattr(lowrank, "POWER_ITERATIONS", 0)
    monkeypatch.setattr(lowrank, "OVERSAMPLE", 0)
    assert truncated_svd(decaying, 32, seed=0)[2] < 0.99 * float(optimal[:32].sum())


def test_same_seed_same_result(decaying: Tensor) -> None:
    first, again, other = (truncated_svd(decaying, 8, seed=s) for s in (5, 5, 6))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_signs_are_fixed() -> None:
    e = normal(40, 60)
    u, _, _ = truncated_svd(e, 5, seed=0)
    largest = u.gather(0, u.abs().argmax(0, keepdim=True))
    assert (largest > 0).all()


def test_a_moving_matrix_is_followed(decaying: Tensor, optimal: Tensor) -> None:
    moved = decaying + normal(1500, 1200, seed=9) * 2e-4
    start = truncated_svd(decaying, 16, seed=0)[1]
    parts = [(rows, moved[rows]) for rows in bands(1500, 1200)]
    u, v, energy = followed_svd(parts, (1500, 1200), start)
    assert energy >= 0.995 * float(optimal[:16].sum())
    residual = float((moved - u @ v).double().square().sum())
    assert residual == pytest.approx(float(moved.double().square().sum()) - energy, rel=1e-5)


def test_following_drops_what_depends(decaying: Tensor) -> None:
    """Of a matrix of zeros, and in a space some of whose vectors are the same or none: the energy is near."""
    start = truncated_svd(decaying, 4, seed=0)[1]
    start[1], start[2] = start[0], 0
    for e in (decaying, torch.zeros_like(decaying)):
        u, v, energy = followed_svd([(slice(0, 1500), e)], (1500, 1200), start)
        assert u.isfinite().all()
        assert v.isfinite().all()
        residual = float((e - u @ v).double().square().sum())
        assert residual == pytest.approx(float(e.double().square().sum()) - energy, rel=1e-3)


def test_following_more_ranks_than_there_are() -> None:
    """Most directions of such a product are rounding errors, whose share of the energy must not count."""
    low = normal(1500, 10) @ normal(10, 1200, seed=1)
    start = normal(256, 1200, seed=2)
    u, v, energy = followed_svd([(slice(0, 1500), low)], (1500, 1200), start)
    assert energy == pytest.approx(float(low.double().square().sum()), rel=1e-5)
    assert float((low - u @ v).norm()) < 1e-5 * float(low.norm())


@pytest.mark.parametrize("shape", [(32, 64), (1200, 1100)])
def test_zero_matrices(shape: tuple[int, int]) -> None:
    u, v, energy = truncated_svd(torch.zeros(shape), 3, seed=0)
    assert energy == 0
    assert (u @ v == 0).all()


def test_rank_zero() -> None:
    u, v, energy = truncated_svd(normal(16, 32), 0, seed=0)
    assert (u.shape, v.shape, energy) == ((16, 0), (0, 32), 0)


@pytest.mark.parametrize(("kind", "error"), [("int3", 0.25), ("int8", 0.012), ("fp16", 6e-4)])
def test_stored_factors_are_close(kind: str, error: float) -> None:
    u, v, _ = truncated_svd(normal(100, 200), 6, seed=0)
    lra, lrb = quantize_factors(u, v, kind)
    stored = decode_factor(lra, 100).T @ decode_factor(lrb, 200)
    found = float((stored - u @ v).norm() / (u @ v).norm())
    assert error / 6 < found < error


def test_u_makes_up_for_the_rounding_of_v() -> None:
    u, v, _ = truncated_svd(normal(100, 200), 6, seed=0)
    plain = (
        decode_factor(quantize_factor(u.T.contiguous(), "int3"), 100).T,
        decode_factor(quantize_factor(v, "int3"), 200),
    )
    lra, lrb = quantize_factors(u, v, "int3")
    fitted = decode_factor(lra, 100).T, decode_factor(lrb, 200)
    assert (fitted[0] @ fitted[1] - u @ v).norm() < (plain[0] @ plain[1] - u @ v).norm()


def test_a_vanished_vector_does_not_blow_up_the_fit() -> None:
    u, v = normal(64, 3), normal(3, 64)
    v[1] = 0
    u[:, 2] = 0
    for kind in ("int3", "int8"):
        lra, lrb = quantize_factors(u, v, kind)
        stored = decode_factor(lra, 64).T @ decode_factor(lrb, 64)
        assert (stored - u @ v).norm() < 0.3 * (u @ v).norm()
