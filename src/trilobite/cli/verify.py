"""verify: is a packed checkpoint what was written?"""

from typing import Annotated

import typer

from trilobite.cli.console import Progress, print_json, size
from trilobite.cli.options import JsonOption, named
from trilobite.errors import CheckpointError


def verify(
    path: Annotated[
        str,
        typer.Argument(help="A packed checkpoint: folder, hub id or URL.", callback=named, metavar="PATH"),
    ],
    json: JsonOption = False,
) -> None:
    """Read a packed checkpoint whole and compare every tensor and file with its checksum.

    Damage (a copy that was cut off, a disk that forgets) ends with status 1 and the names of what is damaged.

    \b
    Example: trilobite verify mixtral-3bit
    """
    from trilobite.checkpoint import verify as checks
    from trilobite.checkpoint.source import open_source

    source = open_source(path, remote=True)
    total, done = sum(info.nbytes for info in source.tensors.values()), 0
    found = []
    with Progress() as bars:
        for checked in checks.verify(source):
            found.append(checked)
            done += checked.nbytes
            bars.show("verify", done, total, f"{size(done)}/{size(total)}")
        bars.complete()
    damaged = [checked for checked in found if checked.damage]
    if json:
        rows = [{"name": c.name, "damage": c.damage} for c in damaged]
        print_json({"path": str(source), "checked": len(found), "bytes": done, "damaged": rows})
    else:
        for checked in damaged:
            print(f"{checked.name} {checked.damage}")
    if damaged:
        raise CheckpointError(checks.tell(source, damaged))
    if not json:
        print(f"{source}: all {len(found)} tensors and files, {size(done)}, are as they were written")
