"""Markdown tables, and fragments between marker comments of a page.

<!-- begin NAME -->
(whatever a script printed last)
<!-- end NAME -->
"""

from collections.abc import Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(line(cells) for cells in (header, rule, *rows))


def markers(name: str) -> tuple[str, str]:
    """What a fragment of that name stands between."""
    return f"<!-- begin {name} -->", f"<!-- end {name} -->"


def fragment(page: str, name: str) -> str:
    """What stands between the markers of that name; empty without them. page: its text"""
    begin, end = markers(name)
    return page.partition(begin)[2].partition(end)[0]


def cells(text: str) -> list[tuple[str, ...]]:
    """The cells of all rows of a markdown table in a text, its header first."""
    rows = [line.strip().strip("|") for line in text.splitlines() if line.startswith("| ")]
    found = [tuple(cell.strip() for cell in row.split("|")) for row in rows]
    return [row for row in found if set("".join(row)) - set("-:")]


def insert(page: Path, name: str, fragment: str) -> None:
    """Put a fragment between the markers of that name.

    Raises SystemExit when the page has no such markers: then nobody would ever see the figures.
    """
    begin, end = markers(name)
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"error: {page}: no markers {begin} ... {end}; add them where the figures belong")
    page.write_text(f"{before}{begin}\n{fragment.strip()}\n{end}{after}", encoding="utf-8")
