"""Launch a kernel: the one place where Triton is called. A recorder may listen, to compile the same without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from trilobite.errors import DeviceError, ShapeError

CAPABILITY = (8, 0)
"""Oldest compute capability that the kernels are made for: bf16 products and asynchronous copies begin there."""
OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
"""Whether Triton lays operands of products out as it did before 3.8: see `device/decode.py`, and its table of tiles."""
CHAINING = (9, 0)
"""Oldest compute capability on which a launch may begin before the one before it has ended."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch as recorded: how many programs, and everything that decides about their machine code."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int
    early: bool

    @property
    def options(self) -> dict[str, Any]:
        """What Triton's launcher takes beside arguments and constants."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
            "maxnreg": self.registers or None,
            "launch_pdl": self.early,
        }


_listener: Callable[[Launch], None] | None = None
_recorded = CAPABILITY


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    constants: dict[str, Any],
    *,
    warps: int = 4,
    registers: int = 0,
    behind: bool | None = None,
) -> None:
    """Run a kernel on a grid of programs.

    constants: its `tl.constexpr` parameters; STAGES pipelines its loop
    behind: of a kernel with a parameter CHAIN, whether it may begin before the launch before it has ended. Every program
    of it then waits (`wait_for_last`), so that what waits for it has waited for all before it, too; what it reads before
    that must be older than the last launch that was not behind another.
    """
    device = next(a.device for a in arguments.values() if isinstance(a, Tensor))
    early = bool(behind) and chained(device)
    if behind is not None:
        constants = constants | {"CHAIN": int(early) + chained(device)}
    call = Launch(
        kernel=kernel,
        grid=grid,
        arguments=arguments,
        constants=constants,
        warps=warps,
        stages=constants.get("STAGES", 1),
        registers=registers,
        early=early,
    )
    if _listener is not None:
        _listener(call)
        return
    if 0 in grid:
        return
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](**arguments, **constants, **call.options)
    else:
        kernel[grid](**arguments, **constants, **call.options)


@contextmanager
def recording(listener: Callable[[Launch], None], capability: tuple[int, int] = CAPABILITY) -> Iterator[None]:
    """Hand launches to `listener` instead of running them; results are undefined unless it does.

    capability: of the GPU whose launches they shall be
    """
    global _listener, _recorded
    _listener, _recorded = listener, capability
    try:
        yield
    finally:
        _listener, _recorded = None, CAPABILITY


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 before it was imported): for tests."""
    return bool(triton.knobs.runtime.interpret)


def chained(device: torch.device) -> bool:
    """Whether a launch may begin while the one before it ends: on Hopper and newer, whose programs can wait for that."""
    return (_capability(device) if device.type == "cuda" else _recorded) >= CHAINING


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def check_device(device: torch.device) -> None:
    """Raise DeviceError unless the kernels run on this device."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            raise DeviceError(
                f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; the "
                f"Triton kernels need {CAPABILITY[0]}.{CAPABILITY[1]} (Ampere) or newer: load with device='cpu'"
            )
    elif _listener is None and not interpreting():
        raise DeviceError(f"tensors are on {device}; the GPU layout runs on CUDA devices only")


def check_together(name: str, *tensors: Tensor | None) -> None:
    """Raise ShapeError unless all tensors are on one device."""
    devices = sorted({str(t.device) for t in tensors if t is not None})
    if len(devices) > 1:
        raise ShapeError(f"{name}: tensors are on {' and '.join(devices)}; move all to one device")


def check_dtype(x: Tensor, name: str) -> None:
    """Raise ShapeError for a type that the kernels do not compute in."""
    if x.dtype not in DTYPES:
        raise ShapeError(f"{name} is {x.dtype}; the operators take float32, float16 and bfloat16")


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at a multiple of four bytes, as kernels may read two 16-bit values at once."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() * x.itemsize % 4 else x


def scratch(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, tokens: int) -> Tensor:
    """Memory for intermediate results of a call on so many tokens.

    Raises DeviceError saying how much is missing and how many tokens would fit.
    """
    try:
        return torch.empty(shape, dtype=dtype, device=like.device)
    except torch.OutOfMemoryError as e:
        needed = torch.Size(shape).numel() * dtype.itemsize
        free = torch.cuda.mem_get_info(like.device)[0]
        raise DeviceError(
            f"{tokens} tokens need {needed / 1e9:.2f} GB for one intermediate result, {free / 1e9:.2f} GB of "
            f"{like.device} are free; about {max(1, tokens * free // (2 * needed))} tokens at a time would fit"
        ) from e


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU. Elsewhere (interpreted, recorded) the H100's, so that splits are used."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 132
