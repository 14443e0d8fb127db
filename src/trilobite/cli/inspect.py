"""inspect, doctor, version: what is here."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.cli.compress import print_kept, print_report
from trilobite.cli.console import Progress, count, note, number, print_json, print_table, size
from trilobite.cli.options import JsonOption, RevisionOption, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

    from trilobite.checkpoint.source import Source
    from trilobite.checkpoint.summary import RoleSummary
    from trilobite.quantize.plan.report import Account
    from trilobite.quantize.plan.statistics import RoleSample


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            help="An original or a packed checkpoint: folder, hub id or URL.", callback=named, metavar="PATH"
        ),
    ],
    samples: Annotated[
        int, typer.Option(help="Measure at most so many matrices of each role; 0 = none.", min=0, metavar="N")
    ] = 4,
    everything: Annotated[bool, typer.Option("--all", help="Measure all matrices (slow).")] = False,
    revision: RevisionOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw a figure (.png or .svg).", metavar="FILE")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds, by role.

    Of a packed one: formats, ranks, errors, bits per weight and what they are for. Of an original: how a sample
    of its matrices looks (MiLo, Table 2). Kurtosis is 0 for a normal distribution, and more for outliers; the
    residual rank counts singular values of what INT3 rounding loses that are below half of the largest.

    \b
    Example: trilobite inspect mixtral-3bit --json
    """
    from trilobite.checkpoint.packed import check_finished
    from trilobite.checkpoint.roles import identify
    from trilobite.checkpoint.source import open_source
    from trilobite.checkpoint.summary import is_packed, summarize
    from trilobite.quantize.plan.statistics import sample_roles
    from trilobite.quantize.watcher import Watcher

    check_finished(Path(path))  # before it is opened: an unfinished run is no checkpoint
    source = open_source(path, revision=revision, remote=True)
    if is_packed(source.path) or _names_trilobite(source.config):
        _inspect_packed(source, json, plot)
        return
    matrices = identify(source, keep_unmatched=True)
    with Progress() as bars:
        watcher = Watcher(progress=bars.show)
        sampled = sample_roles(source, matrices, samples=None if everything else samples, watcher=watcher)
        bars.complete()
    rows = summarize(source, matrices)
    if plot is not None:
        from trilobite.report import figures

        _draw(plot, lambda: figures.original(path, rows, sampled))
    if json:
        print_json(_original(path, str(source.config.get("model_type")), rows, sampled))
    else:
        _print_original(f"{path}: {source.config.get('model_type')}", rows, sampled)


def _names_trilobite(config: dict[str, Any]) -> bool:
    """Whether this is the config.json of a packed checkpoint, whose report may be lost."""
    found = config.get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == "trilobite"


def _original(
    path: str, model_type: str, rows: "list[RoleSummary]", sampled: "dict[Any, RoleSample]"
) -> dict[str, Any]:
    roles: dict[str, Any] = {}
    for row in rows:
        data = {
            "tensors": row.tensors,
            "parameters": row.parameters,
            "bytes": row.bytes,
            "dtypes": dict(row.dtypes),
        }
        roles[row.role.value] = data | (
            {"sample": sampled[row.role].to_dict()} if row.role in sampled else {}
        )
    return {
        "path": path,
        "kind": "original",
        "model_type": model_type,
        "parameters": sum(r.parameters for r in rows),
        "tensor_bytes": sum(r.bytes for r in rows),
        "roles": roles,
    }


def _print_original(title: str, rows: "list[RoleSummary]", sampled: "dict[Any, RoleSample]") -> None:
    table = []
    for row in rows:
        s = sampled.get(row.role)
        measured = (
            (str(s.matrices), number(s.kurtosis, 2), f"{s.residual_rank:.0f} ({100 * s.share:.0f} %)")
            if s
            else ()
        )
        table.append(
            (
                row.role.value,
                ", ".join(row.dtypes),
                str(row.tensors),
                count(row.parameters),
                size(row.bytes),
                *(measured or ("", "", "")),
            )
        )
    total = (sum(r.tensors for r in rows), sum(r.parameters for r in rows), sum(r.bytes for r in rows))
    table.append(("total", "", str(total[0]), count(total[1]), size(total[2]), "", "", ""))
    columns = ("role", "dtype", "tensors", "params", "bytes", "measured", "kurtosis", "residual rank")
    print_table(columns, table, title=title, left=2)


def _inspect_packed(source: "Source", json: bool, plot: Path | None) -> None:
    from trilobite.report import figures
    from trilobite.report.read import read_packed

    packed = read_packed(source.path, source.folder.nbytes)
    made, accounts, recipe = packed.made, packed.accounts, packed.recipe
    head = {key: packed.head[key] for key in ("format_version", "rank", "source")}
    if plot is not None:
        _draw(plot, lambda: figures.overview(packed))
    if json:
        head = {"path": str(source), "kind": "packed", "recipe": recipe} | head
        print_json(head | made.to_dict() | {"accounts": [a.to_dict() for a in accounts]})
        return
    ranks = f", ranks {head['rank']}" if head["rank"] else ""
    print_report(
        made, f"{source}: packed from {head['source']} with {recipe}{ranks}, format {head['format_version']}"
    )
    _print_accounts(accounts)
    print_kept(made)


def _draw(path: Path, draw: "Callable[[], Figure]") -> None:
    from trilobite.report.svg import check_ending, drawing, save

    check_ending(path)
    with drawing():
        save(draw(), path)
    note(f"drawn into {path}")


def _print_accounts(accounts: "Sequence[Account]") -> None:
    """Bits per weight by what they are for; parts that no matrix has are left out."""
    from trilobite.quantize.plan.report import PARTS

    parts = [part for part in PARTS if any(a.bits[part] for a in accounts)]
    rows = [
        (
            a.role,
            a.format,
            *(number(a.bits[part], 4) if a.bits[part] else "" for part in parts),
            number(a.total, 4),
        )
        for a in accounts
    ]
    print_table(("bits per weight", "format", *parts, "total"), rows, left=2)
    if any(a.format.startswith("e8p") for a in accounts):
        print(
            "The tables of E8P and of 1-bit E8 (1 KiB each) are part of the program and shared by all matrices."
        )


def doctor(json: JsonOption = False) -> None:
    """Show what this machine offers.

    Versions, processor, memory and its measured bandwidth, the kernels chosen and why.

    \b
    Example: trilobite doctor --json
    """
    from trilobite.doctor import examine

    found = examine()
    if json:
        print_json(found)
        return
    rows = [(key.replace("_", " "), _flat(value)) for key, value in found.items()]
    if sys.stdout.isatty():
        print_table(("", ""), rows, left=2)
    else:  # one line each, however long
        for key, text in rows:
            print(f"{key:<15} {text}")


def _flat(value: Any) -> str:
    """Nested plain data on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_flat(v)}" for key, v in value.items())
    if isinstance(value, list):
        return " ".join(_flat(v) for v in value) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def version() -> None:
    """Print the version."""
    from trilobite import __version__

    print(f"trilobite {__version__}")
