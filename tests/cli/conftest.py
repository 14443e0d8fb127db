"""The command line on a tiny random Mixtral, called in this process."""

import os
import sys
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from support.commands import TEXT, Left, Outcome, Run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trilobite import cli
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `trilobite ...` in this process."""

    def leave(status: int) -> None:
        raise Left(status)

    def call(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["trilobite", *map(str, args)])
        monkeypatch.setattr(os, "_exit", leave)
        status: object = 0
        try:
            cli.main()
        except Left as e:
            status = e.args[0]
        except SystemExit as e:
            status = e.code or 0
        captured = capsys.readouterr()
        return Outcome(int(str(status)), captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "original"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def packed(original: Path) -> Path:
    path = original.parent / "packed"
    compress(str(original), path, load_recipe("rtn3"))
    return path


@pytest.fixture(scope="session")
def text(original: Path) -> Path:
    path = original.parent / "text.txt"
    path.write_text(TEXT)
    return path
