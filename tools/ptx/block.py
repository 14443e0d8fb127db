"""A block of threads, all in step: registers as arrays over threads, and the way through the program."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .memory import Addresses, Bytes, EmulationError, GlobalMemory, SharedMemory
from .program import Address, Instruction, Operand, Program

Values = NDArray[Any]
Threads = NDArray[np.bool_]
"""Which threads of the block, [T]."""
WARP = 32
UNSIGNED: dict[int, type[np.generic]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_LETTERS = {"b": "u", "u": "u", "s": "i", "f": "f"}
Handler = Callable[["Block", Instruction, Threads], None]


def dtype_of(kind: str) -> np.dtype[np.generic]:
    """numpy's type for PTX's; bf16 and pairs of numbers stay bits."""
    if kind == "pred":
        return np.dtype(bool)
    if kind in ("bf16", "bf16x2", "f16x2"):
        return np.dtype(np.uint16 if kind == "bf16" else np.uint32)
    return np.dtype(f"{_LETTERS[kind[0]]}{int(kind[1:]) // 8}")


class Block:
    """Registers [T] by name, shared memory, and what runs asynchronously.

    index, grid: of the block, and of all of them, in x, y, z    parameters: of the kernel, as integers
    """

    def __init__(
        self,
        program: Program,
        index: tuple[int, ...],
        grid: tuple[int, ...],
        parameters: dict[str, int],
        shared: SharedMemory,
        memory: GlobalMemory,
    ) -> None:
        self.program, self.parameters = program, parameters
        self.shared, self.memory = shared, memory
        self.size = program.threads
        self.thread = np.arange(self.size, dtype=np.uint32)
        self.warp = (self.thread // WARP).astype(np.int16)
        self.lane = self.thread % WARP
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.products: list[list[Callable[[], None]]] = [[]]
        self._registers: dict[str, Values] = {"%tid.x": self.thread, "%laneid": self.lane}
        for axis, i, n in zip("xyz", index, grid, strict=True):
            self._registers[f"%ctaid.{axis}"] = np.full(self.size, i, np.uint32)
            self._registers[f"%nctaid.{axis}"] = np.full(self.size, n, np.uint32)

    def read(self, operand: Operand, kind: str) -> Values:
        """An operand as PTX's type `kind`, [T]: a register, widened with zeros or cut where it has another width."""
        dtype = dtype_of(kind)
        if isinstance(operand, str):
            found = self._register(operand)
        elif isinstance(operand, int):
            if dtype.kind == "b":
                return np.full(self.size, bool(operand))
            bits = UNSIGNED[8 * dtype.itemsize]
            found = np.full(self.size, operand & ((1 << 8 * dtype.itemsize) - 1), bits)
        else:
            raise EmulationError(f"not a value: {operand}")
        if found.dtype.kind == "b" or found.dtype == dtype:
            return found
        if found.dtype.itemsize != dtype.itemsize:
            found = found.astype(UNSIGNED[8 * dtype.itemsize])
        return found.view(dtype)

    def write(self, operand: Operand, values: Values, threads: Threads) -> None:
        """Values [T] to a register of these threads; where it is wider, signed ones keep their sign."""
        if operand == "_":
            return
        assert isinstance(operand, str)
        bits = self.program.widths[operand.rstrip("0123456789")]
        if bits == 1:
            values = values.astype(bool)
        else:
            if values.dtype.kind in "fb":
                values = values.view(UNSIGNED[8 * values.dtype.itemsize])
            if values.dtype.itemsize != bits // 8:
                values = values.astype(f"{values.dtype.kind}{bits // 8}")
            values = values.view(UNSIGNED[bits])
        if not threads.all():
            values = np.where(threads, values, self._register(operand))
        self._registers[operand] = values

    def address(self, operand: Operand, kind: str) -> Addresses:
        """Where an address points to, [T]. kind: of the register that it stands on."""
        assert isinstance(operand, Address)
        if operand.base is None:
            return np.full(self.size, operand.offset, np.int64)
        return self.read(operand.base, kind).astype(np.int64) + operand.offset

    def run(self, handlers: dict[str, Handler]) -> int:
        """Run to the end, those threads first that are furthest behind. returns: instructions."""
        program, waiting, count = self.program, {0: np.ones(self.size, bool)}, 0
        while waiting:
            at = min(waiting)
            threads = waiting.pop(at)
            if at == len(program.instructions):
                break
            step, count = program.instructions[at], count + 1
            chosen = threads
            if step.predicate is not None:
                chosen = threads & (self.read(step.predicate, "pred") ^ step.negated)
            try:
                if step.name == "bra":
                    self._go(waiting, program.labels[str(step.operands[0])], chosen)
                    self._go(waiting, at + 1, threads & ~chosen)
                elif step.name == "ret":
                    self._go(waiting, at + 1, threads & ~chosen)
                else:
                    if chosen.any():
                        handlers[step.name](self, step, chosen)
                    self._go(waiting, at + 1, threads)
            except (EmulationError, KeyError) as e:
                raise EmulationError(f"{program.name}: {step.text}: {e}") from e
        if any(map(len, self.copies)):
            raise EmulationError(f"{program.name}: ends before its asynchronous copies")
        return count

    def together(self, threads: Threads, size: int | None = None) -> None:
        """Raise EmulationError unless all threads of the block are here, or in every `size` of them all or none."""
        here = threads.reshape(-1, size or self.size)
        if not (here.all(1) | (~here.any(1) & (size is not None))).all():
            raise EmulationError("some threads went another way")

    def _register(self, name: str) -> Values:
        found = self._registers.get(name)
        if found is None:  # a predicate kept it from being written: bits that no result survives
            bits = self.program.widths[name.rstrip("0123456789")]
            found = (
                np.zeros(self.size, bool)
                if bits == 1
                else np.full(self.size, (1 << bits) - 1, UNSIGNED[bits])
            )
        return found

    @staticmethod
    def _go(waiting: dict[int, Threads], to: int, threads: Threads) -> None:
        if threads.any():
            waiting[to] = waiting[to] | threads if to in waiting else threads


def grouped(parts: list[Values]) -> Bytes:
    """Values [T] next to each other, as bytes [T, n]."""
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8).reshape(len(p), -1) for p in parts], 1)
