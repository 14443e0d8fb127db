"""Stop strings, in a text that comes in pieces of any size."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilobite.runtime.generate.stops import Stops


def told(pieces: Sequence[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    found = Stops(stops)
    text = "".join([*map(found.take, pieces), found.take("", last=True)])
    return text, found.stopped


@pytest.mark.parametrize(
    "pieces", [["long-tre-parted"], list("long-tre-parted"), ["long-t", "re", "-", "parted"]]
)
def test_a_text_ends_before_its_stop_string(pieces: list[str]) -> None:
    assert told(pieces, ("e-pa", "\0")) == ("long-tr", True)


@given(st.lists(st.text("ab", max_size=3)), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_pieces_make_no_difference(pieces: list[str], stops: list[str]) -> None:
    """The first stop string to be complete ends the text; of two that end together, the longer one."""
    text = "".join(pieces)
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text
    made, stopped = told(list(text), tuple(stops))
    assert (made, stopped) == (expected, bool(ends))
    assert told(pieces, tuple(stops))[1] == stopped


def test_what_may_be_the_beginning_is_held_back() -> None:
    stops = Stops(("stop",))
    assert [stops.take(p) for p in ("a s", "to", "ne st")] == ["a ", "", "stone "]
    assert stops.take("", last=True) == "st"
