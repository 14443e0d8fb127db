"""`trilobite translate`: lines in, lines out; every mistake is one line and a status."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import build_checkpoint
from support.runs import PlugPulled
from support.translators import LONGEST, save, switch, t5

from trilobite import cli
from trilobite.cli import translate as command
from trilobite.runtime.translate.journal import SUFFIX
from trilobite.runtime.translate.translator import Translator

LINES = ["a cat", "", "the dog sees the cat", "b", "two dogs and a horse run", "cat and dog", "x"]
TEXT = "".join(line + "\n" for line in LINES).encode()


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `trilobite translate ... < text` in this process."""

    def call(*args: object, text: bytes = TEXT) -> Outcome:
        command = [] if args[0] == "generate" else ["translate"]
        monkeypatch.setattr(sys, "argv", ["trilobite", *command, *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        status: object = 0
        try:
            cli.main()
        except SystemExit as e:
            status = e.code or 0
        captured = capsys.readouterr()
        return Outcome(int(str(status)), captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("translate") / "model", switch)


def test_lines_in_the_order_of_the_input(run: Run, model: Path) -> None:
    made = run(model, "--beams", 2, "--batch", 2)
    assert made.status == 0, made.err
    assert made.out.count("\n") == len(LINES)
    assert made.out.split("\n")[1] == ""
    assert "7 sentences" in made.err
    assert "sentences/s" in made.err
    for args in (["--batch", 1], ["--batch-tokens", 12], ["--no-pruning"], ["--to", "de"]):
        assert run(model, "--beams", 2, *args).out == made.out
    for text in (TEXT.replace(b"\n", b"\r\n"), TEXT[:-1], b"\xef\xbb\xbf" + TEXT):
        assert run(model, "--beams", 2, text=text).out == made.out
    assert run(model, text=b"").out == ""


@pytest.mark.parametrize("beams", [1, 4])
def test_logits_that_are_not_finite(
    run: Run, tmp_path: Path, beams: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says where they begin, and no translation."""
    folder = save(tmp_path / "damaged", switch)
    tensors = load_file(folder / "model.safetensors")
    name = next(
        n for n in tensors if n.startswith("decoder.block.1.") and n.endswith("SelfAttention.v.weight")
    )
    tensors[name][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    made = run(folder, "--beams", beams)
    assert made.status == 1
    assert made.out == ""
    said = made.err.strip().splitlines()
    assert len(said) == 1
    assert f"logits are NaN or infinite, which begins in {name.removesuffix('.weight')};" in said[0]


def test_windows_are_printed_one_after_the_other(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(model, "--beams", 1).out
    monkeypatch.setattr(command, "WINDOW", 1)
    assert run(model, "--beams", 1, "--batch", 2).out == whole


def test_n_best(run: Run, model: Path) -> None:
    best = run(model, "--beams", 3).out.splitlines()
    made = [line.split(" ||| ") for line in run(model, "--beams", 3, "--n-best", 2).out.splitlines()]
    assert [int(place) for place, _, _ in made] == [i for i in range(len(LINES)) for _ in range(2)]
    assert [text for _, text, _ in made[::2]] == best
    scores = [float(score) for _, _, score in made]
    assert all(first >= second for first, second in zip(scores[::2], scores[1::2], strict=True))
    refused = run(model, "--beams", 2, "--n-best", 3)
    assert refused.status == 1
    assert "raise --beams" in refused.err


@pytest.mark.parametrize("n_best", [[], ["--n-best", 2]])
def test_a_file_that_is_partly_there_is_continued(
    run: Run, model: Path, tmp_path: Path, n_best: list[object]
) -> None:
    whole, part = tmp_path / "whole.txt", tmp_path / "part.txt"
    assert run(model, "--beams", 2, *n_best, "-o", whole).status == 0
    assert not whole.with_name("whole.txt" + SUFFIX).exists()
    lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == len(LINES) * (2 if n_best else 1)
    part.write_text("".join(lines[:5]) + lines[5][:1])
    made = run(model, "--beams", 2, *n_best, "-o", part)
    assert "sentences are there; continuing" in made.err
    assert part.read_text() == whole.read_text()
    again = run(model, "--beams", 2, *n_best, "-o", part)
    assert again.status == 0
    assert "complete already" in again.err


def test_what_is_translated_outlives_a_kill(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after every number of batches; the ones that were done are not done again."""
    whole = run(model, "--beams", 2).out
    decode, decoded, fatal = Translator._decode, [], 0

    def killed(self: Translator, ids: list[list[int]]) -> object:
        decoded.append(ids)
        if len(decoded) == fatal:
            raise PlugPulled
        return decode(self, ids)

    monkeypatch.setattr(Translator, "_decode", killed)
    for batches in (0, 1, 2):
        out, fatal = tmp_path / f"{batches}.txt", batches + 1
        decoded.clear()
        with pytest.raises(PlugPulled):
            run(model, "--beams", 2, "--batch", 2, "-o", out)
        done, fatal = 2 * batches + 1, 0  # and the empty line
        decoded.clear()
        changed = run(model, "--beams", 3, "--batch", 2, "-o", out)
        assert changed.status == 1
        assert "begun with another --beams" in changed.err
        made = run(model, "--beams", 2, "--batch", 2, "-o", out)
        assert made.status == 0, made.err
        assert f"{done} of 7 sentences are there" in made.err
        assert sum(map(len, decoded)) == len(LINES) - done
        assert out.read_text() == whole


@pytest.mark.parametrize(
    ("args", "text", "message"),
    [
        ([], b"fine\ncaf\xe9\n", "line 2: not UTF-8 at byte 4; convert the input with iconv"),
        ([], b"a\n" + b"ab" * 25, f"line 2: has 52 tokens, the model was made for {LONGEST}; split"),
        (["--max-ratio", 0], TEXT, "max-ratio 0.0: expected a number above 0"),
        (["--length-penalty", "nan"], TEXT, "length penalty nan"),
        (["-o", "nowhere/out.txt"], TEXT, "there is no folder nowhere; make it first"),
        (["-o", "."], TEXT, "is a folder; name a file"),
    ],
)
def test_mistakes(run: Run, model: Path, args: list[object], text: bytes, message: str) -> None:
    made = run(model, *args, text=text)
    assert made.status == 1
    assert message in made.err
    assert made.err.startswith("error: ")
    assert made.err.count("\n") == 1
    assert made.out == ""


def test_usage(run: Run, model: Path) -> None:
    for args in (["--beams", 0], ["--batch", 0], ["--n-best", 0], ["--batch-tokens", 0]):
        assert run(model, *args).status == 2


def test_other_models_and_languages(run: Run, tmp_path: Path) -> None:
    decoder = tmp_path / "mixtral"
    build_checkpoint("mixtral", decoder, dtype=torch.float32)
    save(tmp_path / "t5", t5)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (decoder / file).write_bytes((tmp_path / "t5" / file).read_bytes())
    made = run(decoder)
    assert made.status == 1
    assert "no encoder" in made.err
    made = run(tmp_path / "t5", "--beams", 3)
    assert made.status == 0, made.err
    config = tmp_path / "t5" / "config.json"
    task = '"task_specific_params": {"translation_en_to_de": {"prefix": "de "}},'
    config.write_text(config.read_text().replace("{", "{" + task, 1))
    assert run(tmp_path / "t5", "--to", "de", "--beams", 1).status == 0
    made = run(tmp_path / "t5", "--to", "dee")
    assert made.status == 1
    assert "the nearest it has: de" in made.err


def test_a_file_of_something_else(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.write_text("\n" * 9)
    made = run(model, "-o", out)
    assert made.status == 1
    assert "holds 9 translations, the input has 7 lines" in made.err
    assert out.read_text() == "\n" * 9


def test_a_reader_that_goes_away_and_ctrl_c(model: Path) -> None:
    program = """
import os, sys
from trilobite.cli import translate
translate.WINDOW = 1
from trilobite.runtime.translate.translator import Translator
decode, calls = Translator._decode, []
def slowly(self, ids):
    calls.append(ids)
    if len(calls) == 4 and os.environ.get("SIGNAL"):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return decode(self, ids)
Translator._decode = slowly
from trilobite.__main__ import main
main()
"""
    arguments = [sys.executable, "-c", program, "translate", str(model), "--beams", "1", "--batch", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    read, write = os.pipe()
    os.close(read)
    streams = {"input": TEXT, "stderr": subprocess.PIPE, "timeout": 100, "check": False}
    made = subprocess.run(arguments, stdout=write, env=environment, **streams)
    os.close(write)
    assert made.returncode == 1
    assert made.stderr.decode().startswith("error: standard output was closed")
    assert made.stderr.count(b"\n") == 1
    environment["SIGNAL"] = str(int(signal.SIGINT))
    made = subprocess.run(arguments, stdout=subprocess.PIPE, env=environment, **streams)
    assert made.returncode == 130
    assert made.stdout.count(b"\n") == 4, "three sentences and the empty line"
    assert made.stderr == b"interrupted: 4 of 7 sentences are printed; -o FILE would be continued\n"


def test_generate_reads_the_prompt_as_a_source(run: Run, model: Path, tmp_path: Path) -> None:
    """The prompt is printed apart; beams in generation_config.json do no harm."""
    shutil.copytree(model, tmp_path / "beams")
    settings = tmp_path / "beams" / "generation_config.json"
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps(config | {"num_beams": 4, "num_return_sequences": 2}))
    expected = run(model, "--beams", 1, "--max-ratio", 9, text=b"a cat").out
    for folder in (model, tmp_path / "beams"):
        made = run("generate", folder, "a cat", "-n", LONGEST)
        assert made.status == 0, made.err
        assert made.out == "a cat\n" + expected
