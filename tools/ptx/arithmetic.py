"""Instructions of single threads: arithmetic, comparisons, conversions, loads and stores, and shuffles in a warp."""

from collections.abc import Callable

import numpy as np

from .block import UNSIGNED, WARP, Block, Handler, Threads, Values, dtype_of, grouped
from .memory import EmulationError
from .program import Address, Instruction, Operand

HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler of these instructions."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def from_bf16(bits: Values) -> Values:
    """bf16 as bits -> fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: Values) -> Values:
    """fp32 -> bf16 as bits, to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _divide(a: Values, b: Values) -> Values:
    if not b.all():
        raise EmulationError("division by zero")
    exact = a.astype(np.int64), b.astype(np.int64)
    return np.trunc(exact[0] / exact[1]).astype(a.dtype)


BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
FUNCTIONS: dict[str, Callable[[Values], Values]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
}


@handles("add", "sub", "min", "max", "and", "or", "xor")
def _binary(b: Block, i: Instruction, threads: Threads) -> None:
    x, y = (b.read(o, i.types[-1]) for o in i.operands[1:])
    b.write(i.operands[0], BINARY[i.name](x, y), threads)


@handles("mul", "mad", "fma")
def _multiply(b: Block, i: Instruction, threads: Threads) -> None:
    kind, wide = i.types[-1], "wide" in i.types
    x, y = (b.read(o, kind) for o in i.operands[1:3])
    result = kind
    if wide or kind == "f32":  # fused: one rounding, of the exact product's sum
        result = f"{kind[0]}{2 * int(kind[1:])}"
        x, y = x.astype(dtype_of(result)), y.astype(dtype_of(result))
    elif "lo" not in i.types:
        raise EmulationError("unknown product")
    product = x * y
    if len(i.operands) > 3:
        product = product + b.read(i.operands[3], result if wide else kind)
    b.write(i.operands[0], product if wide else product.astype(dtype_of(kind)), threads)


@handles("div", "rem")
def _quotient(b: Block, i: Instruction, threads: Threads) -> None:
    x, y = (b.read(o, i.types[-1]) for o in i.operands[1:])
    if x.dtype.kind == "f":
        b.write(i.operands[0], x / y, threads)
        return
    y = np.where(threads, y, 1)
    quotient = _divide(x, y)
    b.write(i.operands[0], quotient if i.name == "div" else x - quotient * y, threads)


@handles("neg", "abs", "not", "ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh")
def _unary(b: Block, i: Instruction, threads: Threads) -> None:
    b.write(i.operands[0], FUNCTIONS[i.name](b.read(i.operands[1], i.types[-1])), threads)


@handles("copysign")
def _copysign(b: Block, i: Instruction, threads: Threads) -> None:
    sign, x = (b.read(o, i.types[-1]) for o in i.operands[1:])
    b.write(i.operands[0], np.copysign(x, sign), threads)


@handles("shl", "shr")
def _shift(b: Block, i: Instruction, threads: Threads) -> None:
    x = b.read(i.operands[1], i.types[-1])
    by = b.read(i.operands[2], "u32").astype(np.int64)
    most = 8 * x.dtype.itemsize - 1
    inside = np.minimum(by, most).astype(x.dtype)
    shifted = x << inside if i.name == "shl" else x >> inside
    if x.dtype.kind == "u":
        shifted = np.where(by > most, 0, shifted).astype(x.dtype)
    b.write(i.operands[0], shifted, threads)


@handles("shf")
def _funnel(b: Block, i: Instruction, threads: Threads) -> None:
    if i.types[:2] != ("l", "wrap"):
        raise EmulationError("unknown shift")
    low, high, by = (b.read(o, "u32").astype(np.uint64) for o in i.operands[1:])
    both = (high << np.uint64(32) | low) << (by & np.uint64(31))
    b.write(i.operands[0], (both >> np.uint64(32)).astype(np.uint32), threads)


@handles("bfe")
def _extract(b: Block, i: Instruction, threads: Threads) -> None:
    x = b.read(i.operands[1], i.types[-1]).astype(np.int64)
    first, count = (b.read(o, "u32").astype(np.int64) & 255 for o in i.operands[2:])
    if (first + count > 32).any() or not count.all():
        raise EmulationError("unknown bit field")
    field = x >> first & (1 << count) - 1
    if i.types[-1] == "s32":
        field -= (field >> count - 1) << count
    b.write(i.operands[0], field.astype(dtype_of(i.types[-1])), threads)


@handles("prmt")
def _permute(b: Block, i: Instruction, threads: Threads) -> None:
    x, y, selector = (b.read(o, "u32") for o in i.operands[1:])
    pool, result = grouped([x, y]), np.empty((b.size, 4), np.uint8)
    for at in range(4):
        choice = selector >> np.uint32(4 * at) & 15
        byte = pool[b.thread, choice & 7]
        result[:, at] = np.where(choice & 8, np.where(byte & 0x80, 0xFF, 0), byte)
    b.write(i.operands[0], result.view(np.uint32)[:, 0], threads)


@handles("popc")
def _count(b: Block, i: Instruction, threads: Threads) -> None:
    x = b.read(i.operands[1], i.types[-1])
    ones = np.unpackbits(grouped([x]), axis=1).sum(1, dtype=np.uint32)
    b.write(i.operands[0], ones, threads)


@handles("setp")
def _compare(b: Block, i: Instruction, threads: Threads) -> None:
    x, y = (b.read(o, i.types[-1]) for o in i.operands[1:])
    name = i.types[0]
    if name in ("nan", "num"):
        result = (np.isnan(x) | np.isnan(y)) ^ (name == "num")
    elif name.endswith("u"):  # true where an operand is no number
        result = COMPARISONS[name[:-1]](x, y) | np.isnan(x) | np.isnan(y)
    else:
        result = COMPARISONS[name](x, y)
        if x.dtype.kind == "f":
            result &= ~(np.isnan(x) | np.isnan(y))
    b.write(i.operands[0], result, threads)


@handles("selp")
def _select(b: Block, i: Instruction, threads: Threads) -> None:
    x, y = (b.read(o, i.types[-1]) for o in i.operands[1:3])
    b.write(i.operands[0], np.where(b.read(i.operands[3], "pred"), x, y), threads)


@handles("mov")
def _move(b: Block, i: Instruction, threads: Threads) -> None:
    target, source = i.operands
    kind = i.types[-1]
    if isinstance(target, tuple):
        parts = np.ascontiguousarray(b.read(source, kind)).view(UNSIGNED[int(kind[1:]) // len(target)])
        for at, part in enumerate(target):
            b.write(part, parts[at :: len(target)], threads)
    elif isinstance(source, tuple):
        each = f"b{int(kind[1:]) // len(source)}"
        b.write(target, grouped([b.read(s, each) for s in source]).view(dtype_of(kind))[:, 0], threads)
    else:
        b.write(target, b.read(source, kind), threads)


@handles("cvt")
def _convert(b: Block, i: Instruction, threads: Threads) -> None:
    *how, to, kind = i.types
    if to in ("bf16x2", "f16x2"):
        high, low = (b.read(o, kind) for o in i.operands[1:])
        pair = [to_bf16(v) if to == "bf16x2" else v.astype(np.float16) for v in (low, high)]
        b.write(i.operands[0], grouped(pair).view(np.uint32)[:, 0], threads)
        return
    x = b.read(i.operands[1], kind)
    if kind == "bf16":
        x = from_bf16(x)
    if to == "bf16":
        x = to_bf16(x.astype(np.float32))
    elif to == "tf32":  # to the nearest, ties away from zero
        x = (x.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
    else:
        if x.dtype.kind == "f" and to[0] != "f":
            x = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[how[0]](x)
        x = x.astype(dtype_of(to))
    b.write(i.operands[0], x, threads)


def several(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


@handles("ld")
def _load(b: Block, i: Instruction, threads: Threads) -> None:
    kind, source = i.types[-1], i.operands[1]
    targets = several(i.operands[0])
    if i.types[0] == "param":
        assert isinstance(source, Address)
        b.write(targets[0], b.read(b.parameters[str(source.base)], kind), threads)
        return
    width = dtype_of(kind).itemsize
    if i.types[0].startswith("shared"):
        at = b.address(source, "b32")[threads]
        data = b.shared.load(at, width * len(targets), b.warp[threads])
    else:
        data = b.memory.load(b.address(source, "b64")[threads], width * len(targets))
    values = np.zeros((len(targets), b.size), dtype_of(kind))
    values[:, threads] = np.ascontiguousarray(data).view(dtype_of(kind)).T
    for target, part in zip(targets, values, strict=True):
        b.write(target, part, threads)


@handles("st")
def _store(b: Block, i: Instruction, threads: Threads) -> None:
    data = grouped([b.read(s, i.types[-1]) for s in several(i.operands[1])])[threads]
    if i.types[0].startswith("shared"):
        b.shared.store(b.address(i.operands[0], "b32")[threads], data, b.warp[threads])
    else:
        b.memory.store(b.address(i.operands[0], "b64")[threads], data)


@handles("shfl")
def _shuffle(b: Block, i: Instruction, threads: Threads) -> None:
    b.together(threads, WARP)
    if isinstance(i.operands[0], tuple) or "|" in str(i.operands[0]):
        raise EmulationError("unknown shuffle")
    x, by, bounds = (b.read(o, "u32").astype(np.int64).reshape(-1, WARP) for o in i.operands[1:4])
    lane, segment = np.arange(WARP), bounds >> 8 & 31
    low, high = lane & segment, (lane & segment) | (bounds & 31 & ~segment)
    by = by & 31
    source, inside = {
        "bfly": (lane ^ by, (lane ^ by) <= high),
        "up": (lane - by, lane - by >= high),
        "down": (lane + by, lane + by <= high),
        "idx": (low | (by & ~segment), (low | (by & ~segment)) <= high),
    }[i.types[1]]
    taken = np.take_along_axis(x, np.where(inside, source, lane), 1)
    b.write(i.operands[0], taken.reshape(-1).astype(np.uint32), threads)


@handles("redux")
def _reduce(b: Block, i: Instruction, threads: Threads) -> None:
    b.together(threads, WARP)
    x = b.read(i.operands[1], i.types[-1]).reshape(-1, WARP)
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[i.types[1]]
    b.write(i.operands[0], np.repeat(function.reduce(x, axis=1, dtype=x.dtype), WARP), threads)


@handles("bar")
def _barrier(b: Block, i: Instruction, threads: Threads) -> None:
    if i.types[0] != "warp":
        b.together(threads)
        b.shared.barrier()


@handles("griddepcontrol")
def _grid_dependency(b: Block, i: Instruction, threads: Threads) -> None:
    if i.types[0] == "wait":
        b.together(threads)
        b.memory.wait()


@handles("fence", "membar")
def _fence(b: Block, i: Instruction, threads: Threads) -> None:
    """Between one launch and the next nobody else looks, and accesses are in order here."""
