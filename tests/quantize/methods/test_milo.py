from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trilobite.checkpoint.source import open_source
from trilobite.errors import WeightError
from trilobite.formats.weight import check, decode_factor, dequantize
from trilobite.quantize.methods import milo as module
from trilobite.quantize.methods.bands import SCALES, quantize_band, relative_error
from trilobite.quantize.methods.compensator import quantize_factors
from trilobite.quantize.methods.lowrank import truncated_svd
from trilobite.quantize.methods.milo import converged
from trilobite.quantize.methods.quantized import Compensation, Quantized
from trilobite.quantize.methods.registry import METHODS, quantize
from trilobite.quantize.methods.search import Scales
from trilobite.recipe import Format

INT3 = Format(bits=3, group=64)


@pytest.fixture(scope="module")
def outliers() -> Tensor:
    """Heavy columns, as attention has them: what a compensator is for."""
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    w[:, ::37] *= 12
    return w


@pytest.fixture(scope="module")
def searched(outliers: Tensor) -> Quantized:
    return METHODS["search"](outliers, INT3, compensation=Compensation(rank=8))


def test_error_never_rises_with_search_inside(searched: Quantized) -> None:
    """Both steps of Algorithm 1 are then descents of the same error."""
    assert len(searched.errors) > 3
    for before, after in pairwise(searched.errors):
        assert after <= before + 1e-6
    assert searched.errors[-1] < 0.995 * searched.errors[0]


def test_first_error_is_quantize_then_decompose(outliers: Tensor, searched: Quantized) -> None:
    """Eq. 14 by hand, for the first iteration."""
    residual = quantize_band(outliers, INT3, "search", steps=module.DRAFT_STEPS).residual
    sigma = torch.linalg.svdvals(residual.double())
    assert searched.errors[0] == pytest.approx(float(sigma[8:].norm() / outliers.norm()), rel=1e-4)


@pytest.mark.parametrize("method", SCALES)
def test_best_iterate_is_kept(outliers: Tensor, method: str) -> None:
    found = METHODS[method](outliers, INT3, compensation=Compensation(rank=8))
    assert found.errors[found.best] == min(found.errors)
    assert found.best == found.errors.index(min(found.errors))


@pytest.mark.parametrize("method", SCALES)
@pytest.mark.parametrize(("kind", "share"), [("int8", 1.005), ("fp16", 1.005), ("int3", 1.10)])
def test_stored_error_is_close_to_the_reported_one(
    outliers: Tensor, method: str, kind: str, share: float
) -> None:
    found = METHODS[method](outliers, INT3, compensation=Compensation(rank=8, compensator=kind, iterations=6))
    check(found.weight)
    assert found.weight.rank == 8
    # Rounding of the factors adds; the refit of the codes against what was stored takes some of it back.
    limit = share if method != "rtn" else share * 1.06
    assert 0.97 * min(found.errors) < relative_error(outliers, found.weight) < limit * min(found.errors)


def test_the_best_iterate_is_what_is_stored(outliers: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every iterate after the second useless: the result must be that of two iterations."""
    two = METHODS["search"](outliers, INT3, compensation=Compensation(rank=8, iterations=2))
    original, calls = module.truncated_svd, []

    def sabotage(e: Tensor, rank: int, *, seed: int, power: int) -> tuple[Tensor, Tensor, float]:
        calls.append(1)
        u, v, energy = original(e, rank, seed=seed, power=power)
        return (u, v, energy) if len(calls) <= 2 else (u * 0, v * 0, 0.0)

    monkeypatch.setattr(module, "truncated_svd", sabotage)
    found = METHODS["search"](outliers, INT3, compensation=Compensation(rank=8))
    assert found.best == 1
    assert len(found.errors) > 2
    for suffix, tensor in two.weight.tensors().items():
        assert torch.equal(found.weight.tensors()[suffix], tensor)


def test_refit_against_the_stored_compensator_helps(outliers: Tensor) -> None:
    fitted = METHODS["search"](outliers, INT3, compensation=Compensation(rank=8, iterations=5))
    u, v, _ = truncated_svd(outliers - dequantize(quantize(outliers, INT3, "search")), 8, seed=0)
    # Without any refit: the factors rounded beside codes that were found for the factors in fp32.
    codes = dequantize(quantize(outliers - u @ v, INT3, "search"))
    lra, lrb = quantize_factors(u, v, "int3")
    without = outliers - codes - decode_factor(lra, 128).T @ decode_factor(lrb, 256)
    assert fitted.error < 0.98 * float(without.norm() / outliers.norm())


@pytest.mark.parametrize("method", SCALES)
def test_fitting_the_stored_factors_again_never_hurts(
    outliers: Tensor, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = METHODS[method](outliers, INT3, compensation=Compensation(rank=16, iterations=5)).error
    monkeypatch.setattr(module, "REFITS", 0)
    once = METHODS[method](outliers, INT3, compensation=Compensation(rank=16, iterations=5)).error
    assert again < once * (0.99 if method == "search" else 1.0001)


def test_drafts_are_rough(outliers: Tensor, searched: Quantized, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that are only nearly the best leave the low rank more to find than those of the full search."""
    monkeypatch.setattr(module, "DRAFT_STEPS", 8)
    assert searched.error < 0.97 * METHODS["search"](outliers, INT3, compensation=Compensation(rank=8)).error


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[list[Scales] | None]:
    """The lines that each round's searches started from, filled as rounds go."""
    starts: list[list[Scales] | None] = []
    original = module._Residuals.__init__

    def seen(self: module._Residuals, *args: Any) -> None:
        original(self, *args)
        starts.append(args[-1])

    monkeypatch.setattr(module._Residuals, "__init__", seen)
    return starts


def test_lines_follow_in_the_last_rounds(
    starts: list[list[Scales] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round that follows starts from the lines of the one before, and what is stored is better than without."""
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    compensation = Compensation(rank=32, compensator="int8")
    found = METHODS["search"](w, INT3, compensation=compensation)
    assert [lines is not None for lines in starts] == [False] * 6 + [True] * 4
    assert len({id(lines) for lines in starts}) == 5
    assert list(found.errors[5:]) == sorted(found.errors[5:], reverse=True)
    monkeypatch.setattr(module, "FOLLOWING", 0)
    without = METHODS["search"](w, INT3, compensation=compensation)
    assert without.errors[:6] == found.errors[:6]
    assert found.error < 0.995 * without.error


def test_lines_do_not_follow_while_the_low_rank_finds_more(starts: list[list[Scales] | None]) -> None:
    left, right = torch.randn(2, 256, 4, generator=torch.Generator().manual_seed(0))
    compensation = Compensation(rank=8, compensator="int8")
    errors = METHODS["search"](left @ right.T, INT3, compensation=compensation).errors
    assert len(errors) == 10
    assert all(after < (1 - module.LARGEST_FALL) * before for before, after in pairwise(errors))
    assert starts[:10] == [None] * 10


def test_int8_compensators_are_better_than_int3(outliers: Tensor) -> None:
    errors = {
        kind: relative_error(
            outliers,
            METHODS["search"](outliers, INT3, compensation=Compensation(rank=8, compensator=kind)).weight,
        )
        for kind in ("int3", "int8", "fp16")
    }
    assert errors["int8"] < errors["int3"]
    assert errors["fp16"] == pytest.approx(errors["int8"], rel=2e-3)


def test_more_rank_less_error(outliers: Tensor) -> None:
    errors = [
        relative_error(
            outliers,
            METHODS["search"](outliers, INT3, compensation=Compensation(rank=r, iterations=4)).weight,
        )
        for r in (1, 4, 16)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] < relative_error(outliers, quantize(outliers, INT3, "search"))


@pytest.mark.parametrize("method", SCALES)
def test_rank_zero_is_the_plain_method(outliers: Tensor, method: str) -> None:
    found = METHODS[method](outliers, INT3, compensation=Compensation(rank=0, iterations=1))
    assert found.error == pytest.approx(relative_error(outliers, quantize(outliers, INT3, method)), rel=1e-4)


def test_without_its_compensator_the_matrix_is_wrong(outliers: Tensor, searched: Quantized) -> None:
    """The codes stand for W - U V, not for W: a compensator that got lost must show."""
    assert relative_error(outliers, replace(searched.weight, lra=None, lrb=None)) > 1.5 * searched.errors[-1]


@pytest.mark.parametrize(
    ("errors", "stop"),
    [
        ([], False),
        ([0.5], False),
        ([0.5, 0.5, 0.5], False),  # the window of three is not past yet
        ([0.5, 0.5, 0.5, 0.5], True),
        ([0.5, 0.4, 0.3, 0.2], False),
        ([0.5, 0.4, 0.3, 0.6], True),  # the windowed error rose
        ([0.5, 0.3, 0.4, 0.35], False),  # one worse iterate does not stop it
        ([0.3, 0.3, 0.3, 0.3 - 3.1 * 3e-5], False),
        ([0.3, 0.3, 0.3, 0.3 - 2.9 * 3e-5], True),  # the window fell by less than 1e-4
        ([0.9, 0.8, 0.5, 0.5, 0.5, 0.5], True),  # only the last window counts
        ([0.5, 0.5, 0.5, 0.5, 0.4, 0.3], False),
    ],
)
def test_stop_rule(errors: list[float], stop: bool) -> None:
    """Eq. 15: the mean of three iterations fell by less than 1e-4 of itself."""
    assert converged(errors) is stop


@pytest.mark.parametrize("cap", [1, 3, 20])
def test_iterations_end_at_the_cap(outliers: Tensor, cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "converged", lambda errors: False)
    assert (
        len(METHODS["rtn"](outliers[:32], INT3, compensation=Compensation(rank=2, iterations=cap)).errors)
        == cap
    )


def test_divergence_stops(outliers: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    energies = iter([3e-3, 2e-3, 1e-3, 0.0, 0.0])
    original = module.truncated_svd

    def falling(*args: object, **kwargs: object) -> tuple[Tensor, Tensor, float]:
        u, v, _ = original(*args, **kwargs)
        return u, v, next(energies)

    monkeypatch.setattr(module, "truncated_svd", falling)
    found = METHODS["rtn"](outliers[:32], INT3, compensation=Compensation(rank=1))
    assert len(found.errors) == 4
    assert found.best == 0


@pytest.mark.parametrize(("n", "k", "rank"), [(1, 32, 1), (17, 32, 40), (5, 64, 5), (33, 96, 2)])
@pytest.mark.parametrize("kind", ["int3", "int8", "fp16"])
def test_awkward_shapes(n: int, k: int, rank: int, kind: str) -> None:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = METHODS["search"](
        w, Format(bits=3, group=32), compensation=Compensation(rank=rank, compensator=kind, iterations=3)
    )
    check(found.weight)
    plain = relative_error(w, quantize(w, Format(bits=3, group=32), "search"))
    assert relative_error(w, found.weight) < plain


@pytest.mark.parametrize("method", SCALES)
@pytest.mark.parametrize("value", [0.0, 0.3])
def test_constant_matrices(method: str, value: float) -> None:
    w = torch.full((32, 64), value)
    found = METHODS[method](w, INT3, compensation=Compensation(rank=2, iterations=2))
    assert float((dequantize(found.weight) - w).abs().max()) <= 2e-3 * value


def test_double_quantized_and_symmetric_formats(outliers: Tensor) -> None:
    for text in ("int3-g64-dq", "int3-g64-sym", "int2-g32-sym-dq", "int2-g16-super"):
        found = METHODS["search"](
            outliers, Format.parse(text), compensation=Compensation(rank=4, iterations=4)
        )
        assert found.weight.format == Format.parse(text)
        assert relative_error(outliers, found.weight) < 1.1 * min(found.errors)


def test_same_seed_same_bytes_and_bands_change_nothing_but_rounding(
    outliers: Tensor, searched: Quantized, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = METHODS["search"](outliers, INT3, compensation=Compensation(rank=8))
    assert again.errors == searched.errors
    for suffix, tensor in searched.weight.tensors().items():
        assert torch.equal(again.weight.tensors()[suffix], tensor)


def test_nan_is_refused(outliers: Tensor) -> None:
    w = outliers.clone()
    w[100, 3] = float("nan")
    with pytest.raises(WeightError):
        METHODS["search"](w, INT3, compensation=Compensation(rank=2))


@pytest.mark.parametrize("name", ["self_attn.q_proj", "block_sparse_moe.experts.0.w1"])
def test_order_of_methods_on_trained_matrices(shared: Path, name: str) -> None:
    """MiLo with search inside < search < hqq < rtn, on what training makes of weights."""
    source = open_source(str(shared / "models" / "tiny-mixtral-outliers"))
    w = source.read(f"model.layers.2.{name}.weight")
    errors = [relative_error(w, quantize(w, INT3, m)) for m in ("search", "hqq", "rtn")]
    compensated = METHODS["search"](w, INT3, compensation=Compensation(rank=8, iterations=5)).weight
    errors.insert(0, relative_error(w, compensated))
    assert errors == sorted(errors)
    assert all(a < 0.99 * b for a, b in pairwise(errors))


def test_after_a_round_that_made_it_worse_codes_follow_the_low_rank_alone(outliers: Tensor) -> None:
    compensation = Compensation(rank=8)
    assert module._stride(outliers, compensation, [0.2]) > 1
    assert module._stride(outliers, compensation, [0.3, 0.2]) > 1
    assert module._stride(outliers, compensation, [0.3, 0.2, 0.25]) == 1
    assert module._stride(outliers, replace(compensation, refit=False), [0.2]) == 1
