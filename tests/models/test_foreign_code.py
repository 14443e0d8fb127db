"""Python code that lies beside a checkpoint never runs, whatever waits on standard input."""

import ast
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.architectures import build_checkpoint
from support.paths import SRC

from trilobite.checkpoint.source import open_source
from trilobite.errors import TrilobiteError
from trilobite.quantize.calibrate.weights import BlockWeights
from trilobite.runtime.load import load, load_tokenizer

CODE = "import pathlib\npathlib.Path({marker!r}).write_text('ran')\nclass Evil: pass\n"
FILES = sorted((SRC / "trilobite").rglob("*.py"))


def plant(folder: Path, **changes: object) -> Path:
    """Put code into a checkpoint, and name it as its configuration and tokenizer; returns what the code would make."""
    marker = folder / "marker"
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map} | changes))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    return marker


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A checkpoint whose model_type only its own code knows."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"model.embed_tokens.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    plant(tmp_path, model_type="evil")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [["chat"], pytest.param(["eval", "--text", __file__], marks=pytest.mark.long)],
    ids=lambda c: c[0],
)
def test_a_pipe_does_not_answer_for_the_user(foreign: Path, command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "HF_MODULES_CACHE": str(foreign / "modules")}
    done = subprocess.run(
        [sys.executable, "-m", "trilobite", *command, str(foreign)],
        input="y\nhello\n",
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert not (foreign / "marker").exists()
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {foreign}: model_type 'evil'")
    assert "never runs" in line


def calibrate(path: str) -> object:
    return BlockWeights(open_source(path), [], torch.device("cpu"))


@pytest.mark.parametrize("use", [load, load_tokenizer, calibrate])
def test_nothing_that_reads_a_model_asks(
    foreign: Path, use: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(foreign / "modules"))
    with pytest.raises(TrilobiteError, match="never runs") as caught:
        use(str(foreign))
    assert "\n" not in str(caught.value)
    assert not (foreign / "marker").exists()


def test_a_known_model_type_takes_transformers_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    build_checkpoint("mixtral", tmp_path, dtype=torch.bfloat16)
    marker = plant(tmp_path)
    assert type(load(str(tmp_path))).__module__.startswith("transformers.")
    assert not marker.exists()


def test_attention_from_the_hub_is_refused(tmp_path: Path) -> None:
    build_checkpoint("mixtral", tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    for more in ({"attn_implementation": "evil/kernel"}, {"text_config": {"_attn_implementation": "a/b@c"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        with pytest.raises(TrilobiteError, match=r"attn_implementation.*never runs; delete the key"):
            load(str(tmp_path))


def trusting(tree: ast.AST) -> list[str]:
    """Calls by which transformers or lm_eval load something, without the keyword that forbids code."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        loads = called.endswith((".from_pretrained", ".from_config")) or called in ("HFLM", "pipeline")
        if not loads or called.startswith("GenerationConfig."):  # JSON, and no code beside it
            continue
        keywords = {k.arg: k.value for k in node.keywords}
        value = keywords.get("trust_remote_code")
        if not (isinstance(value, ast.Constant) and value.value is False):
            found.append(called)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC / "trilobite")))
def test_every_call_forbids_code(path: Path) -> None:
    assert trusting(ast.parse(path.read_text())) == []


def test_the_auto_classes_have_one_door() -> None:
    """Others would have to say what is refused, and how, a second time."""
    using = {
        str(path.relative_to(SRC / "trilobite"))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
        if alias.name.startswith("Auto")
    }
    assert using == {"models/auto.py", "models/deepseek.py"}


@pytest.mark.parametrize(
    "line",
    [
        "AutoConfig.from_pretrained(x)",
        "AutoConfig.from_pretrained(x, trust_remote_code=None)",
        "AutoModel.from_config(x, trust_remote_code=trust)",
        "HFLM(pretrained=x)",
    ],
)
def test_a_trusting_call_is_noticed(line: str) -> None:
    assert trusting(ast.parse(line))
