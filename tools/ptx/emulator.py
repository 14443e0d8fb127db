"""Emulate the launches of the operators: for `triton_launch.recording`, in a process that compiles, on CPU tensors."""

import struct
from collections import Counter

import numpy as np
from torch import Tensor

from trilobite.kernels.gpu.launch import Launch

from . import tensor_core
from .arithmetic import HANDLERS
from .block import Block
from .memory import EmulationError, GlobalMemory, SharedMemory
from .program import Program, parse

assert tensor_core  # its handlers are registered
MOST_BLOCKS = (2**31 - 1, 65535, 65535)


class Emulator:
    """Compiles each launch for the GPU that Triton's driver names (trilobite/measure/ahead.py), and runs its blocks.

    launches, instructions: so far, by kernel; an instruction is one of a whole block
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.instructions: Counter[str] = Counter()
        self._programs: dict[str, Program] = {}
        self._unsettled: set[int] = set()

    def __call__(self, call: Launch) -> None:
        """Run one launch. Raises EmulationError naming kernel and instruction."""
        grid = (*call.grid, 1, 1)[:3]
        if 0 in grid:
            return
        if any(n > most for n, most in zip(grid, MOST_BLOCKS, strict=True)):
            raise EmulationError(f"a grid of {grid} programs, at most {MOST_BLOCKS}")
        name = call.kernel.fn.__name__
        compiled = call.kernel.warmup(**call.arguments, **call.constants, **call.options, grid=call.grid)
        program = self._program(compiled.asm["ptx"])
        if not call.early:  # it begins when all before it have ended
            self._unsettled = set()
        memory, values = GlobalMemory(early=call.early, unsettled=self._unsettled), []
        for argument, kind in compiled.src.signature.items():
            if kind != "constexpr":
                value = call.arguments[argument]
                values.append(_as_integer(value))
                if isinstance(value, Tensor):
                    memory.add(argument, value.data_ptr(), value.numel() * value.element_size())
        values += [0] * (len(program.parameters) - len(values))  # Triton's own scratch memory: none
        parameters = dict(zip(program.parameters, values, strict=True))
        self.launches[name] += 1
        with np.errstate(all="ignore"):
            for index in np.ndindex(*grid[::-1]):
                shared = SharedMemory(compiled.metadata.shared)
                block = Block(program, index[::-1], grid, parameters, shared, memory)
                self.instructions[name] += block.run(HANDLERS)
                memory.end_program()
        self._unsettled |= memory.written

    def _program(self, ptx: str) -> Program:
        if ptx not in self._programs:
            self._programs[ptx] = parse(ptx)
        return self._programs[ptx]


def _as_integer(value: object) -> int:
    if isinstance(value, Tensor):
        if not value.is_contiguous():
            raise EmulationError("a tensor that is not contiguous")
        return value.data_ptr()
    if isinstance(value, float):
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    assert isinstance(value, int)
    return value
