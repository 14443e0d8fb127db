"""What would mend a matrix: free changes first, and the price of the others counted in stored bytes."""

from typing import Any

import pytest

from trilobite.formats.weight import low_rank_bytes
from trilobite.quantize.plan.ranks import weight_bytes
from trilobite.recipe import parse_format
from trilobite.report.remedies import remedies, worst

N, K = 1024, 2048


def row(**changes: Any) -> dict[str, Any]:
    plain = {"name": "x", "role": "expert", "shape": [N, K], "format": "int3-g64", "method": "search"}
    return {**plain, "rank": 0, "error": 0.2, **changes}


def test_the_price_of_a_rank() -> None:
    bits = low_rank_bytes("int3", 16, N, K) * 8 / (N * K)
    assert f"rank 16: {bits:+.3f} bits per weight" in remedies(row())


def test_the_price_of_more_rank_is_the_difference() -> None:
    before, after = (low_rank_bytes("int8", rank, N, K) for rank in (24, 48))
    text = f"rank 48: {(after - before) * 8 / (N * K):+.3f} bits per weight"
    assert text in remedies(row(rank=24, compensator="int8"))


def test_the_price_of_more_bits() -> None:
    three, four = (weight_bytes(parse_format(f), N, K) for f in ("int3-g64", "int4-g64"))
    expected = f"int4-g64: {(four - three) * 8 / (N * K):+.3f} bits per weight, the error about 1/2"
    assert expected in remedies(row())


def test_free_changes_come_first() -> None:
    found = remedies(row(method="rtn", tokens=3, own=0.1))
    assert found[0].startswith("its expert saw 3 calibration tokens")
    assert found[1].startswith("--method search")
    assert "search" not in " ".join(remedies(row()))


def test_outliers_ask_for_ranks_by_kurtosis() -> None:
    assert "kurtosis-r" in remedies(row(rank=16, compensator="int3", kurtosis=9.0))[0]
    assert "kurtosis-r" not in " ".join(remedies(row(rank=16, compensator="int3", kurtosis=0.1)))


@pytest.mark.parametrize("fmt", ["e8p-2", "int8-g32", "int4-channel-sym", "grid-4-fourier"])
def test_every_format_has_an_answer_or_none(fmt: str) -> None:
    assert all("nan" not in text for text in remedies(row(format=fmt)))


def test_the_worst_come_first_with_what_is_typical() -> None:
    rows = [row(name=str(i), error=i / 100) for i in range(1, 30)]
    found = worst([*rows, row(name="kept", format="int8-g64", error=0.001)])
    assert [w.row["name"] for w in found] == [str(i) for i in range(29, 19, -1)]
    assert {w.typical for w in found} == {0.15}
