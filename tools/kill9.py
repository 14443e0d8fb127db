"""Is a run that was killed at random moments byte-identical to an undisturbed one?

    python -m tools.kill9 ../shared/models/tiny-mixtral --recipe milo-s1 --kills 20

Compresses once undisturbed, then again and again killed with SIGKILL, continuing each time. The moment is
drawn from the time between the first file and the end of the undisturbed run, so that kills hit the work and
not the start of Python. When a kill finds everything in place, or a run ends by itself, its files are
compared and deleted, and the next one begins. The code and the native library must not change meanwhile.
Prints a table and one line of JSON; exit status 1 where bytes differ.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lib.script import parser
from trilobite.checkpoint.packed import TIMES


def digests(path: Path) -> dict[str, str]:
    """sha256 of every file, hidden ones too, but for the one that holds clocks."""
    files = (p for p in path.rglob("*") if p.is_file() and p.name != TIMES)
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def journal(dst: Path) -> int:
    """How many tensors an unfinished run has noted as finished."""
    path = dst / ".partial" / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def start(arguments: argparse.Namespace, dst: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "trilobite",
        "compress",
        arguments.source,
        str(dst),
        "--recipe",
        arguments.recipe,
    ]
    command += ["--jobs", str(arguments.jobs), "--device", "cpu"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(child: subprocess.Popen[bytes]) -> None:
    """Wait for a run that is to succeed."""
    _, error = child.communicate()
    if child.returncode:
        sys.exit(f"compress failed with status {child.returncode}: {error.decode().strip()}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("source", help="folder of a checkpoint")
    options.add_argument("--recipe", default="milo-s1")
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--work", type=Path, help="folder for the results (default: a temporary one)")
    arguments = options.parse_args()
    work = Path(tempfile.mkdtemp(prefix="kill9-", dir=arguments.work))
    try:
        identical = measure(arguments, work)
    finally:
        shutil.rmtree(work)
    sys.exit(0 if identical else 1)


def first_file(child: subprocess.Popen[bytes], dst: Path) -> None:
    """Wait until a run has begun to write, or has ended."""
    while child.poll() is None and not (dst / ".partial" / "ranks.json").exists():
        time.sleep(0.01)


def measure(arguments: argparse.Namespace, work: Path) -> bool:
    child = start(arguments, work / "undisturbed")
    first_file(child, work / "undisturbed")
    began = time.monotonic()
    finish(child)
    seconds = time.monotonic() - began
    expected = digests(work / "undisturbed")
    size = sum(p.stat().st_size for p in (work / "undisturbed").iterdir())
    print(f"undisturbed: {len(expected)} files, {size / 1e6:.1f} MB, {seconds:.1f} s of work")
    print(f"{'kill':>4} {'at s':>6} {'run':>4} {'tensors noted':>14}  state")
    chance, dst = random.Random(arguments.seed), work / "killed"
    kills, runs, different = 0, 1, 0
    while kills < arguments.kills or dst.exists():
        child = start(arguments, dst)
        if kills >= arguments.kills:
            finish(child)
        else:
            continued = (dst / ".partial").exists()
            first_file(child, dst)
            # A continued run finds ranks.json at once, while Python is still starting.
            at, began = chance.uniform(0, seconds * (2 if continued else 1)), time.monotonic()
            try:
                child.wait(at)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
            _, error = child.communicate()
            if child.returncode == -signal.SIGKILL:
                kills += 1
                finished = (dst / "config.json").exists() and not (dst / ".partial").exists()
                state = "finished" if finished else "unfinished"
                print(f"{kills:>4} {at:>6.2f} {runs:>4} {journal(dst):>14}  {state}", flush=True)
                if not finished:
                    continue
            elif child.returncode:
                sys.exit(f"compress failed after a kill: {error.decode().strip()}")
            else:
                # Faster than the first one: the machine has become idle.
                seconds = min(seconds, max(0.5, time.monotonic() - began))
        same = digests(dst) == expected
        different += not same
        print(
            f"{'':>4} {'':>6} {runs:>4} {'':>14}  finished, {'identical' if same else 'DIFFERENT'}",
            flush=True,
        )
        runs += 1
        shutil.rmtree(dst)
    row = {
        "benchmark": "kill9",
        "source": os.path.basename(os.path.abspath(arguments.source)),
        "recipe": arguments.recipe,
        "kills": kills,
        "finished_runs": runs - 1,
        "different": different,
        "seconds": round(seconds, 2),
    }
    print(json.dumps(row))
    return not different


if __name__ == "__main__":
    main()
