from pathlib import Path

import pytest
from support.architectures import build_checkpoint

from trilobite.checkpoint.source import open_source
from trilobite.cli import app
from trilobite.errors import RecipeError
from trilobite.quantize.plan.runtimes import check_vllm
from trilobite.quantize.run.compress import prepare
from trilobite.recipe import load_recipe, recipe_from_dict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    build_checkpoint("deepseek_v3", path)
    return path


@pytest.mark.parametrize("recipe", ["super3", "milo-s1", "int4-experts", "mixed-4-3"])
def test_recipes_of_integers_suit_vllm(folder: Path, recipe: str) -> None:
    source = open_source(folder)
    check_vllm(prepare(source, load_recipe(recipe)))


def test_lattice_formats_do_not(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"lattice format.*--recipe super2"):
        check_vllm(prepare(open_source(folder), load_recipe("quip2-free")))


@pytest.mark.parametrize(
    ("kept", "layer"), [("*kv_a_proj*", "fused_qkv_a_proj"), ("*layers.0.mlp.up_proj*", "gate_up_proj")]
)
def test_matrices_that_run_as_one_are_treated_alike(folder: Path, kept: str, layer: str) -> None:
    rules = [
        {"names": kept, "format": "keep"},
        {"roles": ["attention", "dense_mlp", "expert"], "format": "int4-g32"},
    ]
    plan = prepare(open_source(folder), recipe_from_dict({"rules": rules}, "partly"))
    with pytest.raises(RecipeError, match=rf"{layer}: .* in 16 bit.*--recipe") as e:
        check_vllm(plan)
    assert "\n" not in str(e.value)


def test_the_command_line_asks(folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    run = CliRunner().invoke
    for command in (["plan", str(folder)], ["compress", str(folder), str(tmp_path / "packed")]):
        refused = run(app, [*command, "--recipe", "quip3-free", "--for", "vllm"])
        assert isinstance(refused.exception, RecipeError), refused.output
        assert not (tmp_path / "packed" / "config.json").exists()
        assert run(app, [*command, "--recipe", "super3", "--for", "vllm"]).exit_code == 0
    assert run(app, ["plan", str(folder), "--recipe", "super3", "--for", "ollama"]).exit_code == 2
