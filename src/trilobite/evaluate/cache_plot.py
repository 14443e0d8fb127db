"""Figure 2 of arXiv:2312.17238 for a trace, as a PNG file."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from trilobite.errors import DestinationError, MissingExtraError

Curves = Mapping[str, Mapping[int, float]]
DASHED = ("belady", "random", "gate+2", "norm+2")


def draw(path: Path, ratios: Curves, recall: Curves, *, title: str) -> None:
    """Hit ratios on the left, recalls on the right. Raises MissingExtraError without matplotlib, DestinationError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("--plot needs matplotlib: pip install 'trilobite[plot]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, curves in ((left, ratios), (right, recall)):
        for name, curve in curves.items():
            style = ":" if name.endswith("+10") else "--" if name in DASHED or name.endswith("pool") else "-"
            axes.plot(list(curve), list(curve.values()), style, marker=".", label=name)
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    left.set(xlabel="slots of a layer, k", ylabel="hit ratio")
    right.set(xlabel="experts guessed", ylabel="recall")
    figure.suptitle(title, fontsize="medium")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as e:
        raise DestinationError(f"{path}: cannot be written ({e.strerror}); choose another folder") from e
