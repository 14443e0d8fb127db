"""HTML from values: everything is escaped, unless it is HTML already."""

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html(value: object) -> Html:
    """A value as HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(parts: Iterable[object], between: str = "\n") -> Html:
    """Values one after another."""
    return Html(between.join(html(part) for part in parts))


def element(tag: str, *content: object, **attributes: str) -> Html:
    """An element. attributes: `class_` stands for class."""
    named = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{tag}{named}>{join(content, '')}</{tag}>")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> Html:
    """A table; its first `left` columns are aligned to the left."""
    head = join([element("th", c, class_=_side(i, left)) for i, c in enumerate(columns)], "")
    body = [
        element("tr", join([element("td", cell, class_=_side(i, left)) for i, cell in enumerate(row)], ""))
        for row in rows
    ]
    inner = element("thead", element("tr", head)) + element("tbody", join(body))
    return element("div", element("table", Html(inner)), class_="wide")


def section(title: str, *content: object) -> Html:
    """A heading and what belongs to it."""
    return element("section", element("h2", title), join(content))


def paragraph(*content: object) -> Html:
    """Prose."""
    return element("p", *content)


def _side(column: int, left: int) -> str:
    return "text" if column < left else "number"


STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --faint: #6b7580; --line: #d5dae0; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde3e9; --faint: #98a2ad; --line: #3a424b; --paper: #14181c; } }
@media print {
  :root { color-scheme: light; --ink: #000; --faint: #555; --line: #bbb; --paper: #fff; }
  section, figure, tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; } .faint, figcaption { color: var(--faint); }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92em; }
th, td { padding: .15rem .7rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; }
.text { text-align: left; } td.text { overflow-wrap: anywhere; }
td.text code { display: inline-block; min-width: 11rem; } .number { text-align: right; white-space: nowrap; }
code { font-size: .95em; overflow-wrap: anywhere; }
figure { margin: .8rem 0; } figure svg { max-width: 100%; height: auto; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, *content: object) -> str:
    """A whole page that loads nothing from anywhere and runs no script."""
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            element("title", title),
            element("style", Html(STYLE)),
        ]
    )
    body = element("body", join(content))
    return f'<!doctype html>\n<html lang="en">\n{element("head", head)}\n{body}\n</html>\n'
