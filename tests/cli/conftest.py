"""The command line on a tiny random Mixtral, called in this process."""

from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from support.commands import TEXT, Run, in_this_process
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `trilobite ...` in this process."""
    return in_this_process(monkeypatch, capsys)


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
