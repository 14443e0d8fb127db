import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilobite.errors import RecipeError
from trilobite.formats.weight import low_rank_bytes
from trilobite.quantize.plan.ranks import (
    Candidate,
    apportion,
    assign_ranks,
    rank_cap,
    relative_usage,
    weight_bytes,
)
from trilobite.recipe import Format, Role, parse_policies

BIG = 1000


def model(cap: int = BIG) -> list[Candidate]:
    """Two dense matrices and four experts, expert e with kurtosis e and used e + 1 times."""
    dense = [
        Candidate(name="q", role=Role.ATTENTION, cap=cap, kurtosis=1.0),
        Candidate(name="shared", role=Role.SHARED_EXPERT, cap=cap, kurtosis=0.0),
    ]
    experts = [
        Candidate(name=f"e{e}", role=Role.EXPERT, cap=cap, kurtosis=float(e), frequency=(e + 1) / 2.5)
        for e in range(4)
    ]
    return [*dense, *experts]


def ranks(policy: str, candidates: list[Candidate] | None = None) -> dict[str, int]:
    return assign_ranks(candidates or model(), parse_policies(policy, 256))


def test_simple_policies() -> None:
    assert set(ranks("uniform-7").values()) == {7}
    assert ranks("dense-7") == {"q": 7, "shared": 7, "e0": 0, "e1": 0, "e2": 0, "e3": 0}
    assert ranks("sparse-7") == {"q": 0, "shared": 0, "e0": 7, "e1": 7, "e2": 7, "e3": 7}
    assert set(ranks("").values()) == {0}


def test_kurtosis_shares_by_powers_of_two() -> None:
    found = ranks("kurtosis-60")
    # Scores 2 and 1 for the dense ones, 1 2 4 8 for the experts: 360 in parts of 20.
    assert found == {"q": 40, "shared": 20, "e0": 20, "e1": 40, "e2": 80, "e3": 160}


def test_kurtosis_beside_dense_is_for_the_experts() -> None:
    """`dense-512+kurtosis-16` of Table 4: 512 for the dense ones, an average of 16 for the sparse ones."""
    found = ranks("dense-512+kurtosis-15")
    assert found == {"q": 512, "shared": 512, "e0": 4, "e1": 8, "e2": 16, "e3": 32}
    assert ranks("kurtosis-15+dense-512") == found


def test_frequency_is_for_the_experts() -> None:
    assert ranks("frequency-20") == {"q": 0, "shared": 0, "e0": 8, "e1": 16, "e2": 24, "e3": 32}
    assert ranks("dense-9+frequency-20") == {"q": 9, "shared": 9, "e0": 8, "e1": 16, "e2": 24, "e3": 32}


def test_uniform_beside_sparse_is_for_the_dense_ones() -> None:
    assert ranks("sparse-3+uniform-5") == {"q": 5, "shared": 5, "e0": 3, "e1": 3, "e2": 3, "e3": 3}


def test_frequency_without_statistics_says_how_to_get_them() -> None:
    bare = [Candidate(name="layers.0.e0", role=Role.EXPERT, cap=9)]
    with pytest.raises(RecipeError, match=re.escape("layers.0.e0")) as e:
        ranks("frequency-4", bare)
    assert "trilobite stats" in str(e.value)
    assert ranks("dense-4", bare) == {"layers.0.e0": 0}


@pytest.mark.parametrize(
    "policy", ["uniform-50", "sparse-50", "kurtosis-50", "frequency-50", "uniform-30+sparse-30"]
)
def test_caps_hold(policy: str) -> None:
    assert max(ranks(policy, model(cap=11)).values()) == 11


def test_what_a_cap_takes_goes_to_the_others() -> None:
    candidates = model()[2:]
    candidates[3] = Candidate(name="e3", role=Role.EXPERT, cap=10, kurtosis=3.0)
    found = ranks("kurtosis-15", candidates)
    assert found["e3"] == 10
    assert sum(found.values()) == 60
    assert found["e0"] < found["e1"] < found["e2"]


def test_extreme_kurtosis_does_not_take_all() -> None:
    """2**kurtosis is held within 2**8: one matrix of kurtosis 500 must not starve the rest."""
    spread = [
        Candidate(name=str(i), role=Role.EXPERT, cap=BIG, kurtosis=k)
        for i, k in enumerate((0.0, 500.0, -500.0))
    ]
    found = ranks("kurtosis-300", spread)
    assert found["1"] > found["0"] >= 3
    assert sum(found.values()) == 900


sharing = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0, 256, allow_nan=False), min_size=n, max_size=n),
        st.lists(st.integers(0, 600), min_size=n, max_size=n),
        st.integers(0, 700),
    )
)


@given(sharing)
@settings(deadline=None, max_examples=100)
def test_share_holds_the_average_within_the_caps(case: tuple[list[float], list[int], int]) -> None:
    scores, caps, average = case
    found = apportion(scores, caps, average)
    assert all(0 <= r <= c for r, c in zip(found, caps, strict=True))
    assert sum(found) == min(average * len(scores), sum(caps))
    assert apportion(scores, caps, average) == found


@given(sharing)
@settings(deadline=None, max_examples=100)
def test_share_is_fair(case: tuple[list[float], list[int], int]) -> None:
    """Of two with room left, the one with the larger score never gets less (but for the rounding of one)."""
    scores, caps, average = case
    found = apportion(scores, caps, average)
    for i, a in enumerate(scores):
        for j, b in enumerate(scores):
            if a > b and found[i] < caps[i]:
                assert found[i] >= found[j] - 1


def test_share_of_nothing() -> None:
    assert apportion([], [], 5) == []
    assert apportion([1.0, 2.0], [5, 5], 0) == [0, 0]
    assert apportion([0.0, 0.0], [5, 5], 3) == [3, 3]
    assert apportion([1.0], [0], 3) == [0]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("kind", ["int3", "int8", "fp16"])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (1408, 2048), (4096, 4096), (17, 192)])
def test_no_compensator_costs_more_than_raising_the_bits(bits: int, kind: str, n: int, k: int) -> None:
    fmt = Format(bits=bits, group=64)
    cap = rank_cap(fmt, kind, n, k, capped=True)
    wider = Format(bits={2: 3, 3: 4, 4: 8}[bits], group=64)
    spare = weight_bytes(wider, n, k) - weight_bytes(fmt, n, k)
    assert cap * low_rank_bytes(kind, 1, n, k) <= spare
    # And it is the largest such rank, unless U and V would have as many values as the matrix.
    assert (cap + 1) * low_rank_bytes(kind, 1, n, k) > spare or cap == n * k // (n + k)


def test_caps_at_the_ends() -> None:
    assert rank_cap(Format(bits=8, group=64), "int3", 4096, 4096, capped=True) == 0
    assert rank_cap(Format(bits=3, group=64), "int3", 100, 64, capped=False) == 64
    # Groups of 16 are not there for 3 bits, the next wider ones: with groups of 32 these cost as many bytes.
    assert rank_cap(Format(bits=2, group=16), "int3", 4096, 4096, capped=True) == 0
    assert rank_cap(Format(bits=2, group=16, double_quant=True), "int3", 4096, 4096, capped=True) > 0
    # At INT3 g64 and square matrices an int3 compensator may have a seventh or so of the size as its rank.
    assert 4096 / 7 < rank_cap(Format(bits=3, group=64), "int3", 4096, 4096, capped=True) < 4096 / 6


def test_usage_is_relative_to_the_mean_of_the_layer() -> None:
    shares = relative_usage({0: [1, 3, 4, 0], 3: [0, 0]})
    assert shares == {(0, 0): 0.5, (0, 1): 1.5, (0, 2): 2.0, (0, 3): 0.0, (3, 0): 1.0, (3, 1): 1.0}
    assert math.isclose(sum(v for (layer, _), v in shares.items() if layer == 0), 4)
