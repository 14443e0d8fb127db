"""What the run of the model asks of others: to take the Hessians that it finds, and to train its blocks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from trilobite.quantize.plan.plan import PlanLine

if TYPE_CHECKING:  # brings transformers along
    from trilobite.quantize.calibrate.inputs import BlockInputs
    from trilobite.quantize.calibrate.model import BlockModel
    from trilobite.quantize.calibrate.whole import Whole

Record = dict[str, Any]
"""What is to be remembered of a line."""
Records = list[tuple[PlanLine, Record]]
Buffer = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Room for activations, given their shape and dtype."""


class Receiver(Protocol):
    """Takes Hessians, block after block: packs by them, or keeps them."""

    def block(self, index: int | None, lines: Sequence[PlanLine]) -> AbstractContextManager[None]:
        """Entered around the work on a block's lines; None is what is outside of the blocks."""

    @property
    def copies(self) -> int:
        """Of a Hessian that this machine holds while it is taken, those to factor it included."""

    def slots(self, jobs: int) -> int:
        """Hessians that are taken at a time. jobs: threads of this process that compute"""

    def take(self, lines: Sequence[PlanLine], hessian: Tensor, note: Mapping[str, Any]) -> Records:
        """The Hessian that some lines share, [K, K] fp32, and what to note of it. Called by threads."""

    def done(self, line: PlanLine, record: Record) -> None:
        """What `take` returned has arrived. Called by the main thread."""

    def unseen(self, lines: Sequence[PlanLine]) -> None:
        """Lines whose matrices the model never runs."""

    def put(self, model: "BlockModel", index: int) -> None:
        """Give a loaded block the values that it has when packed: the next block's inputs come from them."""


class Trainer(Protocol):
    """Trains what is not codes, each block once its lines are packed, and at last the whole model."""

    least: ClassVar[int]
    """How many windows or batches of pairs it can be done with."""

    def sizes(self, windows: int) -> set[int]:
        """How many windows a batch may have."""

    def wants(self, block: int) -> bool:
        """Whether a block is still to be trained."""

    def tune_block(self, model: "BlockModel", index: int, inputs: "BlockInputs", buffer: Buffer) -> None:
        """Train a block, loaded with its original weights, on what enters it."""

    def wants_all(self) -> bool:
        """Whether the whole model is still to be trained."""

    def tune_all(self, model: "BlockModel", whole: "Whole", buffer: Buffer) -> None:
        """Train the whole model, of which all that is outside of the blocks is loaded."""
