"""One damaged checkpoint, one thing done with it in a process of its own, and whether that ended as it should.

It should end with a right result, or with one line and status 1: no traceback, crash, hang, flood of memory, file
elsewhere, and no other answer than before from a checkpoint that passes its own checksums.
"""

import contextlib
import faulthandler
import io
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.architectures import build_model
from support.paths import ROOT
from transformers import AutoModelForCausalLM

import trilobite
from fuzz.damage import damage
from trilobite import cli
from trilobite.errors import TrilobiteError

IDS = torch.arange(3, 19)[None]
CPU_SECONDS = 60
WALL_SECONDS = 300
"""On a machine with much else to do."""
MORE_MEMORY = 2 * 2**30
SEED = 11
TRACEBACK, OTHER_RESULT = 98, 97
"""Statuses of a case's process."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """failure: empty where the case ended as it should    tail: what it printed, for people."""

    case: int
    action: str
    done: str
    failure: str
    tail: str = ""


def prepare(folder: Path) -> None:
    """Make what is damaged: `source`, a random Mixtral with a tokenizer, and `packed` in two formats."""
    model = build_model("mixtral", dtype=torch.bfloat16)
    model.resize_token_embeddings(4096)
    model.save_pretrained(folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "tiny-moe" / name, folder / "source" / name)
    command("compress", str(folder / "source"), str(folder / "packed"), "-r", "milo-s1", "--jobs", "1")


def command(*arguments: str) -> None:
    """A command line in this process."""
    sys.argv = ["trilobite", *arguments]
    with contextlib.suppress(SystemExit):
        cli.main()


def _line(*arguments: str) -> Callable[[Path], object]:
    def act(path: Path) -> object:
        sys.argv = ["trilobite", *(a.format(path=path) for a in arguments)]
        cli.main()
        return None

    return act


def _logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits.float().tolist()


def _compress_and_load(path: Path) -> object:
    _line("compress", "{path}", f"{path}-out", "-r", "rtn3", "--jobs", "1")(path)
    trilobite.load(f"{path}-out")(IDS)
    return None


def _quantize_on_load(path: Path) -> object:
    config = trilobite.TrilobiteConfig("rtn3")
    AutoModelForCausalLM.from_pretrained(path, quantization_config=config)(IDS)
    return None


ACTIONS: dict[str, dict[str, Callable[[Path], object]]] = {
    "source": {
        "plan": _line("plan", "{path}", "-r", "rtn3"),
        "inspect": _line("inspect", "{path}", "--samples", "1"),
        "compress": _compress_and_load,
        "generate": _line("generate", "{path}", "The", "-n", "2"),
        "load": lambda path: trilobite.load(str(path))(IDS) and None,
        "quantize on load": _quantize_on_load,
    },
    "packed": {
        "inspect": _line("inspect", "{path}"),
        "verify": _line("verify", "{path}"),
        "generate": _line("generate", "{path}", "The", "-n", "2"),
        "load": lambda path: trilobite.load(str(path))(IDS) and None,
        "load verified": lambda path: _logits(trilobite.load(str(path), verify=True)),
        "from_pretrained": lambda path: AutoModelForCausalLM.from_pretrained(path)(IDS) and None,
    },
}
THEIRS = ("quantize on load", "from_pretrained")
"""Transformers reads the files first, and has errors of its own."""


class Fuzzer:
    """Runs cases on copies of what `prepare` made."""

    def __init__(self, made: Path, work: Path) -> None:
        """Does every action once on what is whole, which must succeed."""
        self.made, self.work = made, work
        self.expected = {
            kind: {name: self._whole(kind, act) for name, act in actions.items()}
            for kind, actions in ACTIONS.items()
        }

    def _whole(self, kind: str, act: Callable[[Path], object]) -> object:
        path = self.work / "whole" / kind
        shutil.copytree(self.made / kind, path)
        try:
            with (
                open(os.devnull, "w") as null,
                contextlib.redirect_stdout(null),
                contextlib.redirect_stderr(null),
            ):
                return act(path)
        except SystemExit as e:
            if e.code:
                raise RuntimeError(f"{kind}, undamaged: status {e.code}") from e
            return None
        finally:
            shutil.rmtree(self.work / "whole")

    def run(self, case: int) -> Verdict:
        """One case, the same at every call."""
        chance = random.Random(f"{SEED} {case}")
        kind = chance.choice(tuple(ACTIONS))
        action = chance.choice(tuple(ACTIONS[kind]))
        place = self.work / str(case)
        folder = place / kind
        shutil.copytree(self.made / kind, folder)
        done = damage(folder, chance, endless=action not in THEIRS)
        output = self.work / f"{case}.txt"
        before = set(os.listdir(place)) | {f"{kind}-out"}
        status = self._wait(self._start(kind, action, folder, output))
        text = output.read_bytes().decode(errors="replace")
        failure = _failure(status, text, theirs=action in THEIRS)
        if not failure and (strange := set(os.listdir(place)) - before):
            failure = f"left {sorted(strange)}"
        shutil.rmtree(place)
        output.unlink()
        return Verdict(case=case, action=f"{kind}: {action}", done=done, failure=failure, tail=text[-1500:])

    def _start(self, kind: str, action: str, folder: Path, output: Path) -> int:
        if child := os.fork():
            return child
        status = 99
        try:
            handle = os.open(output, os.O_WRONLY | os.O_CREAT)
            for number in (1, 2):
                os.dup2(handle, number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
            sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace")
            faulthandler.disable()  # pytest's: a crash is told by its status
            _limit()
            status = self._act(kind, action, folder)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _act(self, kind: str, action: str, folder: Path) -> int:
        try:
            found = ACTIONS[kind][action](folder)
        except SystemExit as e:
            return int(e.code or 0)
        except TrilobiteError as e:
            print(f"error: {e}", file=sys.stderr)
            return 1
        except Exception as e:
            if action in THEIRS and not isinstance(e, MemoryError):
                print(f"error: {type(e).__name__}", file=sys.stderr)
                return 1
            traceback.print_exc()
            return TRACEBACK
        if found is not None and found != self.expected[kind][action]:
            print("another result than before, and all checksums hold")
            return OTHER_RESULT
        return 0

    def _wait(self, child: int) -> int:
        until = time.monotonic() + WALL_SECONDS
        while time.monotonic() < until:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                return status
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return signal.SIGXCPU


def _limit() -> None:
    """Of this process: processor time, and memory beyond what it has."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _failure(status: int, text: str, *, theirs: bool) -> str:
    """What is wrong with how a case ended. theirs: what transformers prints and raises is its own."""
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        return "hang" if number in (signal.SIGXCPU, signal.SIGKILL) else f"crash: {number.name}"
    code = os.WEXITSTATUS(status)
    traceback = "Traceback (most recent call last)" in text
    if code == TRACEBACK or (traceback and not theirs):
        return "traceback"
    if code == OTHER_RESULT:
        return "silently another result"
    if code not in (0, 1):
        return f"status {code}"
    errors = sum(line.startswith("error: ") for line in text.splitlines())
    return f"{errors} lines of errors" if code == 1 and errors != 1 else ""
