"""How to compress, as opposed to what to make: of this only the device changes bytes of the result."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trilobite.errors import DeviceError, SettingError
from trilobite.quantize.plan.plan import Plan, PlanLine
from trilobite.quantize.watcher import SILENT, Watcher

if TYPE_CHECKING:
    from trilobite.quantize.run.executor import Workers

LineDone = Callable[[PlanLine, Mapping[str, Any], bool], None]
"""(line, its record, whether this run made it): called for every tensor, from the main thread."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run.

    jobs: matrices in work at a time (0 = one per usable core)    device: cpu, cuda or auto
    workers: processes that pack in the place of this one's threads
    scratch: a folder for the unfinished files of a destination by URL, default ~/.cache/trilobite
    """

    jobs: int = 0
    device: str = "auto"
    on_plan: Callable[[Plan], None] | None = None
    on_line: LineDone | None = None
    watcher: Watcher = SILENT
    workers: "Workers | None" = None
    scratch: Path | None = None

    def pick_device(self) -> torch.device:
        """The device; of workers it is the CPU. Raises DeviceError, SettingError."""
        if self.workers is not None and self.device == "cuda":
            raise SettingError("device cuda: workers pack on CPUs; leave the device or the workers out")
        return pick_device("cpu" if self.workers is not None and self.device == "auto" else self.device)

    def threads(self, device: torch.device) -> int:
        """Matrices in work at a time on a device: a GPU is busy with one."""
        return self.jobs or (1 if device.type == "cuda" else usable_cores())


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a GPU. Raises DeviceError where there is none, SettingError for other names."""
    if name not in ("auto", "cpu", "cuda"):
        raise SettingError(f"device {name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "device cuda: torch sees no GPU here; use --device cpu, or install a CUDA build of torch"
        )
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")
