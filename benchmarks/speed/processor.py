"""What this processor can do, by one command: the tables of docs/performance.md, and which aims it meets.

    python -m benchmarks.speed.processor FOLDER --page docs/processors/NAME.md [--only steps,compress]

Runs one script after another, each of which needs the machine for itself: half an hour on two fast cores, and before the
first time as long to make what they take. FOLDER keeps that (10 GB: packed models, files for llama.cpp, its programs for
each instruction set, which take pip and a compiler), logs, and what was found: `--only` measures some parts anew, and
the aims are those of all. The page is begun where it is not there; its title is the processor's name for itself, until
you write another. A part that fails is named, and the others go on. The last line is JSON.
"""

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import gguf, llama, whole_models
from benchmarks.lib.aims import OF, Aim, aims_table
from benchmarks.lib.markdown import insert, markers
from benchmarks.lib.script import ROOT, parser
from benchmarks.speed import compress, cpu, peers, prompts, steps
from trilobite import doctor
from trilobite.kernels.cpu import engine

AIMS = "aims"
SHAPES = {"mixtral": 2, "deepseek": 4, "qwen3": 4}
"""Models of `whole_models`, and the layers of llama.cpp's files of them."""
BESIDE = 2
"""So many of them run beside llama.cpp on every instruction set."""
OTHERS = ("avx2", "avx_vnni", "avx512", "avx512_vnni")
"""Instruction sets beside all that the processor has: those for which llama.cpp has other kernels."""
LAPTOP = ("avx_vnni", "avx2")
"""The first of them that a processor has beside its own stands for laptops."""
PLAIN = ("avx2",)
"""What compression is measured on, too."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A script to run.

    title: above its tables    tables: names of their markers    page: the script's option for a page
    cap: instruction set that TRILOBITE_ISA names    aims: key of `OF`    models, peers: whether it takes ours, llama.cpp
    """

    title: str
    script: Any
    arguments: Sequence[object]
    tables: Sequence[str]
    page: str = "--page"
    cap: str = ""
    aims: str = ""
    models: bool = False
    peers: bool = False


def parts(folder: Path, others: Sequence[str]) -> dict[str, Part]:
    """By name, in order. others: instruction sets to which all can be capped"""
    models = [folder / whole_models.SHAPES[name][1] for name in SHAPES]
    files = [folder / f"{name}.gguf" for name in SHAPES]
    beside = [*models[:BESIDE], "--gguf", *files[:BESIDE], "--builds", folder / "builds", "--tokens", 16]
    reading = ["--builds", folder / "builds", "--python", python(folder), "--rounds", 5]
    found = {
        "layers": Part(
            title="One layer, one token",
            script=cpu,
            arguments=["--only", "experts,tiers"],
            tables=["cpu-experts", "cpu-tiers"],
            page="--markdown",
            aims="layers",
        ),
        "steps": Part(
            title="Steps of decoding",
            script=steps,
            arguments=models,
            tables=[steps.MARKER],
            aims="steps",
            models=True,
        ),
        "texts": Part(
            title="Steps of several texts",
            script=steps,
            arguments=[*models, "--texts", 8, 32, "--rounds", 3],
            tables=[steps.OF_TEXTS],
            models=True,
        ),
        "peers": Part(
            title="Beside llama.cpp",
            script=peers,
            arguments=[*beside, "--rounds", 2, "--peers", llama.LLAMA, "--tiers", llama.NATIVE, *others],
            tables=[peers.MARKER],
            aims="peers",
            models=True,
            peers=True,
        ),
        "prompts": Part(
            title="Prompts of whole models",
            script=prompts,
            arguments=reading,
            tables=[prompts.MARKER],
            aims="prompts",
            peers=True,
        ),
        "compress": Part(
            title="Compression",
            script=compress,
            arguments=["--repeats", 1],
            tables=["compress"],
            aims="compress",
        ),
    }
    return found | _capped_parts(reading, others)


def _capped_parts(reading: Sequence[object], others: Sequence[str]) -> dict[str, Part]:
    """What is measured once more as lesser processors compute. reading: arguments of prompts"""
    found = {}
    for cap in [tier for tier in LAPTOP if tier in others][:1]:
        found[f"prompts-{cap}"] = Part(
            title=f"Prompts of whole models, {cap}",
            script=prompts,
            arguments=[*reading, "--tier", cap, "--machine", cap],
            tables=[f"{prompts.MARKER}-{cap}"],
            cap=cap,
            aims="prompts",
            peers=True,
        )
    for cap in [tier for tier in PLAIN if tier in others]:
        found[f"compress-{cap}"] = Part(
            title=f"Compression, {cap}",
            script=compress,
            arguments=["--repeats", 1, "--machine", cap],
            tables=[f"compress-{cap}"],
            cap=cap,
            aims="compress",
        )
    return found


def python(folder: Path) -> Path:
    """Of the environment that has the package gguf."""
    return folder / "python" / "bin" / "python"


def capped() -> list[str]:
    """Those of OTHERS that this processor has, and more than them."""
    best = engine.set_tier(None)
    found = [tier for tier in OTHERS if tier != best and engine.set_tier(tier) == tier]
    engine.set_tier(None)
    return found


def make_inputs(folder: Path, chosen: Sequence[Part], others: Sequence[str]) -> None:
    """What the parts take, where it is not there yet."""
    if any(part.models for part in chosen):
        _run([sys.executable, "-m", whole_models.__name__, folder, *SHAPES])
    if any(part.peers for part in chosen):
        for tier in (llama.NATIVE, *others):
            llama.build(llama.LLAMA, tier, folder / "builds")
        if not list((folder / "python").glob("lib/*/site-packages/gguf")):
            venv.create(folder / "python", with_pip=True)
            _run([python(folder), "-m", "pip", "install", "--quiet", "gguf"])
        for shape, layers in SHAPES.items():
            if not (file := folder / f"{shape}.gguf").exists():
                made = file.with_suffix(".part")
                _run([python(folder), "-m", gguf.__name__, made, "--shape", shape, "--layers", layers])
                made.rename(file)


def _run(command: Sequence[object]) -> None:
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env=_environment())


def _environment(cap: str = "") -> dict[str, str]:
    """Of children. Threads of OpenMP that spin would take the cores that the engine's need."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    return found | ({"TRILOBITE_ISA": cap} if cap else {})


def begin(page: Path, found: Mapping[str, Part]) -> None:
    """Write the page where it is not there, and to its end what it lacks of markers."""
    if not page.exists():
        facts = doctor.examine()
        about, memory = facts["cpu"], facts["memory"].get("total_GB", "?")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            f"# {about['model']}\n\n"
            "Written by `python -m benchmarks.speed.processor FOLDER --page PAGE`; "
            "docs/performance.md says what its tables show.\n\n"
            f"{about['cores_usable']} cores with {', '.join(about['flags'])}; {memory} GB of memory.\n\n"
            f"## Aims\n\n{_empty(AIMS)}",
            encoding="utf-8",
        )
    text = page.read_text(encoding="utf-8")
    for part in found.values():
        if lacking := [name for name in part.tables if markers(name)[0] not in text]:
            text += f"\n## {part.title}\n\n" + "\n".join(map(_empty, lacking))
    page.write_text(text, encoding="utf-8")


def _empty(name: str) -> str:
    return "\n".join(markers(name)) + "\n"


def measure(name: str, part: Part, folder: Path, page: Path) -> bool:
    """Run the script, its output to a log; whether it came to its end, and then what it found is kept."""
    log, started = folder / f"{name}.log", time.perf_counter()
    arguments = [*part.arguments, part.page, page.resolve()]
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, "-m", part.script.__name__, *map(str, arguments)],
            cwd=ROOT,
            env=_environment(part.cap),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    last = (log.read_text(encoding="utf-8").splitlines() or ["nothing"])[-1]
    if done.returncode:
        print(f"{name}: failed: {last} ({log})", flush=True)
        return False
    (folder / f"{name}.json").write_text(last, encoding="utf-8")
    print(f"{name}: {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    return True


def aims(folder: Path, found: Mapping[str, Part]) -> Iterator[Aim]:
    """Of all that was found, now or earlier."""
    for name, part in found.items():
        if part.aims and (kept := folder / f"{name}.json").exists():
            yield from OF[part.aims](json.loads(kept.read_text(encoding="utf-8")), part.cap)


def main() -> None:
    """Parse, make, measure, print."""
    options = parser(__doc__)
    options.add_argument("folder", type=Path, help="keeps what is measured, and what was found")
    options.add_argument("--page", type=Path, required=True, help="where the tables go")
    options.add_argument("--only", help="comma-separated parts")
    args = options.parse_args()
    folder, others = args.folder.resolve(), capped()
    found = parts(folder, others)
    names = args.only.split(",") if args.only else list(found)
    if unknown := [name for name in names if name not in found]:
        options.error(f"--only {unknown[0]}: no such part; here are {', '.join(found)}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        make_inputs(folder, [found[name] for name in names], others)
    except subprocess.CalledProcessError as e:
        sys.exit(
            f"error: what is measured cannot be made ({e}); --only layers,steps,texts,compress fetches nothing"
        )
    begin(args.page, found)
    failed = [name for name in names if not measure(name, found[name], folder, args.page)]
    known = list(aims(folder, found))
    report = aims_table(known)
    insert(args.page, AIMS, report)
    print(report)
    missed = [aim.what for aim in known if not aim.met]
    print(json.dumps({"aims": len(known), "missed": missed, "failed": failed}))
    if failed:
        sys.exit(f"error: {len(failed)} parts failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
