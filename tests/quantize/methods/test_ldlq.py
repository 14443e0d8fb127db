import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trilobite.checkpoint.roles import Matrix, View
from trilobite.errors import CalibrationError, RecipeError, ShapeError, WeightError
from trilobite.formats import lattice
from trilobite.formats.weight import check, dequantize
from trilobite.quantize.methods import ldlq
from trilobite.quantize.methods.bands import relative_error
from trilobite.quantize.methods.hessian import weighted_error
from trilobite.quantize.methods.ldlq import block_ldl, block_ldlq, quantize_lattice, retouch
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS, quantize
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.run.lines import quantize_line
from trilobite.recipe import PRESETS, LatticeFormat, Role

E8P = LatticeFormat(codebook="e8p", bits=2)
FORMATS = [
    LatticeFormat.parse(f"{c}-{b}") for c, all_bits in (("e8p", "1234"), ("grid", "234")) for b in all_bits
]


def _loss(w: torch.Tensor, w_hat: torch.Tensor, h: torch.Tensor) -> float:
    return weighted_error(w.float() - w_hat, h)


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def hessian(k: int, seed: int = 1) -> Tensor:
    """Of inputs that are correlated, as those of a language model are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(k, k, generator=generator))[0]
    x = torch.randn(4 * k, k, generator=generator) * torch.linspace(0.05, 3, k).square() @ mix
    return x.T @ x / len(x)


def nearest_e8p(vectors: Tensor) -> tuple[Tensor, Tensor]:
    return lattice.nearest(vectors, E8P, 1.0)


def halves(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """An endless grid: rounding errors are uniform, whatever comes in."""
    found = (vectors - 0.5).round() + 0.5
    return torch.zeros(len(vectors), dtype=torch.int64), found


@pytest.mark.parametrize("g", [1, 4, 8])
def test_block_ldl(g: int) -> None:
    h = hessian(48).double()
    lower, diagonal = block_ldl(h, g)
    assert torch.allclose(lower.T @ torch.block_diag(*diagonal) @ lower, h, atol=1e-12)
    blocks = lower.view(48 // g, g, 48 // g, g).transpose(1, 2)
    assert torch.allclose(
        torch.stack([blocks[i, i] for i in range(48 // g)]), torch.eye(g).double(), atol=1e-12
    )
    assert all(not blocks[i, j].any() for i in range(48 // g) for j in range(i + 1, 48 // g))


def test_block_ldl_takes_double_where_float_fails() -> None:
    h = torch.diag(torch.logspace(0, -9, 16)) + 1e-3 * torch.ones(16, 16)
    lower, diagonal = block_ldl(h, 4)
    product = lower.double().T @ torch.block_diag(*diagonal).double() @ lower.double()
    assert torch.allclose(product, h.double(), atol=1e-6)
    with pytest.raises(CalibrationError, match="not positive definite"):
        block_ldl(-torch.eye(16))


@pytest.mark.parametrize("columns", [8, 24, 128, 264])
def test_block_ldlq_is_the_recursion_of_the_paper(columns: int) -> None:
    """W_k -> Q(W_k + (W - W_q)_{<k} A_k), A_k the k-th block of columns of L^T - I; block by block, without batches."""
    w, h = weights(5, columns) * 50, hessian(columns)
    lower = block_ldl(h)[0]
    feedback = lower.T - torch.eye(columns)
    expected = torch.zeros_like(w)
    for k in range(0, columns, 8):
        here = w[:, k : k + 8] + (w - expected)[:, :k] @ feedback[:k, k : k + 8]
        expected[:, k : k + 8] = nearest_e8p(here)[1]
    codes, error = block_ldlq(w, lower, nearest_e8p)
    assert torch.equal(codes, codes.clamp(0, 65535))
    assert torch.allclose(w - error, expected, atol=1e-5)
    assert torch.allclose(lattice.points(codes, E8P, 1.0).view_as(w), expected, atol=1e-5)


def test_without_correlation_there_is_no_feedback() -> None:
    w = weights(7, 64) * 50
    lower, _ = block_ldl(torch.diag(torch.linspace(1, 2, 64)))
    codes, _ = block_ldlq(w, lower, nearest_e8p)
    assert torch.equal(codes.flatten(), nearest_e8p(w.view(-1, 8))[0])


def test_loss_is_that_of_the_rounding_errors() -> None:
    """Theorem 4.1's proof: tr(E H E^T) = tr(eta D eta^T) with eta = E L^T, the errors of Q itself."""
    h, w = hessian(64).double(), weights(40, 64).double() * 100
    lower, diagonal = block_ldl(h)
    _, error = block_ldlq(w, lower, halves)
    eta = error @ lower.T
    assert bool((eta.abs() <= 0.5 + 1e-9).all())
    loss = ((error @ h) * error).sum()
    assert torch.allclose(loss, ((eta @ torch.block_diag(*diagonal)) * eta).sum())


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_theorem_4_1_holds(seed: int) -> None:
    """g m mu^2 sigma^2 / n tr(H^1/2)^2, mu measured; and it is below what rounding without feedback may cost."""
    m, n, g = 200, 96, 8
    h, w = hessian(n, seed).double(), weights(m, n, seed).double() * 100
    lower, _ = block_ldl(h)
    _, error = block_ldlq(w, lower, halves)
    values, vectors = torch.linalg.eigh(h)
    mu = float(vectors.abs().max()) * math.sqrt(n)
    root = float(values.sqrt().sum())
    loss = float(((error @ h) * error).sum())
    assert loss <= g * m * mu**2 / 12 / n * root**2
    plain = w - halves(w.view(-1, 8))[1].view_as(w)
    assert loss < 0.7 * float(((plain @ h) * plain).sum())


@pytest.mark.parametrize("lazy", [8, 40, 128])
def test_retouching_never_costs(lazy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ldlq, "LAZY", lazy)
    h, w = hessian(96), weights(30, 96) * 50
    codes, error = block_ldlq(w, block_ldl(h)[0], nearest_e8p)
    losses = [((error @ h) * error).sum(-1)]
    for _ in range(3):
        retouch(error, codes, w, h, nearest_e8p)
        losses.append(((error @ h) * error).sum(-1))
        assert bool((losses[-1] <= losses[-2] * (1 + 1e-5)).all())
        assert torch.allclose(w - error, lattice.points(codes, E8P, 1.0).view_as(w), atol=1e-4)
    assert float(losses[-1].sum()) < 0.97 * float(losses[0].sum())


@pytest.mark.parametrize(("constant", "worse", "bits"), [("PASSES", 0, 2), ("SIGMA", 0.3, 4)])
def test_constants_pay(constant: str, worse: float, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is looked at once more, and the Hessian is damped by 1 % of its diagonal, not more."""
    w, h, fmt = weights(64, 128), hessian(128), LatticeFormat(codebook="e8p", bits=bits)
    loss = METHODS["ldlq"](w, fmt, hessian=h).proxy
    monkeypatch.setattr(ldlq, constant, worse)
    other = METHODS["ldlq"](w, fmt, hessian=h).proxy
    assert loss is not None
    assert other is not None
    assert loss < 0.95 * other


def test_feedback_takes_a_larger_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of earlier columns widen what is rounded: the scale of a Gaussian source is too small for it (F.5)."""
    w, h = weights(64, 128), hessian(128)
    monkeypatch.setattr(ldlq, "PASSES", 0)  # the second look would even out some of it
    found = METHODS["ldlq"](w, E8P, hessian=h)
    monkeypatch.setattr(ldlq, "FEEDBACK_FACTORS", (1.0,))
    plain = METHODS["ldlq"](w, E8P, hessian=h)
    scales = [
        lattice.read_record(q.weight.lattice).scale for q in (found, plain) if q.weight.lattice is not None
    ]
    assert scales[0] > scales[1]
    assert found.proxy is not None
    assert plain.proxy is not None
    assert found.proxy < 0.97 * plain.proxy


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_is_stored_has_the_error_that_is_said(fmt: LatticeFormat) -> None:
    w, h = weights(40, 96), hessian(96)
    for method in ("rtn", "search", "ldlq"):
        found = quantize_lattice(w, fmt, method=method, hessian=h, seed=1, input_seed=2)
        check(found.weight)
        assert found.weight.format == fmt
        assert found.error == pytest.approx(relative_error(w, found.weight), rel=1e-4)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("transform", ["hadamard", "fourier"])
def test_feedback_lowers_the_loss_and_search_the_error(fmt: LatticeFormat, transform: str) -> None:
    fmt = replace(fmt, transform=transform)
    w, h = weights(96, 160), hessian(160)
    found = {m: quantize_lattice(w, fmt, method=m, hessian=h, seed=1) for m in ("rtn", "search", "ldlq")}
    losses = {m: _loss(w, dequantize(q.weight), h) for m, q in found.items()}
    assert losses["ldlq"] < 0.7 * losses["search"]
    assert found["search"].error <= found["rtn"].error * 1.002
    assert found["search"].error < found["ldlq"].error


def test_lattice_codes_are_better_than_a_grid_of_the_same_bits() -> None:
    """Without a Hessian and with one: what QuIP# calls no E8 is worse."""
    w, h = weights(256, 256), hessian(256)
    for bits in (2, 3, 4):
        e8p, grid = (LatticeFormat(codebook=c, bits=bits) for c in ("e8p", "grid"))
        assert METHODS["search"](w, e8p).error < 0.91 * METHODS["search"](w, grid).error
        losses = [
            _loss(w, dequantize(quantize_lattice(w, f, method="ldlq", hessian=h).weight), h)
            for f in (e8p, grid)
        ]
        assert losses[0] < 0.9 * losses[1]


def test_rows_may_be_cut_into_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = weights(56, 64), hessian(64)
    before = [quantize_lattice(w, E8P, method=m, hessian=h).weight for m in ("search", "ldlq")]
    monkeypatch.setattr(ldlq, "BAND", 64 * 16)
    after = [quantize_lattice(w, E8P, method=m, hessian=h).weight for m in ("search", "ldlq")]
    assert torch.equal(before[0].packed, after[0].packed)
    assert _loss(dequantize(before[1]), dequantize(after[1]), h) < 1e-4 * _loss(w, 0 * w, h)


def test_matrices_with_one_input_share_its_transform() -> None:
    q, k = (
        quantize_lattice(weights(n, 64, n), E8P, method="rtn", seed=n, input_seed=9).weight for n in (48, 16)
    )
    other = quantize_lattice(weights(48, 64), E8P, method="rtn", seed=48, input_seed=10).weight
    assert q.signs_in is not None
    assert k.signs_in is not None
    assert torch.equal(q.signs_in, k.signs_in)
    assert not torch.equal(q.signs_in, other.signs_in)
    assert torch.equal(q.signs_out, other.signs_out)


@pytest.mark.parametrize(
    ("n", "k", "transform"),
    [(1, 8, "hadamard"), (17, 8, "fourier"), (6, 24, "fourier"), (44, 56, "hadamard")],
)
@pytest.mark.parametrize("method", ["rtn", "search", "ldlq"])
def test_awkward_shapes(n: int, k: int, transform: str, method: str) -> None:
    w = weights(n, k)
    found = quantize_lattice(w, replace(E8P, transform=transform), method=method, hessian=hessian(k))
    check(found.weight)
    assert found.error < 0.8


@pytest.mark.parametrize("method", ["rtn", "search", "ldlq"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_zero_matrix_stays_zero(fmt: LatticeFormat, method: str) -> None:
    found = quantize_lattice(torch.zeros(20, 24), fmt, method=method, hessian=hessian(24))
    check(found.weight)
    assert found.error == 0
    assert not dequantize(found.weight).any()


@pytest.mark.parametrize("factor", [1e-30, 1e-10, 1e10])
def test_scale_does_not_matter(factor: float) -> None:
    w, h = weights(40, 32), hessian(32)
    for method in ("search", "ldlq"):
        plain = quantize_lattice(w, E8P, method=method, hessian=h)
        scaled = quantize_lattice(w * factor, E8P, method=method, hessian=h * factor)
        assert scaled.error == pytest.approx(plain.error, rel=2e-2)


def test_inputs_that_were_never_seen_count_alike() -> None:
    """A Hessian of zeros is no information: as good as H = I."""
    w = weights(64, 64)
    unseen = quantize_lattice(w, E8P, method="ldlq", hessian=torch.zeros(64, 64))
    assert unseen.error < 1.1 * quantize_lattice(w, E8P, method="search").error
    singular = torch.zeros(64, 64)
    singular[3, 3] = 1e-6
    check(quantize_lattice(w, E8P, method="ldlq", hessian=singular).weight)
    check(unseen.weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_weights_that_cannot_be_quantized(bad: float) -> None:
    w = weights(16, 16)
    w[3, 5] = bad
    with pytest.raises(WeightError):
        quantize_lattice(w, E8P, method="search")


def test_hessians_that_cannot_be_used() -> None:
    w, h = weights(16, 16), hessian(16)
    with pytest.raises(RecipeError, match="--calibration"):
        quantize_lattice(w, E8P, method="ldlq")
    with pytest.raises(ShapeError, match=r"Hessian is \[24, 24\]"):
        quantize_lattice(w, E8P, method="ldlq", hessian=hessian(24))
    h[2, 3] = float("nan")
    with pytest.raises(CalibrationError, match="Hessian"):
        quantize_lattice(w, E8P, method="ldlq", hessian=h)


def test_columns_come_in_eights() -> None:
    with pytest.raises(ShapeError, match="multiple of 8"):
        quantize(weights(16, 20), E8P, "search")


def test_compensators_work_with_lattices() -> None:
    """A matrix with a strong low-rank part: MiLo takes it out, in plain coordinates."""
    low = weights(96, 4, 3) @ weights(4, 128, 4) * 400
    w, h = weights(96, 128) + low, hessian(128)
    plain = METHODS["search"](w, E8P).error
    result = METHODS["search"](w, E8P, compensation=Compensation(rank=4, iterations=3, input_seed=5))
    check(result.weight)
    assert result.error < 0.7 * plain
    assert result.error == pytest.approx(relative_error(w, result.weight), rel=1e-4)
    calibrated = METHODS["ldlq"](
        w, E8P, hessian=h, compensation=Compensation(rank=4, iterations=3, input_seed=5)
    )
    assert calibrated.weight.rank == 4
    losses = [_loss(w, dequantize(r.weight), h) for r in (calibrated, result)]
    assert losses[0] < 0.8 * losses[1]


def test_outliers_do_not_hurt() -> None:
    """What incoherence is for: single huge weights cost the grid nothing, and min-max rounding everything."""
    w = weights(128, 128)
    places = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    w[places[:8], places[-8:]] = 1.0
    assert METHODS["search"](w, E8P).error < 0.32


def test_the_report_of_a_calibrated_matrix() -> None:
    """error and proxy, as `trilobite.json` will have them; the seeds come from the names."""
    w, h = weights(64, 96), hessian(96)
    matrix = Matrix(
        name="model.layers.0.mlp.experts.3.up_proj.weight",
        role=Role.EXPERT,
        layer=0,
        expert=3,
        projection="up",
        shape=(64, 96),
        source="",
        view=View(),
    )
    line = PlanLine(matrix=matrix, format=E8P, method="ldlq", stored=())
    packed, record = quantize_line(w, line, PRESETS["quip2"], h)
    restored = dequantize(packed)
    assert record["error"] == pytest.approx(relative_error(w, packed), rel=1e-4)
    assert record["proxy"] == pytest.approx(_loss(w, restored, h) / _loss(w, 0 * w, h), rel=1e-4)
    assert record["proxy"] < record["error"] ** 2
    other = replace(matrix, name=matrix.name.replace("3.up", "5.gate"), expert=5)
    again, _ = quantize_line(w, replace(line, matrix=other), PRESETS["quip2"], h)
    assert packed.signs_in is not None
    assert again.signs_in is not None
    assert torch.equal(packed.signs_in, again.signs_in)
    with pytest.raises(RecipeError, match="--calibration"):
        quantize_line(w, line, PRESETS["quip2"])
