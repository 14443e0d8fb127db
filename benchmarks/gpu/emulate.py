"""Run the compiled GPU kernels without a GPU, against the reference: their PTX in an emulator (`ptx`).

    python -m benchmarks.gpu.emulate [--arch 80,90] [--quick] [--tokens 1,12,40] [--jobs 2] [--markdown docs/gpu.md]

The cases are those of the `check` of benchmarks/gpu/measure.py, on small layers. Each launch is compiled for the
architecture, with its tiles, and run block by block; errors are against the reference, on bf16 activations. A race, a
launch that begins early and does not wait, an address out of bounds or a wrong result fails its case, is named, and exit
status is 1. The last line is JSON.
"""

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.gpu.check import COLUMNS, FORMATS, LIMITS, Check, relative_error
from benchmarks.lib.markdown import insert, table
from tools.ptx.emulator import Emulator
from tools.ptx.memory import EmulationError
from trilobite.kernels.gpu import tuning
from trilobite.kernels.gpu.launch import recording
from trilobite.measure import ahead

CPU = torch.device("cpu")
TOKENS = (1, 12, 40)
"""Rows: one, some for a tensor core's narrow side, and enough for the scaled form."""
WIDE = (("int3-g64", 20), ("e8p-3", 20))
"""Formats that are run with several steps over K, too."""
QUICK = (("int3-g64", 5), ("e8p-2", 0))
SIZES = {"rows": 80, "experts": 4, "intermediate": 128}
QUICK_SIZES = {"rows": 48, "experts": 3, "intermediate": 64}
STDERR = Console(stderr=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator on so many rows."""

    check: Check
    operator: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """failure: what went wrong, in a line, or nothing    launches, instructions: by kernel, those of whole blocks"""

    error: float
    failure: str
    launches: Counter[str]
    instructions: Counter[str]


def cases(quick: bool, tokens: tuple[int, ...]) -> list[Case]:
    """The largest first. quick: two formats, small matrices."""
    narrow, wide = COLUMNS
    layers = (
        [(f, 192) for f in QUICK] if quick else [(f, narrow) for f in FORMATS] + [(f, wide) for f in WIDE]
    )
    sizes = QUICK_SIZES if quick else SIZES
    checks = [Check(format=f, rank=r, k=k, device=CPU, **sizes) for (f, r), k in layers]
    found = [Case(check=c, operator=o, tokens=t) for c in checks for o in LIMITS for t in tokens]
    return sorted(found, key=lambda case: -case.tokens)


def emulate(case: Case) -> Outcome:
    """Run a case on the emulator, in a process that compiles (`ahead.pretend`)."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    emulator, error, failure, arch = Emulator(), float("nan"), "", ahead.pretended()
    try:
        with (
            tuning.pretending(tuning.general(f"sm_{arch}")),
            recording(emulator, capability=divmod(arch, 10)),
        ):
            found, expected = case.check.run(case.operator, case.tokens)
            error = relative_error(found, expected())
        if not error < LIMITS[case.operator]:
            failure = f"off by {error:.2g}, at most {LIMITS[case.operator]:g} is rounding"
    except EmulationError as e:
        failure = str(e)
    return Outcome(
        error=error,
        failure=failure,
        launches=emulator.launches,
        instructions=emulator.instructions,
    )


def rows_of(done: dict[tuple[str, Case], Outcome]) -> list[tuple[str, ...]]:
    """A line for every format, rank, K and architecture."""
    rows = []
    for check, arch in dict.fromkeys((case.check, arch) for arch, case in done):
        mine = {case: outcome for (a, case), outcome in done.items() if (a, case.check) == (arch, check)}
        worst = [max(o.error for c, o in mine.items() if c.operator == name) for name in LIMITS]
        instructions = sum(sum(o.instructions.values()) for o in mine.values())
        launches = sum(sum(o.launches.values()) for o in mine.values())
        rows.append(
            (
                check.name,
                f"sm_{arch}",
                *(f"{error * 1e3:.2f}" for error in worst),
                str(launches),
                f"{instructions / 1e6:.1f}",
            )
        )
    return sorted(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="80,90")
    parser.add_argument("--quick", action="store_true", help="two formats, one width")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--jobs", type=int, default=ahead.cores())
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    wanted = cases(arguments.quick, tuple(map(int, arguments.tokens.split(","))))
    done: dict[tuple[str, Case], Outcome] = {}
    for arch in arguments.arch.split(","):
        with ProcessPoolExecutor(
            arguments.jobs, get_context("spawn"), ahead.pretend, (int(arch),)
        ) as workers:
            outcomes = track(
                workers.map(emulate, wanted), f"Emulating sm_{arch}", total=len(wanted), console=STDERR
            )
            for case, outcome in zip(wanted, outcomes, strict=True):
                done[arch, case] = outcome
                if outcome.failure:
                    where = f"{case.operator} of {case.check.name}, {case.tokens} rows, sm_{arch}"
                    print(f"{where}: {outcome.failure}", flush=True)
    header = ("layer", "arch", *(f"{name}, 1e-3" for name in LIMITS), "launches", "10^6 instructions")
    text = table(header, rows_of(done))
    print(text)
    if arguments.markdown:
        insert(arguments.markdown, "gpu-emulate", text)
    failed = sum(bool(o.failure) for o in done.values())
    launches: Counter[str] = sum((o.launches for o in done.values()), Counter())
    print(json.dumps({"cases": len(done), "failed": failed, "launches": launches}))
    if failed:
        sys.exit(f"error: {failed} of {len(done)} cases failed; they are named above")


if __name__ == "__main__":
    main()
