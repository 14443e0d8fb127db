"""All calls of CUDA that streaming to a GPU needs: streams, events, pinned memory, and how much memory there is.

Each copying thread has a stream of its own and waits for its piece, so that two are in flight and a miss overtakes
guesses. A piece begins behind an event of the stream that computes: slots are written to when nothing reads them.
"""

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.kernels import ops
from trilobite.runtime.offload.copies import PIECE, CopyEngine
from trilobite.runtime.offload.memory import Arena

THREADS = 2
"""Pieces in flight: the bus works on one while the other is asked for."""


class GpuArena(Arena):
    """Slots in the memory of a GPU."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        """Raises OffloadError when there is no such memory."""
        self.slots, self.slot_bytes = slots, slot_bytes
        try:
            self.tensor = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as e:
            free = torch.cuda.mem_get_info(device)[0]
            raise OffloadError(
                f"{device}: {slots * slot_bytes / 1e9:.2f} GB for experts cannot be had, {free / 1e9:.2f} GB are free; "
                "ask for less with --gpu-memory"
            ) from e

    def view(self, slot: int) -> memoryview:
        """There is none: no file is read into a GPU."""
        raise AssertionError(slot)


class CudaCopies(CopyEngine):
    """Copy streams of a GPU."""

    gpu_layout = True

    def __init__(self, device: str = "cuda") -> None:
        """Raises OffloadError where there is no such GPU."""
        if not torch.cuda.is_available():
            raise OffloadError(
                "gpu_memory: there is no GPU that torch can use; leave it out, and bound the RAM with memory instead"
            )
        if (missing := ops.missing_triton()) is not None:
            raise OffloadError(f"gpu_memory: {missing}")
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._own = threading.local()
        super().__init__(threads=THREADS, piece=PIECE)

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._own.stream
        return stream

    def mark(self) -> torch.cuda.Event:
        """An event behind all that the calling thread has launched."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def move(self, source: Tensor, target: Tensor, before: object, *, first: bool) -> None:
        """Copy on the stream of this thread."""
        assert isinstance(before, torch.cuda.Event)

        def work() -> None:
            self._stream().wait_event(before)
            target.copy_(source, non_blocking=True)

        self.run(work)

    def run(self, work: Callable[[], None]) -> None:
        """On the stream of this thread."""
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream()):
                work()
                done.record(self._stream())
            done.synchronize()
        except RuntimeError as e:
            raise OffloadError(f"{self.device}: experts cannot be copied there: {e}") from e

    def allocate(self, slots: int, slot_bytes: int) -> Arena:
        """Memory of the GPU."""
        return GpuArena(slots, slot_bytes, self.device)

    def pin(self, arena: Arena) -> None:
        """Lock its pages until it is forgotten: torch's own pinned memory comes in powers of two."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = arena.tensor.data_ptr()
        status = runtime.cudaHostRegister(address, arena.tensor.numel(), 0)
        if int(status):
            raise OffloadError(
                f"{arena.tensor.numel() / 1e9:.2f} GB of memory cannot be pinned for copies to {self.device} (CUDA "
                f"error {int(status)}); bound it with --memory"
            )
        weakref.finalize(arena, runtime.cudaHostUnregister, address).atexit = False

    def used(self) -> int:
        """What torch holds there, and what CUDA itself takes of it is not counted."""
        return int(torch.cuda.memory_reserved(self.device))

    def wait(self) -> None:
        """For all streams."""
        torch.cuda.synchronize(self.device)
