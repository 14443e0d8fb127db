"""What does a weight cost on ARM, where none is at hand? Instructions that one token takes, counted under emulation.

    python -m benchmarks.speed.arm [--page docs/performance.md]

Builds the library for ARM, runs one token through matrices of 64 and of 128 rows under QEMU, instruction by instruction,
and takes the difference: what the rows take, without the preparation of x. Cycles are llvm-mca's for a stretch of what
was executed, with everything in the first cache: a processor that is three wide (which is what LLVM 14 takes for a
Neoverse N1) and one that is six wide (for an Apple M1). They are models, not times. Needs g++-aarch64-linux-gnu,
qemu-user, binutils and llvm. The last line is JSON.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_page, parser, publish

SOURCE = Path(__file__).parents[2] / "csrc"
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
DISASSEMBLER, NAMES = "aarch64-linux-gnu-objdump", "aarch64-linux-gnu-nm"
TIERS = ("neon", "neon_i8mm")
FORMATS = {
    "int2-g64": (2, 64, 0),
    "int3-g64": (3, 64, 0),
    "int4-g64": (4, 64, 0),
    "int2-g16-super": (2, 16, 1),
    "int3-g16-super": (3, 16, 1),
    "int4-g32-super": (4, 32, 1),
}
"""Bits, columns of a group, and whether its scales are under super-scales."""
MODES = {"exact": 3, "int8": 1}
ROWS, COLUMNS = 64, 2048
PROCESSORS = {"3 wide": "neoverse-n1", "6 wide": "apple-m1"}
STRETCH = 4000
"""Instructions that are given to the model."""
_EXECUTED = re.compile(rb"^Trace \d+: \S+ \[[0-9a-f]+/([0-9a-f]+)/", re.MULTILINE)
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S.*)$", re.MULTILINE)
_ELSEWHERE = re.compile(r"^(b|bl|br|blr|ret|b\.\w+|cbn?z|tbn?z|adrp?|mrs|msr)\b")


def build(folder: Path) -> Path:
    """The program."""
    options = [
        "-DTRILOBITE_COUNT=ON",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
    ]
    subprocess.run(["cmake", "-S", SOURCE, "-B", folder, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
    return folder / "one_token"


def instructions(program: Path) -> dict[int, str]:
    """All of a program, by address, as an assembler reads them; those that go elsewhere as one that does nothing."""
    listed = subprocess.run(
        [DISASSEMBLER, "-d", "--no-show-raw-insn", program], check=True, capture_output=True, text=True
    ).stdout
    plain = ((at, re.sub(r"\s*(//|<).*", "", line)) for at, line in _LINE.findall(listed))
    return {int(at, 16): "nop" if _ELSEWHERE.match(line) else line for at, line in plain}


def library(program: Path) -> str:
    """From which address to which ours lies, as QEMU takes it."""
    names = subprocess.run([NAMES, "-C", program], check=True, capture_output=True, text=True).stdout
    found = [int(at, 16) for at in re.findall(r"^([0-9a-f]+) [tT] trilobite", names, re.MULTILINE)]
    return f"{min(found):#x}..{max(found):#x}"


def executed(
    program: Path, within: str, tier: str, code: Sequence[int], digits: int, rows: int, log: Path
) -> list[int]:
    """Addresses, in order."""
    case = [tier, *map(str, code), str(digits), str(rows), str(COLUMNS)]
    options = ["-cpu", "max", "-singlestep", "-d", "exec,nochain", "-dfilter", within, "-D", str(log)]
    command = [QEMU, *options, str(program), *case]
    subprocess.run(command, check=True)
    return [int(at, 16) for at in _EXECUTED.findall(log.read_bytes())]


def cycles(text: Sequence[str], processor: str) -> float:
    """Of an instruction, on average."""
    command = ["llvm-mca", "-mtriple=aarch64", f"-mcpu={processor}", "-mattr=+dotprod,+i8mm", "-iterations=1"]
    report = subprocess.run(command, input="\n".join(text), check=True, capture_output=True, text=True).stdout
    found = re.search(r"Total Cycles:\s+(\d+)", report)
    assert found
    return int(found[1]) / len(text)


def measure(many: Sequence[int], few: Sequence[int], listing: dict[int, str]) -> dict[str, float]:
    """Instructions, and cycles by processor, of a weight, from what was executed for more rows and for fewer."""
    before = Counter(few)
    inner = {at for at, times in Counter(many).items() if times > before[at]}
    stretch = [listing[at] for at in many if at in inner][-STRETCH:]
    count = (len(many) - len(few)) / (ROWS * COLUMNS)
    return {"instructions": count} | {name: count * cycles(stretch, cpu) for name, cpu in PROCESSORS.items()}


def main() -> None:
    """Prints a row for each format, tier and mode."""
    options = parser(__doc__)
    options.add_argument("--build", type=Path, help="folder for the program (default: one that goes away)")
    add_page(options, "arm")
    args = options.parse_args()
    rows, found = [("format", "tier", "activations", "instructions", *PROCESSORS)], []
    with TemporaryDirectory() as scratch:
        program = build(args.build or Path(scratch) / "build")
        listing, within, log = instructions(program), library(program), Path(scratch) / "log"
        for fmt in FORMATS:
            for tier in TIERS:
                for mode in MODES:
                    few, many = (
                        executed(program, within, tier, FORMATS[fmt], MODES[mode], count, log)
                        for count in (ROWS, 2 * ROWS)
                    )
                    of = measure(many, few, listing)
                    found.append({"format": fmt, "tier": tier, "activations": mode} | of)
                    rows.append((fmt, tier, mode, *(f"{v:.3f}" for v in of.values())))
                    print(*rows[-1], flush=True)
    title = f"Of a weight, {ROWS} rows of {COLUMNS} columns:"
    report = table(rows[0], rows[1:])
    publish(report, {"benchmark": "arm", "rows": found}, page=args.page, marker="arm", title=title)


if __name__ == "__main__":
    main()
