"""Starts small runs on a machine with more to do than it has cores, and prints all stacks of one that stalls.

    python tools/stalls.py --starts 200 --busy 6 --minutes 40

Kinds of runs: `compress` with a recipe, and `generate`, which spins and sleeps in the engine's own threads.
A run is late when it takes a multiple of the median of its kind; then Python's stacks (faulthandler), native ones
(gdb, where it is installed) and the state of every thread are printed. Late is not stalled: on a full machine a run
waits for cores. So every run is watched for *quiet* time, in which none of its threads runs, wants to run, or waits
for a disk: what a lost wake-up or a lock that nobody returns looks like, even where the run ends after all.
The last line is JSON.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "tiny-moe"
GENERATE = "generate"
KINDS = ("rtn3", "milo-s1", "gptq3", GENERATE)
TICK = 0.1
LATE = 5
"""Multiple of the median after which the stacks are printed; twice that, and once more."""
FIRST_LIMIT = 150.0
"""Seconds that stand in for the late limit while there is no median."""
KILL = 600.0
CHILD = (
    "import faulthandler, runpy, signal, sys; faulthandler.register(signal.SIGUSR1, all_threads=True); "
    "sys.argv[0] = 'trilobite'; runpy.run_module('trilobite', run_name='__main__')"
)


@dataclass
class Run:
    """One start.

    folder_after: seconds until the packed folder was there
    quiet: longest stretch of seconds in which no thread ran, wanted to run, or waited for a disk
    """

    kind: str
    seconds: float = 0.0
    cpu: float = 0.0
    quiet: float = 0.0
    disk: float = 0.0
    status: int = 0
    folder_after: float | None = None
    reports: int = field(default=0, repr=False)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that do nothing but use cores; they end with this one."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}:\n  for _ in range(10**6): pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def states(pid: int) -> list[str]:
    """One letter for each thread: R runs or wants to, D waits for a disk, S sleeps."""
    found = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.append(stat.read_text().rpartition(")")[2].split()[0])
        except OSError:  # the thread has ended
            continue
    return found


def report(process: "subprocess.Popen[bytes]", run: Run, log: Path) -> None:
    """Print the stacks of all threads, Python's and native, and what each thread does in the kernel."""
    run.reports += 1
    print(f"--- {run.kind}: {run.seconds:.0f} s, quiet {run.quiet:.1f} s, pid {process.pid}", flush=True)
    process.send_signal(signal.SIGUSR1)
    time.sleep(2)
    print(log.read_text(errors="replace")[-6000:])
    for task in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
        try:
            words = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
            run_ns, wait_ns, _ = (task / "schedstat").read_text().split()
        except OSError:
            continue
        print(
            task.name, *words, f"ran {int(run_ns) / 1e9:.2f} s, waited for a core {int(wait_ns) / 1e9:.2f} s"
        )
    for kind in ("cpu", "io", "memory"):
        print(kind, Path(f"/proc/pressure/{kind}").read_text().splitlines()[0])
    if shutil.which("gdb"):
        command = [
            "gdb",
            "-p",
            str(process.pid),
            "-batch",
            "-nx",
            "-ex",
            "set pagination off",
            "-ex",
            "thread apply all bt 25",
        ]
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
            print(done.stdout[-12000:])
    sys.stdout.flush()


def arguments(kind: str, packed: Path, out: Path) -> list[str]:
    """Of the command line, for one kind of run."""
    if kind == GENERATE:
        return ["generate", str(packed), "The captain", "--tokens", "24"]
    calibration = [
        "--calibration",
        str(ROOT / "examples" / "heldout.txt"),
        "--samples",
        "4",
        "--context",
        "128",
    ]
    return ["compress", str(MODEL), str(out), "--recipe", kind, *(calibration if kind == "gptq3" else ())]


def start(kind: str, packed: Path, folder: Path, limit: float) -> Run:
    """One run, watched until it ends. packed: a packed checkpoint for `generate`."""
    run, out, log = Run(kind), folder / "out", folder / "log"
    began = quiet_since = time.monotonic()
    with log.open("wb") as file:
        command = [sys.executable, "-c", CHILD, *arguments(kind, packed, out)]
        process = subprocess.Popen(command, stdout=file, stderr=file)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            now = time.monotonic()
            run.seconds = now - began
            if pid:
                break
            letters = states(process.pid)
            if set(letters) == {"S"}:
                run.quiet = max(run.quiet, now - quiet_since)
            else:
                quiet_since = now
            run.disk += TICK * ("D" in letters and "R" not in letters)
            if run.folder_after is None and out.exists():
                run.folder_after = run.seconds
            if run.seconds > limit * 2**run.reports and run.reports < 3:
                report(process, run, log)
                quiet_since = time.monotonic()
            if run.seconds > KILL:
                process.kill()
            time.sleep(TICK)
    process.returncode = run.status = os.waitstatus_to_exitcode(status)
    run.cpu = usage.ru_utime + usage.ru_stime
    if run.status:
        print(f"{kind}: exit status {run.status}\n{log.read_text(errors='replace')[-2000:]}", flush=True)
    return run


def summary(runs: list[Run]) -> dict[str, object]:
    """What the last line says."""
    by_kind: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_kind[run.kind].append(run)
    return {
        "starts": len(runs),
        "failed": sum(run.status != 0 for run in runs),
        "reported": sum(run.reports > 0 for run in runs),
        **{
            kind: {
                "starts": len(some),
                "median_s": round(statistics.median(r.seconds for r in some), 1),
                "max_s": round(max(r.seconds for r in some), 1),
                "median_cpu_s": round(statistics.median(r.cpu for r in some), 1),
                "max_cpu_s": round(max(r.cpu for r in some), 1),
                "max_quiet_s": round(max(r.quiet for r in some), 2),
                "max_disk_s": round(max(r.disk for r in some), 2),
                "max_folder_after_s": round(max(r.folder_after or 0.0 for r in some), 1),
            }
            for kind, some in by_kind.items()
        },
    }


def main() -> None:
    """Runs until `--starts` are done or `--minutes` are over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument(
        "--busy", type=int, default=3 * (os.cpu_count() or 1), help="processes that only use cores"
    )
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="recipes, and generate")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    runs: list[Run] = []
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as kept, busy(args.busy):
        packed = Path(kept) / "packed"
        if GENERATE in kinds:
            first = [sys.executable, "-m", "trilobite", *arguments("milo-s1", packed, packed)]
            subprocess.run(first, check=True, stdout=subprocess.DEVNULL)
        while len(runs) < args.starts and time.monotonic() < end:
            kind = kinds[len(runs) % len(kinds)]
            before = [run.seconds for run in runs if run.kind == kind]
            limit = max(10.0, LATE * statistics.median(before)) if len(before) >= 5 else FIRST_LIMIT
            with tempfile.TemporaryDirectory() as folder:
                run = start(kind, packed, Path(folder), limit)
            runs.append(run)
            print(len(runs), run, flush=True)
    print(json.dumps(summary(runs)))
    sys.exit(any(run.status for run in runs))


if __name__ == "__main__":
    main()
