"""sensitivity: which parts of a model suffer from errors, for the planner."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from trilobite.cli.console import Progress, note, number, print_table, quiet
from trilobite.cli.options import (
    JsonOption,
    RevisionOption,
    UnmatchedOption,
    check_output,
    named,
)

SAMPLES = 16
"""Windows of a text: importance asks for few, and --tokens says how many of them divergences are measured on."""


def sensitivity(
    src: Annotated[
        str,
        typer.Argument(help="Folder of the original checkpoint, or a hub id.", callback=named, metavar="SRC"),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for compress --sensitivity.", metavar="FILE")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", help="A text of yours in the place of the one that comes along.", metavar="FILE"
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Of the text, to measure on.", min=2, metavar="N")
    ] = 2048,
    keep_unmatched: UnmatchedOption = False,
    revision: RevisionOption = None,
    json: JsonOption = False,
) -> None:
    """Measure what errors in each part of a model cost: its parts are rounded one at a time.

    One block is in memory at a time, in fp32; the time is that of half as many passes through the model as it has parts.

    \b
    Example: trilobite sensitivity mistralai/Mixtral-8x7B-v0.1 -o mixtral.json
    """
    if output is not None:
        check_output(output, text)
    from trilobite.checkpoint.files import write_whole
    from trilobite.checkpoint.source import open_source
    from trilobite.quantize.calibrate.windows import Calibration
    from trilobite.quantize.run.options import Options
    from trilobite.quantize.run.sensitivity import measure_sensitivity
    from trilobite.quantize.watcher import Watcher

    source = open_source(src, revision=revision, remote=True)
    calibration = None if text is None else Calibration(text=text, samples=SAMPLES, propagate="original")
    with quiet(), Progress() as bars:
        found = measure_sensitivity(
            source,
            tokens=tokens,
            calibration=calibration,
            keep_unmatched=keep_unmatched,
            options=Options(watcher=Watcher(progress=bars.show, note=note)),
        )
        bars.complete()
    if output is not None:
        write_whole(output, (jsonlib.dumps(found, indent=1) + "\n").encode())
    if json:
        print(jsonlib.dumps(found, indent=2))
        return
    rows = [
        (
            row["layer"],
            row["role"],
            row["part"],
            number(row["error"]),
            number(row["kl"], 5),
            number(row["kl"] / row["error"]),
        )
        for row in found["measured"]
    ]
    columns = ("layer", "role", "part", "error", "KL", "KL / error")
    print_table(columns, rows, title=f"{src}: each part alone in {found['format']}", left=3)
