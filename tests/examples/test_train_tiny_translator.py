"""The program that trains a translator: two steps on a toy corpus end in a folder that transformers loads."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from transformers import AutoTokenizer, SwitchTransformersForConditionalGeneration

WORDS = ["ein", "Hund", "lief", "am", "Meer", "and", "sat", "down"]
TINY = {
    "--steps": 2,
    "--batch": 256,
    "--vocab": 80,
    "--hidden": 64,
    "--intermediate": 64,
    "--encoder-layers": 2,
    "--decoder-layers": 2,
    "--heads": 1,
    "--experts": 4,
    "--processes": 1,
    "--evaluate-every": 1,
}


@pytest.mark.long
def test_a_toy_corpus_becomes_a_model(tmp_path: Path) -> None:
    chance, corpus = random.Random(0), tmp_path / "corpus"
    corpus.mkdir()
    for split, lines in (("train", 200), ("val", 8), ("test_2016_flickr", 4)):
        for language in ("en", "de"):
            text = "\n".join(" ".join(chance.choices(WORDS, k=6)) for _ in range(lines))
            (corpus / f"{split}.{language}").write_text(text + "\n")
    options = [word for name, value in TINY.items() for word in (name, str(value))]
    program = [sys.executable, str(ROOT / "examples/train_tiny_translator.py"), str(corpus), "--fp32"]
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    done = subprocess.run([*program, *folders, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    model = SwitchTransformersForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.config.num_experts == 4
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ein Hund").input_ids
