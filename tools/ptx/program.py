"""PTX as text, parsed: the instructions of one kernel, its labels, registers and parameters."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SHARED_BASE = 1024
"""Address of a kernel's shared memory, so that a null pointer is none of it."""
SHARED_SYMBOL = "global_smem"
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", re.S)


@dataclass(frozen=True)
class Address:
    """[base + offset]: a register or a parameter's name, or none."""

    base: str | None
    offset: int


Operand = str | int | Address | tuple["Operand", ...]
"""A register's name, an integer (of a float: its bits), an address, or several in braces."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """name: up to the first dot    types: what stands between the dots that follow    predicate: a register, or None"""

    name: str
    types: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    text: str


@dataclass(kw_only=True)
class Program:
    """A kernel. widths: bits of a register, by its letters, 1 for predicates    parameters: their names, in order"""

    name: str
    threads: int
    parameters: list[str]
    widths: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)


def parse(text: str) -> Program:
    """The one kernel of a PTX file. Raises ValueError for text of another shape."""
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{(.*?)\n\}", text, re.S)
    if entry is None:
        raise ValueError("no kernel in this PTX")
    name, parameters, directives, body = entry.groups()
    threads = re.search(r"\.reqntid (\d+)", directives)
    if threads is None:
        raise ValueError(f"{name}: no .reqntid")
    program = Program(
        name=name,
        threads=int(threads[1]),
        parameters=[p.split()[-1] for p in parameters.split(",") if p.strip()],
    )
    for statement in _statements(body):
        if statement.endswith(":"):
            program.labels[statement[:-1]] = len(program.instructions)
        elif found := re.fullmatch(r"\.reg \.([a-z]+)(\d*)\s+(.*)", statement):
            for register in found[3].split(","):
                program.widths[register.split("<")[0].strip().rstrip("0123456789")] = int(found[2] or 1)
        elif not statement.startswith("."):
            program.instructions.append(_instruction(statement))
    return program


def _statements(body: str) -> Iterator[str]:
    """Labels with their colon, and what ends with a semicolon; directives that end with the line are left out."""
    body = re.sub(r"^\s*\.(loc|pragma|file)\b[^\n]*$", "", body, flags=re.M)
    body = re.sub(r"^\s*([$\w]+:)\s*$", r"\1;", body, flags=re.M)
    for statement in body.split(";"):
        if stripped := statement.strip().lstrip("{} \t\n"):
            yield stripped


def _instruction(text: str) -> Instruction:
    found = _STATEMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"not an instruction: {text}")
    negated, predicate, operation, rest = found.groups()
    name, *types = operation.split(".")
    return Instruction(
        name=name,
        types=tuple(types),
        operands=tuple(_operand(o) for o in _split(rest)),
        predicate=predicate,
        negated=bool(negated),
        text=" ".join(text.split()),
    )


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [p.strip() for p in parts if p.strip()]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(o) for o in _split(text[1:-1]))
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        known = _number(base.strip())
        if known is None:
            return Address(base.strip(), int(offset.strip() or "0", 0))
        return Address(None, known + int(offset.strip() or "0", 0))
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> int | None:
    if re.fullmatch(r"0[fd][0-9A-Fa-f]+", text):
        return int(text[2:], 16)
    if text in ("true", "false"):
        return int(text == "true")
    symbol, _, offset = text.partition("+")
    if symbol == SHARED_SYMBOL:
        return SHARED_BASE + int(offset or "0", 0)
    return int(text.rstrip("U"), 0) if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text) else None
