"""What is killed: a command with what it writes, and how both are made."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from fuzz.cases import command
from support.architectures import build_checkpoint
from support.calibrating import add_tokenizer, words

from trilobite.checkpoint.evaluation import EVALUATION
from trilobite.checkpoint.packed import PARTIAL

VOCABULARY = 256


@dataclass(frozen=True)
class Task:
    """arguments: of the command line, {made} and {out} stand for folders    result: what it writes, below {out}

    starts_from: a folder of `made` that is copied to the result first, for commands that add to one
    """

    name: str
    arguments: str
    result: str
    starts_from: str = ""

    def command_line(self, made: Path, out: Path) -> list[str]:
        """With both folders filled in."""
        return [a.format(made=made, out=out) for a in self.arguments.split()]

    def place(self, made: Path, work: Path) -> Path:
        """A new folder to write to, `work`/out, with what the command starts from."""
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        self.fill(made, out)
        return out

    def fill(self, made: Path, out: Path) -> None:
        """Put what the command starts from into its folder."""
        if self.starts_from:
            shutil.copytree(made / self.starts_from, out / self.result)

    def looks_whole(self, out: Path) -> bool:
        """Whether somebody who looks at it takes the result for a finished one."""
        path = out / self.result
        if self.starts_from:
            return (path / EVALUATION).exists()
        if path.suffix:
            return path.exists()
        return (path / "config.json").exists() and not (path / PARTIAL).exists()

    def of_result(self, found: dict[str, str]) -> dict[str, str]:
        """The files of the result that somebody sees, without what an interrupted run keeps beside them."""
        return {
            name: digest
            for name, digest in found.items()
            if name.partition("/")[0] == self.result and not Path(name).name.startswith(".")
        }


TEXT = "--calibration {made}/text.txt --samples 6 --context 32"


def _compress(name: str, more: str = "") -> Task:
    return Task(name, f"compress {{made}}/source {{out}}/packed -r {name} --device cpu {more}", "packed")


TASKS = (
    _compress("rtn3", "--jobs 1"),
    _compress("milo-s1", "--jobs 2"),
    _compress("quip3-free", "--jobs 2"),
    _compress("fine3", f"--jobs 1 --importance text {TEXT}"),
    _compress("gptq3", f"--jobs 2 {TEXT}"),
    _compress("quip2", f"--jobs 1 {TEXT} --finetune full"),
    Task(
        "stats", "stats {made}/source --text {made}/text.txt --context 32 -o {out}/stats.json", "stats.json"
    ),
    Task("trace", "trace {made}/source --text {made}/text.txt --context 32 -o {out}/trace.npz", "trace.npz"),
    Task(
        "eval --save",
        "eval {out}/packed --text {made}/text.txt --context 32 --save",
        "packed",
        "packed",
    ),
)


def prepare(made: Path) -> None:
    """`source`, a random Mixtral of few weights with a tokenizer, `text.txt`, and `packed`."""
    build_checkpoint("mixtral", made / "source", dtype=torch.bfloat16)
    add_tokenizer(made / "source", VOCABULARY)
    (made / "text.txt").write_text(words(600, vocabulary=VOCABULARY))
    command("compress", str(made / "source"), str(made / "packed"), "-r", "rtn3", "--jobs", "1")
    shutil.rmtree(made / "packed" / ".partial", ignore_errors=True)
