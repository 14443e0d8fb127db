"""Copies between the memory of the host and that of a device, in the background; what is waited for goes first."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter, sleep
from typing import ClassVar

import torch
from torch import Tensor

from trilobite.runtime.offload.memory import Arena
from trilobite.runtime.offload.transfers import Transfer, Transfers

PIECE = 8 * 2**20
"""Bytes of a piece: 0.3 ms at PCIe 4, so that a miss waits no longer for a guess."""
NEXT = 2e-4
"""Seconds within which a piece follows the one before it, on a bus that was not idle in between."""


class CopyEngine(ABC):
    """Brings experts into slots of a device.

    device: where the slots are, and the activations    gpu_layout: whether the GPU kernels compute there, or the engine
    for CPUs with the weights as stored
    """

    device: torch.device
    gpu_layout: ClassVar[bool]

    def __init__(self, *, threads: int, piece: int) -> None:
        """piece: bytes that a thread copies at a time."""
        self.transfers = Transfers("copy", threads=threads, piece=piece)

    def __deepcopy__(self, memo: dict[int, object]) -> "CopyEngine":
        """There is one bus, however often the settings that name it are copied."""
        return self

    def copy(
        self, source: Tensor, target: Tensor, *, urgent: bool, finish: Callable[[], None] | None = None
    ) -> Transfer:
        """Begin to copy, as soon as the device has done what it was given so far.

        source, target: [bytes] uint8 on the host and on the device    finish: `run` behind the last byte
        Raises OffloadError after a fork or `close`.
        """
        before = self.mark()

        def move(at: int, stop: int) -> None:
            self.move(source[at:stop], target[at:stop], before, first=at == 0)

        last = None if finish is None else lambda: self.run(finish)
        return self.transfers.begin(source.numel(), move, urgent=urgent, finish=last)

    @abstractmethod
    def move(self, source: Tensor, target: Tensor, before: object, *, first: bool) -> None:
        """Copy one piece, not earlier than `before`, a `mark`, and return when it is there. Raises OffloadError."""

    @abstractmethod
    def allocate(self, slots: int, slot_bytes: int) -> Arena:
        """Memory of the device. Raises OffloadError when there is not so much."""

    def pin(self, arena: Arena) -> None:  # noqa: B027 - the host has nothing to do
        """Let memory of the host be what copies are fast from."""

    def mark(self) -> object:
        """What the device was given so far."""
        return None

    def run(self, work: Callable[[], None]) -> None:
        """Do work on the device beside what it computes, until it is done. Raises OffloadError."""
        work()

    def used(self) -> int | None:
        """Bytes of the device that this process holds already; None where that is the memory of the host."""
        return None

    def wait(self) -> None:  # noqa: B027 - the host has nothing to do
        """Until the device has done what it was given, for whoever measures time."""

    def close(self) -> None:
        """End the threads."""
        self.transfers.close()


class HostCopies(CopyEngine):
    """The host in the place of a device, at the end of a bus that is as slow as one likes: where there is no GPU."""

    device = torch.device("cpu")
    gpu_layout = False

    def __init__(self, bandwidth: float = float("inf"), latency: float = 0.0, *, piece: int = PIECE) -> None:
        """bandwidth: bytes per second    latency: seconds before the first piece of every copy."""
        super().__init__(threads=1, piece=piece)
        self.bandwidth, self.latency = bandwidth, latency
        self._ended = self._late = 0.0

    def move(self, source: Tensor, target: Tensor, before: object, *, first: bool) -> None:
        """Copy, and wait for as long as the bus would have taken."""
        now = perf_counter()
        overslept = self._late if now - self._ended < NEXT else 0.0
        due = now - overslept + source.numel() / self.bandwidth + (self.latency if first else 0.0)
        self.put(source, target)
        sleep(max(0.0, due - perf_counter()))
        self._ended = perf_counter()
        self._late = self._ended - due

    def put(self, source: Tensor, target: Tensor) -> None:
        """The copy itself."""
        with torch.inference_mode():  # slots may have been made in it
            target.copy_(source)

    def allocate(self, slots: int, slot_bytes: int) -> Arena:
        """Memory of the host."""
        return Arena(slots, slot_bytes)
