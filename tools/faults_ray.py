"""Is a run on a Ray cluster of two nodes, of which something dies again and again, byte-identical to an undisturbed one?

    python -m tools.faults_ray examples/tiny-moe --recipe milo-s1 --faults 50

The cluster is one of processes on this machine (Ray's own, for tests), on the loopback interface. Compresses once
without Ray, then again and again on the cluster, where at random moments something happens, several times in a run:

    worker   a process in the middle of a task is killed with SIGKILL
    node     one of the two nodes goes, with all that runs there; another one comes some time later
    driver   the command itself is killed with SIGKILL, and started again
    memory   a process in the middle of a task gets no more memory for a second
    storage  the disk is filled up; the command has to end with one line, and is started again when there is room
             (needs the right to mount a small file system in memory; left out otherwise)

When a run ends its files are compared and deleted, and the next one begins. Prints a table and one line of JSON; exit
status 1 where bytes differ, or where the command said anything but notes of its own.
"""

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.lib.ray_nodes import Nodes
from benchmarks.lib.script import parser
from tools.remains import digests, journal

OURS = re.compile(
    r"a worker (died|ran out of memory) over .*; done again.* \(\d\)|compress: \d+ %.*"
    r"|no node of the cluster has a core for us; waiting for one"
    r"|.*: is already complete; nothing was done"  # killed after its last act
)
"""Lines that the command may print on standard error."""
FULL = re.compile(r"error: .*: (the disk is full; nothing is lost: |the rest needs .* GB, the disk has ).*")
PAUSE = 5.0
"""Seconds between two faults at most, while there is work to disturb."""
ENDS = 300
"""Seconds after which a run that should have ended is a failure; those in which all of us are stopped do not count."""


def busy() -> list[int]:
    """Processes that are doing a task, of raylets that we started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            worker = int(folder.name)
            ours = _parent(_parent(worker)) == os.getpid()
            if ours and (folder / "cmdline").read_bytes().startswith(b"ray::_work"):
                found.append(worker)
    return found


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


class Run:
    """One command at a time, over and over until it succeeds."""

    def __init__(self, arguments: argparse.Namespace, work: Path, dst: Path, address: str | None) -> None:
        self.command = [sys.executable, "-m", "trilobite", "compress", arguments.source, str(dst)]
        self.command += ["--recipe", arguments.recipe, "--device", "cpu"]
        self.command += ["--ray", address] if address else ["--jobs", "1"]
        self.dst, self.errors = dst, work / "stderr"
        self.odd: list[str] = []
        self.start()

    def start(self) -> None:
        self.noted = journal(self.dst)
        with self.errors.open("wb") as errors:
            self.child = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=errors)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def begun(self) -> None:
        """Wait for the first tensors of this command to be noted, or for its end."""
        while self.child.poll() is None and journal(self.dst) <= self.noted:
            time.sleep(0.05)

    def ended(self, *, expected: re.Pattern[str] | None = None) -> int:
        """Wait for the end and look at what was said; returns the exit status."""
        status = self._status()
        for line in self.errors.read_text().splitlines():
            if not OURS.fullmatch(line) and not (expected and expected.fullmatch(line)):
                self.odd.append(line)
                print(f"     unexpected: {line}", flush=True)
        return status

    def _status(self) -> int:
        for _ in range(ENDS):
            with suppress(subprocess.TimeoutExpired):
                return self.child.wait(1)
        return self.child.wait(0)  # raises


class Faults:
    """What may happen, by name. Each returns whether it did."""

    def __init__(self, run: Run, nodes: Nodes, chance: random.Random, disk: Path | None) -> None:
        self.run, self.nodes, self.chance, self.disk = run, nodes, chance, disk
        self.kinds: dict[str, Callable[[], bool]] = {
            "worker": self.worker,
            "node": self.node,
            "driver": self.driver,
            "memory": self.memory,
        }
        if disk is not None:
            self.kinds["storage"] = self.storage

    def worker(self) -> bool:
        for process in self.chance.sample(found := busy(), min(1, len(found))):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                return True
        return False

    def node(self) -> bool:
        self.nodes.remove(self.chance.randrange(2))
        time.sleep(self.chance.uniform(0, 3))
        self.nodes.fill()
        return True

    def driver(self) -> bool:
        self.run.kill()
        self.run.ended()
        self.run.start()
        return True

    def memory(self) -> bool:
        for process in self.chance.sample(found := busy(), min(1, len(found))):
            with suppress(OSError):
                before = resource.prlimit(process, resource.RLIMIT_AS)
                used = int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()
                resource.prlimit(process, resource.RLIMIT_AS, (used, before[1]))
                time.sleep(1)
                resource.prlimit(process, resource.RLIMIT_AS, before)
                return True
        return False

    def storage(self) -> bool:
        assert self.disk is not None
        ballast = self.disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        status = self.run.ended(expected=FULL)
        ballast.unlink()
        if status:
            self.run.start()
        return True


def small_disk(folder: Path, size: int, leave: ExitStack) -> Path | None:
    """A file system in memory with room for `size` bytes, where one may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        print("no file system may be mounted here: storage that is full is left out")
        return None
    leave.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
    return folder


def measure(arguments: argparse.Namespace, work: Path, leave: ExitStack) -> bool:
    chance = random.Random(arguments.seed)
    undisturbed = Run(arguments, work, work / "undisturbed", None)
    undisturbed.begun()
    began = time.monotonic()
    if undisturbed.ended():
        sys.exit("compress failed without a cluster")
    seconds = time.monotonic() - began
    expected = digests(work / "undisturbed")
    size = sum(p.stat().st_size for p in (work / "undisturbed").iterdir())
    print(f"one machine: {len(expected)} files, {size / 1e6:.1f} MB, {seconds:.1f} s of work", flush=True)
    disk = small_disk(work / "disk", size + 64 * 2**20, leave)
    nodes = Nodes(2)
    leave.callback(nodes.close)
    print(f"{'fault':>5} {'kind':>8} {'run':>4} {'tensors noted':>14}")
    done: dict[str, int] = {}
    odd: list[str] = []
    dst, runs, different = (disk or work) / "packed", 0, 0
    while sum(done.values()) < arguments.faults:
        runs += 1
        run = Run(arguments, work, dst, nodes.address)
        leave.callback(run.kill)
        faults = Faults(run, nodes, chance, disk)
        for kind in _until_done(run, chance, list(faults.kinds), seconds):
            if faults.kinds[kind]():
                done[kind] = done.get(kind, 0) + 1
                print(f"{sum(done.values()):>5} {kind:>8} {runs:>4} {journal(dst):>14}", flush=True)
            if sum(done.values()) == arguments.faults:
                break
        status = run.ended()
        same = not status and digests(dst) == expected
        different += not same
        odd += run.odd
        state = "identical" if same else f"DIFFERENT (status {status})"
        print(f"{'':>5} {'':>8} {runs:>4} {'':>14}  finished, {state}", flush=True)
        shutil.rmtree(dst, ignore_errors=True)
    row = {
        "benchmark": "faults_ray",
        "source": os.path.basename(os.path.abspath(arguments.source)),
        "recipe": arguments.recipe,
        "faults": done,
        "runs": runs,
        "different": different,
        "unexpected_lines": len(odd),
    }
    print(json.dumps(row))
    return not different and not odd


def _until_done(run: Run, chance: random.Random, kinds: list[str], seconds: float) -> Iterator[str]:
    """What is to happen next, at random moments until a command ends by itself."""
    while True:
        run.begun()
        with suppress(subprocess.TimeoutExpired):
            run.child.wait(chance.uniform(0, min(seconds / 2, PAUSE)))
        if run.child.poll() is not None:
            return
        yield chance.choice(kinds)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("source", help="folder of a checkpoint")
    options.add_argument("--recipe", default="milo-s1")
    options.add_argument("--faults", type=int, default=50)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--work", type=Path, help="folder for the results (default: a temporary one)")
    arguments = options.parse_args()
    work = Path(tempfile.mkdtemp(prefix="faults-ray-", dir=arguments.work))
    with ExitStack() as leave:
        leave.callback(shutil.rmtree, work, ignore_errors=True)
        identical = measure(arguments, work, leave)
    sys.exit(0 if identical else 1)


if __name__ == "__main__":
    main()
