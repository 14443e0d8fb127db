"""Options that several commands share, with their help."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.errors import CalibrationError, DestinationError, MissingExtraError
from trilobite.recipe import ITERATIONS, Recipe, load_recipe, parse_role, recipe_from_dict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trilobite.quantize.calibrate.windows import Calibration


def named(model: str) -> str:
    """Refuse an empty name, which would be the folder one stands in."""
    if not model.strip():
        raise typer.BadParameter("is empty; give a folder or a hub id")
    return model


RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        help="A preset (`trilobite recipes` lists them) or a YAML file.",
        metavar="NAME|FILE",
    ),
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Keep a role in 16 bit; repeat it for several: --keep head --keep attention.", metavar="ROLE"
    ),
]
GroupOption = Annotated[
    int | None,
    typer.Option(
        "--group-size",
        help="Columns that share a scale: 16 (not with 3 bits), 32, 64, 128; 0 = a whole row.",
        metavar="G",
    ),
]
RankOption = Annotated[
    str | None,
    typer.Option(
        "--rank",
        help="Ranks of the compensators: a sum of uniform-r, dense-r, sparse-r, kurtosis-r, frequency-r, "
        "for example dense-h/8+kurtosis-16 (h = hidden size); '' = none.",
        metavar="POLICY",
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="How codes are found: rtn, search, hqq, hqq-paper, gptq, gptq-order or ldlq; with --bits, --size, --fit "
        "search or gptq (the default up to a billion weights).",
        metavar="METHOD",
    ),
]
CompensatorOption = Annotated[
    str | None,
    typer.Option("--compensator", help="How compensators are stored: int3, int8 or fp16.", metavar="FORMAT"),
]
IterationsOption = Annotated[
    int | None,
    typer.Option("--iterations", help=f"Most rounds of MiLo's alternation ({ITERATIONS}).", metavar="N"),
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        help="Column scales, which norms and other matrices take over: sinkhorn, or none.",
        metavar="HOW",
    ),
]
ImportanceOption = Annotated[
    str | None,
    typer.Option(
        "--importance",
        help="Weigh errors by what enters each column (method search): as `weights` alone tell it, on a `builtin` text, "
        "on one that the model writes (`self`), on the --calibration `text`; or none.",
        metavar="WHERE",
    ),
]
StatsOption = Annotated[
    Path | None,
    typer.Option(
        "--stats", help="Expert frequencies from `trilobite stats`, for a frequency-r rank.", metavar="FILE"
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help='Text to calibrate on: a UTF-8 file, a .jsonl or .parquet file with "text", or a folder of them.',
        metavar="TEXT",
    ),
]
TargetTextOption = Annotated[
    Path | None,
    typer.Option(
        "--target-text",
        help="For encoder-decoders: the translation of the text, line by line.",
        metavar="FILE",
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="Tokens in a window of the text; default: the model's own, at most 2048 (stats, trace: 512).",
        min=2,
        metavar="N",
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples", help="Windows drawn from the text (128), or pairs of lines (8192).", metavar="N"
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="Tokens of a window (the model's own, at most 2048); with --fit, of the keys and values that memory is "
        "left for (4096).",
        metavar="L",
    ),
]
RoomOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="With --fit: tokens of the keys and values that memory is left for (4096).",
        min=1,
        metavar="L",
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of the windows (0).", metavar="S")]
PropagateOption = Annotated[
    str | None,
    typer.Option(
        "--propagate",
        help="What a block is calibrated on: outputs of the `quantized` blocks before it (the default), or of the "
        "`original` ones.",
        metavar="WHICH",
    ),
]
CalibrationMemoryOption = Annotated[
    float | None,
    typer.Option(
        "--memory",
        help="GiB for activations and Hessians (8); activations beyond a quarter of it lie in a mapped file.",
        metavar="GIB",
    ),
]
SaveHessiansOption = Annotated[
    Path | None,
    typer.Option(
        "--save-hessians",
        help="Keep the Hessians in this folder, for other recipes and budgets; a recipe needs --propagate original.",
        metavar="FOLDER",
    ),
]
HessiansOption = Annotated[
    Path | None,
    typer.Option(
        "--hessians",
        help="Take Hessians from this folder: the model is run for --finetune only.",
        metavar="FOLDER",
    ),
]
FinetuneOption = Annotated[
    str | None,
    typer.Option(
        "--finetune",
        help="Train the sign vectors of lattice formats, norms and routers on the calibration text: `block` by block, "
        "or `full`: block by block, then the whole model; `paper-block` or `paper-full`: as published, after each "
        "matrix of a block.",
        metavar="HOW",
    ),
]
UnmatchedOption = Annotated[
    bool, typer.Option("--keep-unmatched", help="Keep tensors of unknown role in 16 bit instead of stopping.")
]


def _check_runtime(runtime: str | None) -> str | None:
    """A program that runs packed checkpoints beside ours."""
    if runtime not in (None, "vllm"):
        raise typer.BadParameter("expected vllm")
    return runtime


RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="Refuse what another program cannot run: vllm (docs/vllm.md).",
        callback=_check_runtime,
        metavar="PROGRAM",
    ),
]
ScratchOption = Annotated[
    Path | None,
    typer.Option(
        "--scratch",
        help="For a DST that is a URL: folder for what is not finished and sent yet (~/.cache/trilobite).",
        metavar="FOLDER",
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.", metavar="REV")
]


def _check_activations(mode: str) -> str:
    """How activations enter the CPU engine's products; raises TrilobiteError where there is no engine."""
    if mode not in ("exact", "int8"):
        raise typer.BadParameter("expected exact or int8")
    if mode == "int8":
        from trilobite.kernels.cpu import engine

        if not engine.available():
            raise MissingExtraError(
                "--activations int8 needs the native CPU engine, which is not there: run `trilobite doctor`; a C++ "
                "compiler at install time makes it"
            )
    return mode


ActivationsOption = Annotated[
    str,
    typer.Option(
        "--activations",
        help="exact, or int8: faster on the CPU, activations rounded to 8 bits.",
        callback=_check_activations,
        metavar="MODE",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.", metavar="DEVICE")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def chosen_recipe(
    name: str | None,
    keep: list[str] | None,
    group_size: int | None,
    rank: str | None,
    method: str | None,
    compensator: str | None,
    iterations: int | None,
    columns: str | None,
    importance: str | None,
) -> Recipe:
    """The recipe with what the command line changes in it; what changed becomes part of its name."""
    assert name is not None, "a command that takes budgets, too, has asked for one or the other"
    recipe = load_recipe(name)
    if group_size is not None:
        recipe = recipe.with_group(group_size)
    wanted = {
        "rank": rank,
        "compensator": compensator,
        "iterations": iterations,
        "columns": columns,
        "importance": importance,
    }
    changes: dict[str, Any] = {key: value for key, value in wanted.items() if value is not None}
    data = recipe.to_dict() | changes
    if method is not None:
        data["rules"] = recipe.with_method(method).to_dict()["rules"]
    changed = [*changes, *(["method"] if method else []), *(["group"] if group_size is not None else [])]
    recipe = replace(recipe_from_dict(data, recipe.name), name="+".join([recipe.name, *changed]))
    return recipe.keeping(tuple(parse_role(role) for part in keep or () for role in part.split(",")))


def chosen_calibration(
    text: Path | None, save: Path | None, hessians: Path | None, **settings: Any
) -> "Calibration | None":
    """The calibration that the command line asks for, where it asks for one.

    settings: target, samples, context, seed, propagate, memory (GiB) and finetune; None = the default
    Raises CalibrationError for a memory that is no number of GiB.
    """
    from trilobite.quantize.calibrate.windows import Calibration

    given = {name: value for name, value in settings.items() if value is not None}
    if text is None and save is None and hessians is None:
        if given:
            raise typer.BadParameter(f"--{_option(next(iter(given)))} goes with --calibration")
        return None
    if text is None and (
        unused := [name for name in ("target", "samples", "context", "seed") if name in given]
    ):
        raise typer.BadParameter(f"--{_option(unused[0])} goes with --calibration")
    if "memory" in given:
        if not 0 <= given["memory"] < float("inf"):
            raise CalibrationError(f"memory {given['memory']}: expected GiB, 0 or more; change --memory")
        given["memory"] = int(given["memory"] * 2**30)
    return Calibration(text=text, save=save, hessians=hessians, **given)


def _option(setting: str) -> str:
    return "target-text" if setting == "target" else setting


def usable_device(name: str) -> str:
    """cpu or cuda; raises DeviceError where there is no such device."""
    from trilobite.quantize.run.options import pick_device

    return pick_device(name).type


def check_output(output: Path, *texts: Path | None) -> None:
    """Raise DestinationError for a file that cannot be made, or that is one of the texts; before anything runs."""
    if not output.absolute().parent.is_dir():
        raise DestinationError(
            f"{output}: cannot be written, there is no folder {output.parent}; make it first"
        )
    if any(text and text.exists() and output.exists() and output.samefile(text) for text in texts):
        raise DestinationError(f"{output}: is the text itself; choose another file for what is found")


def frequencies(path: Path | None) -> "Mapping[str, Sequence[int]] | None":
    """Expert frequencies from a file, where one is given."""
    if path is None:
        return None
    from trilobite.evaluate.frequency import load_frequency

    return load_frequency(path)
