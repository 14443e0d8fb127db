"""Commands of others, which know packed checkpoints when they are called by us."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

CALL = "import sys; sys.argv[0] = 'x'; from trilobite.integrations import commands; commands.{}()"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [("transformers", ["version"], "5."), ("lm_eval", ["--help"], "lm")],
)
def test_they_run(name: str, arguments: list[str], said: str) -> None:
    command = [sys.executable, "-c", CALL.format(name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout + done.stderr


def test_they_are_installed_under_these_names() -> None:
    text = Path(ROOT / "pyproject.toml").read_text()
    for name in ("lm_eval", "transformers"):
        assert f'trilobite-{name.replace("_", "-")} = "trilobite.integrations.commands:{name}"' in text
