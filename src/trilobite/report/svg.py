"""Figures of matplotlib as inline SVG, in the colours of the page around them."""

import importlib.util
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from trilobite.checkpoint.files import explained, write_whole
from trilobite.errors import MissingExtraError, SettingError
from trilobite.report.html import Html, element

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
INK = "#010203"
"""The colour of text and lines; in a page that of the page's text."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trilobite",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "image.cmap": "viridis",
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}


def require_matplotlib() -> None:
    """Raise MissingExtraError where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("figures need matplotlib: pip install 'trilobite[plot]'")


@contextmanager
def drawing() -> Iterator[None]:
    """Our style; no warnings about glyphs that the font lacks. Raises MissingExtraError."""
    require_matplotlib()
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def inline(figure: "Figure", name: str, caption: str) -> Html:
    """A figure as an element of a page. name: of its ids, unique on the page."""
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(data.getvalue())
    for child in [c for c in root if c.tag == f"{{{SVG}}}metadata"]:
        root.remove(child)
    seen: set[str] = set()
    for node in root.iter():
        for key, value in node.attrib.items():
            node.set(key, _attribute(key, value, name))
        if (own := node.get("id")) in seen:
            del node.attrib["id"]  # matplotlib repeats what is equal
        seen |= {own} if own else set()
    root.set("role", "img")
    root.set("aria-label", caption)
    return element(
        "figure", Html(ElementTree.tostring(root, encoding="unicode")), element("figcaption", caption)
    )


def _attribute(key: str, value: str, name: str) -> str:
    """An attribute with ids of this figure alone, and the page's colour in place of INK."""
    if key == "id":
        return f"{name}-{value}"
    if key == f"{{{XLINK}}}href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    return re.sub(r"url\(#", f"url(#{name}-", value).replace(INK, "currentColor")


def check_ending(path: Path) -> None:
    """Raise SettingError unless a figure can be written to a file of this ending."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise SettingError(f"{path}: a figure is written as .png or .svg; give it one of these endings")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure to a PNG or SVG file, in black on white. Raises DestinationError."""
    ending = path.suffix.lower()[1:]
    data = io.BytesIO()
    metadata = {"Date": None} if ending == "svg" else {}
    figure.savefig(data, format=ending, dpi=150, facecolor="white", metadata=metadata)
    with explained(path):
        write_whole(path, data.getvalue())
