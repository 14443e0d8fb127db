"""Memory of one purpose: slots of equal size, anonymous, aligned for O_DIRECT, and counted to the byte."""

import torch
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.huge_pages import private_memory

ALIGN = 4096
"""Of addresses, offsets and lengths that O_DIRECT takes, on every file system that we know."""


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


class Arena:
    """`slots` slots of `slot_bytes` each, next to each other. Pages count as memory when they are first written.

    tensor: [slots * slot_bytes] uint8, all of it
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """slot_bytes: a multiple of ALIGN. Raises OffloadError when there is no such memory."""
        assert slot_bytes % ALIGN == 0, slot_bytes
        self.slots, self.slot_bytes = slots, slot_bytes
        nbytes = max(ALIGN, slots * slot_bytes)
        try:
            self._pages = private_memory(nbytes)
        except OSError as e:
            raise OffloadError(
                f"{nbytes / 1e9:.2f} GB for experts cannot be had ({e.strerror}); ask for less with --memory"
            ) from e
        self._view = memoryview(self._pages)
        self.tensor: Tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def offset(self, slot: int) -> int:
        """Where a slot begins in `tensor`."""
        return slot * self.slot_bytes

    def slot(self, slot: int) -> Tensor:
        """The bytes of a slot, [slot_bytes] uint8."""
        return self.tensor[self.offset(slot) : self.offset(slot) + self.slot_bytes]

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, writable."""
        assert 0 <= slot < self.slots, slot
        return self._view[self.offset(slot) : self.offset(slot) + self.slot_bytes]
