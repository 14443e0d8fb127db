"""One page for one checkpoint or several."""

from collections.abc import Sequence

from trilobite.report import several as side_by_side
from trilobite.report import single
from trilobite.report.html import Html, element, join, page
from trilobite.report.read import Packed
from trilobite.report.svg import drawing


def make_report(packed: Sequence[Packed]) -> str:
    """The page as text. Raises MissingExtraError without matplotlib."""
    with drawing():
        if len(packed) == 1:
            (one,) = packed
            content = join([element("h1", one.name), single.heading(one), single.sections(one)])
            return page(f"{one.name} – Trilobite", content)
        parts: list[Html] = [element("h1", f"{len(packed)} checkpoints"), side_by_side.sections(packed)]
        for i, one in enumerate(packed):
            inner = join([single.heading(one), single.sections(one, prefix=f"c{i}")])
            parts.append(element("details", element("summary", element("strong", one.name)), inner))
        return page(f"{len(packed)} checkpoints – Trilobite", join(parts))
