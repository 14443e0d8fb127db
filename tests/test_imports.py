"""The directions of imports that docs and DESIGN promise, read off the syntax trees."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.paths import SRC

PACKAGE = SRC / "trilobite"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import, itself aside. `errors, recipe <- checkpoint <- formats <- quantize` and
# `formats <- kernels <- runtime <- evaluate`: an arrow is a direction, so further back is allowed too.
BASE = {"errors", "recipe"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "signals": set(),
    "pool": set(),
    "huge_pages": set(),
    "recipe": {"errors"},
    "models": {"errors", "checkpoint", "kernels"},
    "checkpoint": BASE | {"pool"},
    "formats": BASE | {"checkpoint"},
    "quantize": BASE | {"pool", "checkpoint", "formats", "kernels", "models", "__init__"},
    "kernels": BASE | {"formats", "huge_pages"},
    "runtime": BASE | {"checkpoint", "formats", "huge_pages", "kernels", "models"},
    "report": BASE | {"checkpoint", "formats", "quantize"},
    "measure": BASE | {"formats", "kernels"},
    "evaluate": BASE | {"checkpoint", "formats", "kernels", "models", "runtime"},
    "serve": BASE | {"checkpoint", "kernels", "runtime"},
}
BELOW_INTEGRATIONS = {*ALLOWED, "__init__"}
"""`integrations` may import everything below the command line; the members of TOP anything."""
TOP = {"cli", "__main__", "doctor", "__init__"}
NATIVE = tuple(f"trilobite.kernels.cpu.{m}" for m in ("quantize", "feedback", "lattice", "native"))


def part_of(path: Path) -> str:
    """`quantize/methods/milo.py` -> quantize, `errors.py` -> errors."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module of ours that a file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "trilobite")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides what it imports"
            if (node.module or "").split(".")[0] == "trilobite":
                for a in node.names:
                    yield _module(node.module or "", a.name)


def _module(module: str, name: str) -> str:
    """`from trilobite.kernels import ops` imports the module trilobite.kernels.ops."""
    inside = PACKAGE.joinpath(*module.split(".")[1:], name)
    return f"{module}.{name}" if inside.is_dir() or inside.with_suffix(".py").exists() else module


def forbidden(path: Path, tree: ast.AST) -> list[str]:
    """The imports of a file that point the wrong way."""
    part = part_of(path)
    wrong = []
    for module in imports(tree):
        target = [*module.split("."), "__init__"][1]
        if part == target or part in TOP:
            continue
        allowed = BELOW_INTEGRATIONS if part == "integrations" else ALLOWED.get(part, set())
        if target not in allowed:
            wrong.append(module)
        if part == "quantize" and target == "kernels" and not module.startswith(NATIVE):
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    assert forbidden(path, ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("quantize/methods/rtn.py", "from trilobite.runtime.load import load"),
        ("quantize/methods/rtn.py", "from trilobite.kernels import ops"),
        ("quantize/methods/rtn.py", "from trilobite.kernels.reference import linear"),
        ("runtime/load.py", "import trilobite.quantize.run.compress"),
        ("runtime/load.py", "from trilobite import quantize"),
        ("formats/affine.py", "from trilobite.quantize.methods.rtn import rtn"),
        ("formats/affine.py", "def f():\n    from trilobite.kernels import ops"),
        ("kernels/ops.py", "from trilobite.checkpoint.packed import PARTIAL"),
        ("checkpoint/packed.py", "from trilobite.formats import weight"),
        ("recipe.py", "from trilobite.checkpoint import source"),
        ("errors.py", "from trilobite.recipe import Role"),
        ("models/deepseek.py", "from trilobite.recipe import Role"),
        ("integrations/transformers.py", "from trilobite.cli import main"),
        ("evaluate/perplexity.py", "from trilobite.quantize.plan.statistics import kurtosis"),
        ("newcomer/a.py", "from trilobite.recipe import Role"),
    ],
)
def test_a_wrong_import_is_noticed(path: str, line: str) -> None:
    assert forbidden(PACKAGE / path, ast.parse(line))


@pytest.mark.parametrize(
    "line", ["from trilobite.kernels.cpu import quantize", "from trilobite.formats import affine"]
)
def test_a_right_import_is_accepted(line: str) -> None:
    assert forbidden(PACKAGE / "quantize/methods/rtn.py", ast.parse(line)) == []


BACKENDS = ("trilobite.kernels.cpu", "trilobite.kernels.gpu")
ROOMS: dict[str, set[str]] = {
    "checkpoint/remote": set(),
    "quantize/plan": {"methods"},
    "quantize/methods": set(),
    "quantize/budget": {"calibrate", "methods", "plan"},
    "quantize/calibrate": {"methods", "plan"},
    "quantize/columns": set(),
    "quantize/finetune": {"calibrate", "methods", "plan"},
    "quantize/run": {"budget", "calibrate", "columns", "finetune", "methods", "plan"},
    "integrations/vllm": set(),
    "kernels/cpu": set(),
    "kernels/gpu": set(),
    "kernels/gpu/device": set(),
    "kernels/gpu/layout": set(),
    "runtime/modules": set(),
    "runtime/generate": set(),
    "runtime/offload": {"modules"},
    "runtime/step": {"modules"},
    "runtime/translate": {"generate", "modules"},
}
"""What a room may import of the rooms beside it; the files that lie between rooms are for all of them."""


def room_of(module: str) -> str:
    """`trilobite.quantize.methods.rtn` -> quantize/methods; its own folder where it lies in no room."""
    return "/".join(module.split(".")[1:-1])


def module_of(path: Path) -> str:
    """`quantize/methods/rtn.py` -> trilobite.quantize.methods.rtn."""
    return ".".join(["trilobite", *path.relative_to(PACKAGE).with_suffix("").parts])


def trespasses(path: Path, tree: ast.AST) -> list[str]:
    """The imports of a file from rooms that its own does not stand upon."""
    here = room_of(module_of(path))
    if here not in ROOMS:
        return []
    floor, wrong = here.rpartition("/")[0], []
    for module in imports(tree):
        there = room_of(module)
        beside = there != here and there.rpartition("/")[0] == floor
        if beside and there.rpartition("/")[2] not in ROOMS[here]:
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_stand_upon_each_other(path: Path) -> None:
    assert trespasses(path, ast.parse(path.read_text())) == []


def test_every_room_is_known() -> None:
    """Each folder inside of a part, but for those that hold no code of ours."""
    folders = {str(p.parent.relative_to(PACKAGE)) for p in PACKAGE.rglob("__init__.py")}
    assert {f for f in folders if "/" in f} == set(ROOMS)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("quantize/methods/rtn.py", "from trilobite.quantize.calibrate import loop"),
        ("quantize/plan/plan.py", "from trilobite.quantize.run.options import Options"),
        ("quantize/calibrate/loop.py", "from trilobite.quantize.finetune.train import Tuner"),
        ("kernels/gpu/device/tile.py", "from trilobite.kernels.gpu.layout import pack"),
        ("runtime/modules/linear.py", "from trilobite.runtime.generate.text import generate"),
    ],
)
def test_a_trespass_is_noticed(path: str, line: str) -> None:
    assert trespasses(PACKAGE / path, ast.parse(line))


def test_no_circles() -> None:
    """No module imports itself through others, imports within functions included."""
    graph = {module_of(p): set(imports(ast.parse(p.read_text()))) for p in FILES}
    TopologicalSorter(graph).prepare()


def test_backends_are_imported_by_the_operators_only() -> None:
    """Others ask kernels/ops.py; quantizers have native modules of their own; measure and doctor look inside."""
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        found = {m for m in imports(ast.parse(path.read_text())) if m.startswith(BACKENDS)}
        allowed: tuple[str, ...] = ()
        if name == "kernels/ops.py" or name.startswith("measure/"):
            allowed = BACKENDS
        elif name.startswith("quantize/"):
            allowed = NATIVE
        elif name.startswith("cli/") or name == "doctor.py":
            allowed = (BACKENDS[0], *(f"{BACKENDS[1]}.{m}" for m in ("launch", "tuning")))
        elif name.startswith("kernels/cpu/"):
            allowed = BACKENDS[:1]
        elif name.startswith("kernels/gpu/"):
            allowed = BACKENDS[1:]
        assert {m for m in found if not m.startswith(allowed)} == set(), name


def test_everything_has_a_place() -> None:
    known = {*ALLOWED, *TOP, "integrations"}
    assert {part_of(p) for p in FILES} <= known
    assert len(FILES) > 30


def test_no_drawer_of_utilities() -> None:
    assert [p for p in FILES if p.stem in ("utils", "util", "helpers", "common", "misc")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_pickles_and_no_code_from_checkpoints(path: Path) -> None:
    assert dangers(ast.parse(path.read_text())) == []


def dangers(tree: ast.AST) -> list[str]:
    """Calls and imports that could run what lies in a checkpoint."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
            found += [
                n
                for n in names
                if n.split(".")[0] in ("pickle", "cPickle", "dill", "joblib", "shelve", "marshal")
            ]
        elif isinstance(node, ast.Call) and "allow_pickle=False" not in map(ast.unparse, node.keywords):
            called = ast.unparse(node.func)
            if called in ("torch.load", "numpy.load", "np.load", "eval", "exec", "yaml.load", "os.system"):
                found.append(called)
            found += [
                "trust_remote_code"
                for k in node.keywords
                if k.arg == "trust_remote_code"
                and isinstance(k.value, ast.Constant)
                and k.value.value is True
            ]
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "np.load('x', allow_pickle=True)",
        "yaml.load(f)",
        "Auto.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_dangers_are_noticed(code: str) -> None:
    assert dangers(ast.parse(code))
