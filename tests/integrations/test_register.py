"""`import trilobite` costs nothing, looks at nothing, and transformers knows us from its first moment on."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from trilobite.integrations import register

KNOWN = """
from transformers import AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert AUTO_QUANTIZATION_CONFIG_MAPPING["trilobite"] is trilobite.TrilobiteConfig
assert "trilobite" in AUTO_QUANTIZER_MAPPING
assert AutoConfig.for_model("deepseek").model_type == "deepseek"
finders = [f for f in sys.meta_path if type(f).__module__.startswith("trilobite.")]
assert not [f for f in finders if "transformers" in f.after]
"""
LIGHT = "import sys, trilobite\nassert not {'torch', 'transformers', 'yaml', 'typing'} & set(sys.modules)\n"


def process(*args: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=300, check=False, cwd=cwd
    )


@pytest.mark.parametrize(
    "first",
    [
        "import sys, transformers, trilobite\n",
        "import sys, trilobite.models.deepseek\n",
    ],
    ids=["after", "from what registers"],
)
def test_transformers_knows_us(first: str) -> None:
    done = process("-c", first + KNOWN)
    assert done.returncode == 0, done.stderr


CHANGES = """
import transformers, trilobite
assert "transformers.models.llama4.modeling_llama4" not in sys.modules
from transformers.models.llama4 import modeling_llama4
assert modeling_llama4.Llama4TextMoe.__module__ == "trilobite.models.llama4"
"""


@pytest.mark.parametrize("first", ["", "import transformers.models.llama4.modeling_llama4 as early\n"])
def test_models_are_changed_when_they_are_imported(first: str) -> None:
    """And not before, since each takes its time."""
    changes = CHANGES.replace('assert "', 'assert early or "', 1) if first else CHANGES
    done = process("-c", "import sys\n" + first + changes)
    assert done.returncode == 0, done.stderr


def test_a_program_called_trilobite_is_a_library_user_too(tmp_path: Path) -> None:
    """What the process is called decides nothing: neither argv nor `python -O -m`."""
    (tmp_path / "trilobite_user").mkdir()
    script = tmp_path / "trilobite_user" / "trilobite.py"
    script.write_text("import sys\nsys.path.pop(0)\n" + LIGHT + KNOWN)
    done = process(str(script))
    assert done.returncode == 0, done.stderr


def test_the_command_is_light_too() -> None:
    done = process("-O", "-X", "importtime", "-m", "trilobite", "--help")
    assert done.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "trilobite.cli.run" in loaded
    assert not {"torch", "transformers"} & loaded


def needs(module: str) -> set[str]:
    """Modules that importing this one imports at once: its own imports outside of functions, and theirs."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if not name.startswith("trilobite"):
            continue
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        for node in ast.parse(Path(spec.origin).read_text()).body:
            if isinstance(node, ast.Import):
                waiting += [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = [f"{node.module}.{a.name}" for a in node.names]
                waiting += [node.module, *(m for m in inside if m.startswith("trilobite") and is_module(m))]
    return found


def is_module(name: str) -> bool:
    package = find_spec(name.rpartition(".")[0])
    return bool(package and package.submodule_search_locations and find_spec(name))


@pytest.mark.parametrize("plugin", [*register.PLUGINS, *register.CHANGED.values()])
def test_what_registers_stands_below_what_needs_transformers(plugin: str) -> None:
    """Else a module of ours that is the first to import transformers would be asked for before it is there."""
    ours = {name for name in needs(plugin) if name.startswith("trilobite.")} - {plugin}
    assert {m for m in ours if any(n.startswith("transformers") for n in needs(m))} == set()


def test_the_walk_sees_such_a_module() -> None:
    assert "transformers" in needs("trilobite.runtime.load")
