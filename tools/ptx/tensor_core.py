"""Instructions of whole warps: tensor core products, their fragments in shared memory, asynchronous copies."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .arithmetic import from_bf16, handles, several
from .block import WARP, Block, Threads, Values
from .memory import Addresses, EmulationError
from .program import Instruction, Operand

Matrix = NDArray[np.float64]
WARP_GROUP = 4 * WARP
QUAD, GROUP = np.arange(WARP) % 4, np.arange(WARP) // 4
"""Of a lane: its place in its quad, and its quad: what fragments are laid out by."""
SWIZZLE = {0: 1, 3: 2, 2: 4, 1: 8}
"""Units of 16 bytes in a row of a wgmma operand, by its descriptor's code."""


def numbers(words: Values, kind: str) -> Matrix:
    """Words of 32 bits [...] as numbers [..., 2] of 16 bits each, low half first, or one of tf32."""
    words = np.ascontiguousarray(words)[..., None]
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    halves = words.view(np.uint16)
    return (from_bf16(halves) if kind == "bf16" else halves.view(np.float16)).astype(np.float64)


def _fragments(words: list[Values], kind: str, rows: int) -> Matrix:
    """An operand in registers: words [..., 32] -> [..., rows, 16] (tf32: 8). rows: 16, or 8 of the right one."""
    width = 8 if kind == "tf32" else 16
    found = np.zeros((*words[0].shape[:-1], rows, width))
    per_word = width // 8
    for at, word in enumerate(words):
        row, column = (8 * (at % 2), at // 2) if rows == 16 else (0, at)
        values = numbers(word, kind)
        for p in range(per_word):
            found[..., GROUP + row, per_word * (QUAD + 4 * column) + p] = values[..., p]
    return found


@handles("mma")
def _multiply(b: Block, i: Instruction, threads: Threads) -> None:
    """d = a b^T + c for fragments of 16 x 8 numbers a warp."""
    b.together(threads)
    kind = i.types[-2]
    if i.types[2] != ("m16n8k8" if kind == "tf32" else "m16n8k16"):
        raise EmulationError("unknown product")
    target, left, right, start = (several(o) for o in i.operands)
    a, w = (
        _fragments([b.read(o, "b32").reshape(-1, WARP) for o in side], kind, rows)
        for side, rows in ((left, 16), (right, 8))
    )
    products = a @ w.swapaxes(-1, -2)
    for at, (to, c) in enumerate(zip(target, start, strict=True)):
        part = products[:, GROUP + 8 * (at // 2), 2 * QUAD + at % 2].reshape(-1)
        b.write(to, (part + b.read(c, "f32")).astype(np.float32), threads)


@handles("ldmatrix", "stmatrix")
def _matrices(b: Block, i: Instruction, threads: Threads) -> None:
    """8 x 8 matrices of 16-bit numbers between shared memory, a row an address, and fragments of a warp."""
    b.together(threads)
    storing, turned = i.name == "stmatrix", "trans" in i.types
    memory, fragments = i.operands if storing else i.operands[::-1]
    at = b.address(memory, "b32").reshape(-1, WARP)
    warps = np.repeat(b.warp[::WARP], 8)
    row, column = (2 * QUAD, GROUP) if turned else (GROUP, 2 * QUAD)
    steps = ((0, 0), (1, 0) if turned else (0, 1))
    for n, register in enumerate(several(fragments)):
        rows = at[:, 8 * n : 8 * n + 8].reshape(-1)
        if storing:
            halves = np.ascontiguousarray(b.read(register, "b32")).view(np.uint16).reshape(-1, WARP, 2)
            matrix = np.zeros((len(at), 8, 8), np.uint16)
            for p, (down, right) in enumerate(steps):
                matrix[:, row + down, column + right] = halves[..., p]
            b.shared.store(rows, matrix.reshape(-1, 8).view(np.uint8), warps)
        else:
            matrix = b.shared.load(rows, 16, warps).view(np.uint16).reshape(-1, 8, 8)
            halves = np.stack([matrix[:, row + down, column + right] for down, right in steps], -1)
            b.write(register, np.ascontiguousarray(halves).view(np.uint32).reshape(-1), threads)


@handles("cp")
def _copy(b: Block, i: Instruction, threads: Threads) -> None:
    """cp.async: from global to shared memory, done as late as the kernel allows, when it waits."""
    if i.types[1] == "commit_group":
        b.copies.append([])
        return
    if i.types[1] == "wait_group":
        _finish(b.copies, i.operands[0])
        return
    to, source, size, *some = i.operands
    assert isinstance(size, int)
    at, origin, warps = b.address(to, "b32")[threads], b.address(source, "b64")[threads], b.warp[threads]
    count = b.read(some[0], "u32")[threads] if some else np.full(len(at), size)
    if not np.isin(count, (0, size)).all():
        raise EmulationError("unknown copy of a part")
    data = np.zeros((len(at), size), np.uint8)
    data[count > 0] = b.memory.load(origin[count > 0], size)
    b.shared.begin_copy(at, size, warps)
    b.copies[-1].append(partial(b.shared.end_copy, at, data, warps))


def _finish(groups: list[list[Callable[[], None]]], left: Operand) -> None:
    """Do what was committed, all but the last `left` groups; the very last one is still open."""
    assert isinstance(left, int)
    while len(groups) - 1 > left:
        for job in groups.pop(0):
            job()


@handles("wgmma")
def _warp_group(b: Block, i: Instruction, threads: Threads) -> None:
    """d = a b + d for 64 rows a warp group, asynchronously: done as late as the kernel allows, when it waits."""
    b.together(threads)
    if i.types[0] == "commit_group":
        b.products.append([])
    elif i.types[0] == "wait_group":
        _finish(b.products, i.operands[0])
    elif i.types[0] != "fence":
        for first in range(0, b.size, WARP_GROUP):
            b.products[-1].append(_prepare(b, i, slice(first, first + WARP_GROUP)))


def _prepare(b: Block, i: Instruction, group: slice) -> Callable[[], None]:
    """Read what one warp group's product needs at its issue. returns: the product, to be called at the wait."""
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", i.types[3])
    if shape is None or i.types[4] != "f32":
        raise EmulationError("unknown product")
    columns, depth, kind = int(shape[1]), int(shape[2]), i.types[-1]
    target, left, right, scale_d, *rest = i.operands
    scale_a, scale_b, *turned = rest
    if (scale_a, scale_b) != (1, 1):
        raise EmulationError("unknown signs")
    keeps = bool(b.read(scale_d, "pred")[group][0])
    right_at = _operand_places(
        _descriptor(b, right, group), columns, depth, kind, bool(turned and turned[-1])
    )
    width = 4 if kind == "tf32" else 2
    b.shared.begin_use(right_at, width)
    a: Matrix | None = None
    left_at: Addresses | None = None
    if isinstance(left, tuple):
        words = [b.read(o, "b32")[group].reshape(4, WARP) for o in left]
        a = _fragments(words, kind, 16).reshape(64, depth)
    else:
        left_at = _operand_places(_descriptor(b, left, group), 64, depth, kind, bool(turned and turned[0]))
        b.shared.begin_use(left_at, width)

    def product() -> None:
        w = _stored(b, right_at, columns, depth, kind)
        rows = a if left_at is None else _stored(b, left_at, 64, depth, kind)
        assert rows is not None
        sums = (rows @ w.T).reshape(4, 16, columns)
        inside = np.zeros(b.size, bool)
        inside[group] = True
        for at, register in enumerate(several(target)):
            part = sums[:, GROUP + 8 * (at % 4 // 2), 8 * (at // 4) + 2 * QUAD + at % 2].reshape(-1)
            values = np.zeros(b.size, np.float32)
            before = b.read(register, "f32")[group] if keeps else 0
            values[group] = part + before
            b.write(register, values, inside)

    return product


def _descriptor(b: Block, operand: Operand, group: slice) -> int:
    found = np.unique(b.read(operand, "b64")[group])
    if len(found) > 1:
        raise EmulationError("the threads of a warp group describe different matrices")
    return int(found[0])


def _operand_places(descriptor: int, rows: int, depth: int, kind: str, turned: bool) -> Addresses:
    """Addresses of a matrix [rows, depth] that a descriptor describes, in one dimension (PTX ISA, wgmma).

    turned: rows lie next to each other, not columns
    """
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise EmulationError("unknown base of a swizzle")
    width = 4 if kind == "tf32" else 2
    units, unit = SWIZZLE[descriptor >> 62 & 3], 16 // width
    row, column = np.arange(rows)[:, None], np.arange(depth)
    inner, outer = (row, column) if turned else (column, row)
    if units > 1:
        near = inner % (units * unit) if turned else inner
        at = near * width + outer % 8 * 16 * units + outer // 8 * stride
        at = at + (inner // (units * unit) * leading if turned else 0)
    elif turned:
        at = inner % unit * width + inner // unit * stride + outer % 8 * 16 + outer // 8 * leading
    else:
        at = inner % unit * width + inner // unit * leading + outer % 8 * 16 + outer // 8 * stride
    at = np.asarray(start + at, np.int64).reshape(-1)
    return at ^ (at >> 7 & units - 1) << 4


def _stored(b: Block, at: Addresses, rows: int, depth: int, kind: str) -> Matrix:
    data = np.ascontiguousarray(b.shared.end_use(at, 4 if kind == "tf32" else 2))
    if kind == "tf32":
        found = numbers(data.view(np.uint32), kind)
    else:
        found = numbers(data.view(np.uint16).astype(np.uint32), kind)[..., 0]
    return found.reshape(rows, depth)
