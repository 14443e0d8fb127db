"""Importance that weights alone tell, in the place of a calibration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trilobite.checkpoint.roles import Matrix, text_config
from trilobite.checkpoint.source import Source
from trilobite.errors import RecipeError
from trilobite.quantize.columns.guess import Guess
from trilobite.quantize.columns.streams import KNOWN
from trilobite.quantize.plan.plan import PlanLine
from trilobite.quantize.run.work import Work
from trilobite.quantize.watcher import SILENT, Watcher


class Guessed:
    """Does for `importance: weights` what a Calibrator does for others; runs nothing.

    identity: what interrupted runs must have in common    measured: what weights tell, once it is built
    """

    def __init__(self) -> None:
        """Nothing is read yet."""
        self.identity: dict[str, Any] = {"importance": "weights"}
        self.measured: Guess | None = None

    def build(self, source: Source, matrices: Sequence[Matrix], device: torch.device) -> None:
        """Find out what reads what. Raises RecipeError for an architecture of which that is not known."""
        self.measured = Guess(source, matrices)
        if not self.measured:
            kind = text_config(source).get("model_type")
            raise RecipeError(
                f"{source}: importance weights follows what writes each column, which is known for "
                f"{', '.join(KNOWN)}, and this is {kind!r}; choose --importance builtin or none"
            )

    def measure(
        self, lines: Sequence[PlanLine], *, jobs: int, workspace: Path, watcher: Watcher = SILENT
    ) -> None:
        """Nothing is left to be found."""

    def pack(self, work: Work, todo: Sequence[PlanLine]) -> None:
        """Pack lines that have importance."""
        work.run(todo, self.measured)
