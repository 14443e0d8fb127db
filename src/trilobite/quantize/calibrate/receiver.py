"""Who takes the Hessians that a run of the model finds: a packer, or a folder that keeps them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from trilobite.quantize.plan.plan import PlanLine

Record = dict[str, Any]
"""What is to be remembered of a line."""
Records = list[tuple[PlanLine, Record]]


class Receiver(Protocol):
    """Takes Hessians, block after block."""

    def block(self, index: int | None, lines: Sequence[PlanLine]) -> AbstractContextManager[None]:
        """Entered around the work on a block's lines; None is what is outside of the blocks."""

    def take(self, lines: Sequence[PlanLine], hessian: Tensor, note: Mapping[str, Any]) -> Records:
        """The Hessian that some lines share, [K, K] fp32, and what to note of it. Called by threads."""

    def done(self, line: PlanLine, record: Record) -> None:
        """What `take` returned has arrived. Called by the main thread."""


class Packed(Protocol):
    """The quantized lines so far, those without a Hessian too: what the next block's inputs come from."""

    def finished(self) -> Sequence[PlanLine]:
        """The lines that are on disk."""

    def decoded(self, line: PlanLine) -> Tensor:
        """A matrix as the packed model will compute with it, [N, K] fp32."""


class PackingReceiver(Receiver, Packed, Protocol):
    """Packs lines as their Hessians come."""
