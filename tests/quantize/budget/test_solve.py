"""The best options within a bound: against all combinations."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilobite.quantize.budget.solve import Option, hull, solve

OPTION = st.builds(
    lambda nbytes, loss: Option(nbytes=nbytes, loss=float(loss)), st.integers(1, 40), st.integers(0, 50)
)
UNITS = st.lists(st.lists(OPTION, min_size=1, max_size=4), min_size=1, max_size=4)


def options(*pairs: tuple[int, float]) -> list[Option]:
    return [Option(nbytes=nbytes, loss=loss) for nbytes, loss in pairs]


def total(units: list[list[Option]], chosen: list[int]) -> tuple[int, float]:
    picked = [unit[i] for unit, i in zip(units, chosen, strict=True)]
    return sum(o.nbytes for o in picked), sum(o.loss for o in picked)


def best(units: list[list[Option]], bound: int) -> float:
    every = (total(units, list(c)) for c in product(*(range(len(unit)) for unit in units)))
    return min(loss for nbytes, loss in every if nbytes <= bound)


@settings(max_examples=300, deadline=None)
@given(UNITS, st.integers(0, 100))
def test_within_the_bound_and_within_a_step_of_the_best(units: list[list[Option]], percent: int) -> None:
    least = sum(min(o.nbytes for o in unit) for unit in units)
    most = sum(unit[hull(unit)[-1]].nbytes for unit in units)
    bound = least + (most - least) * percent // 100
    chosen = solve(units, bound)
    nbytes, loss = total(units, chosen)
    assert nbytes <= bound
    # What a convex hull leaves over is at most one step of it.
    step = max(
        (
            unit[a].loss - unit[b].loss
            for unit in units
            for a, b in zip(hull(unit), hull(unit)[1:], strict=False)
        ),
        default=0.0,
    )
    assert loss <= best(units, bound) + step
    assert solve(units, bound) == chosen
    if percent == 100:
        assert loss == best(units, bound)


@settings(max_examples=200, deadline=None)
@given(UNITS, st.floats(0, 10))
def test_exact_where_the_bytes_are_those_of_a_price(units: list[list[Option]], price: float) -> None:
    chosen = [min(hull(unit), key=lambda i: (unit[i].loss + price * unit[i].nbytes, i)) for unit in units]
    nbytes, loss = total(units, chosen)
    assert total(units, solve(units, nbytes))[1] == pytest.approx(best(units, nbytes)) == pytest.approx(loss)


def test_hull_leaves_out_what_others_beat_together() -> None:
    unit = options((10, 9.0), (20, 8.0), (30, 1.0), (35, 2.0), (40, 0.9))
    assert hull(unit) == [0, 2, 4]


def test_what_is_left_over_is_spent() -> None:
    units = [options((10, 9.0), (20, 1.0)), options((10, 5.0), (15, 4.8), (30, 1.0))]
    assert solve(units, 30) == [1, 0]
    assert solve(units, 36) == [1, 1]  # not on the hull, and all that fits
    assert solve(units, 50) == [1, 2]


def test_equal_units_are_told_apart_by_their_order() -> None:
    unit = options((10, 4.0), (20, 1.0))
    assert solve([unit] * 3, 50) == [1, 1, 0]
