"""compress: from an original checkpoint to a packed one."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.cli.budget import (
    BitsOption,
    FitOption,
    LatticeOption,
    PerExpertOption,
    RanksOption,
    SensitivityOption,
    SizeOption,
    chosen_budget,
    print_account,
)
from trilobite.cli.cluster import (
    NodesOption,
    RayOption,
    WorkersOption,
    chosen_workers,
    described_nodes,
    print_nodes,
)
from trilobite.cli.console import (
    CompressProgress,
    Progress,
    count,
    note,
    number,
    print_json,
    print_table,
    quiet,
    size,
)
from trilobite.cli.options import (
    CalibrationMemoryOption,
    CalibrationOption,
    ColumnsOption,
    CompensatorOption,
    ContextOption,
    DeviceOption,
    FinetuneOption,
    GroupOption,
    HessiansOption,
    ImportanceOption,
    IterationsOption,
    JsonOption,
    KeepOption,
    MethodOption,
    PropagateOption,
    RankOption,
    RecipeOption,
    RevisionOption,
    RuntimeOption,
    SamplesOption,
    SaveHessiansOption,
    ScratchOption,
    SeedOption,
    StatsOption,
    TargetTextOption,
    UnmatchedOption,
    chosen_calibration,
    chosen_recipe,
    frequencies,
    named,
    usable_device,
)
from trilobite.signals import tell_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trilobite.integrations.ray import RayWorkers
    from trilobite.quantize.plan.report import Report
    from trilobite.quantize.run.compress import Result

SCARCE = 20
"""Lines of the table of experts that saw few tokens."""
COLUMNS = ("role", "format", "tensors", "params", "bytes", "bits/weight", "rank", "error")


def fixed_options(
    group_size: int | None,
    rank: str | None,
    compensator: str | None,
    iterations: int | None,
    stats: Path | None,
) -> dict[str, object]:
    """Options that change a recipe and mean nothing to a budget, by name."""
    return {
        "group-size": group_size,
        "rank": rank,
        "compensator": compensator,
        "iterations": iterations,
        "stats": stats,
    }


SourceArgument = Annotated[
    str,
    typer.Argument(
        help="Folder of the original checkpoint, a hub id, or a URL (s3://, gs://, hf://).",
        callback=named,
        metavar="SRC",
    ),
]


def compress(
    src: SourceArgument,
    dst: Annotated[
        str,
        typer.Argument(help="New folder for the packed checkpoint, or a URL.", callback=named, metavar="DST"),
    ],
    recipe: RecipeOption = None,
    bits: BitsOption = None,
    size_: SizeOption = None,
    fit: FitOption = None,
    jobs: Annotated[
        int, typer.Option(help="Matrices in work at a time; 0 = one a core.", min=0, metavar="N")
    ] = 0,
    device: DeviceOption = "auto",
    keep: KeepOption = None,
    group_size: GroupOption = None,
    rank: RankOption = None,
    method: MethodOption = None,
    compensator: CompensatorOption = None,
    iterations: IterationsOption = None,
    columns: ColumnsOption = None,
    importance: ImportanceOption = None,
    stats: StatsOption = None,
    calibration: CalibrationOption = None,
    target: TargetTextOption = None,
    samples: SamplesOption = None,
    context: ContextOption = None,
    per_expert: PerExpertOption = False,
    ranks: RanksOption = None,
    lattice: LatticeOption = False,
    sensitivity: SensitivityOption = None,
    seed: SeedOption = None,
    propagate: PropagateOption = None,
    memory: CalibrationMemoryOption = None,
    save_hessians: SaveHessiansOption = None,
    hessians: HessiansOption = None,
    finetune: FinetuneOption = None,
    keep_unmatched: UnmatchedOption = False,
    runtime: RuntimeOption = None,
    revision: RevisionOption = None,
    scratch: ScratchOption = None,
    ray: RayOption = None,
    workers: WorkersOption = 0,
    verbose: NodesOption = False,
    json: JsonOption = False,
) -> None:
    """Compress a checkpoint to a new folder.

    SRC and DST may be URLs (docs/cluster.md): tensors are then read one by one, and finished files sent one by one.
    Killed or interrupted at any moment, the same command continues and ends with the same bytes.

    \b
    Example: trilobite compress mistralai/Mixtral-8x7B-v0.1 mixtral-3bit --bits 3.5

    \b
    Example: trilobite compress mistralai/Mixtral-8x7B-v0.1 mixtral-3bit --recipe milo-s1

    \b
    Example: trilobite compress s3://models/Mixtral-8x7B s3://models/mixtral-3bit -r milo-s1

    \b
    Example: trilobite compress mistralai/Mixtral-8x7B-v0.1 mixtral-gptq -r gptq3 --calibration wiki.txt
    """
    budget = chosen_budget(
        src,
        bits,
        size_,
        fit,
        recipe=recipe,
        context=context,
        per_expert=per_expert,
        ranks=ranks,
        lattice=lattice,
        sensitivity=sensitivity,
        keep=keep,
        columns=columns,
        importance=importance,
        method=method,
        revision=revision,
        keep_unmatched=keep_unmatched,
        fixed=fixed_options(group_size, rank, compensator, iterations, stats),
    )
    chosen = budget or chosen_recipe(
        recipe, keep, group_size, rank, method, compensator, iterations, columns, importance
    )
    if fit is not None:  # there it is what memory is left for
        context = None
    ground = chosen_calibration(
        calibration,
        save_hessians,
        hessians,
        target=target,
        samples=samples,
        context=context,
        seed=seed,
        propagate=propagate,
        memory=memory,
        finetune=finetune,
    )
    cluster = chosen_workers(ray, workers)
    from trilobite.checkpoint.remote.store import is_url
    from trilobite.checkpoint.source import open_source
    from trilobite.quantize.plan.runtimes import RUNTIMES
    from trilobite.quantize.run.compress import compress as run

    if scratch is not None and not is_url(dst):
        raise typer.BadParameter("goes with a DST that is a URL", param_hint="--scratch")
    if revision is not None or not is_url(src):  # downloaded before our bars come: it has bars of its own
        src = str(open_source(src, revision=revision, remote=True).path)
    with quiet() if ground or budget or chosen.importance != "none" else nullcontext(), Progress() as bars:
        progress = CompressProgress(bars, RUNTIMES[runtime] if runtime else None)
        tell_state(progress.state)
        result = run(
            src,
            dst,
            chosen,
            frequency=frequencies(stats),
            keep_unmatched=keep_unmatched,
            calibration=ground,
            options=progress.options(jobs, device if cluster else usable_device(device), cluster, scratch),
        )
        tell_state(None)
    _print_result(dst, result, json, cluster if verbose else None)


def _print_result(dst: str, result: "Result", json: bool, cluster: "RayWorkers | None") -> None:
    from trilobite.checkpoint.packed import read_report
    from trilobite.checkpoint.source import open_source
    from trilobite.quantize.plan.report import faint, report, scarce, slowest

    packed = open_source(dst, remote=True)
    found = read_report(packed.path)
    tensors = found["tensors"]
    made = report(tensors, bytes_on_disk=packed.folder.nbytes)
    slow = slowest(result.records)
    if json:
        extra: dict[str, Any] = {
            "destination": dst,
            "recipe": result.plan.recipe.name,
            "rank": result.plan.rank,
        }
        if few := scarce(tensors):
            extra["few_tokens"] = [
                dict(zip(("module", "matrices", "tokens", "own"), r, strict=True)) for r in few
            ]
        if scaled := faint(tensors):
            extra["scaled"] = scaled
        extra |= {"seconds": round(result.seconds, 3), "fresh": result.fresh, "slowest": dict(slow)}
        if cluster:
            extra["nodes"] = described_nodes(cluster)
        print_json(made.to_dict() | extra)
        return
    if cluster:
        print_nodes(cluster)
    if not result.fresh:
        note(f"{dst}: is already complete; nothing was done")
    if account := found["identity"].get("planner"):
        print_account(account)
    print_report(made, f"{dst}, recipe {result.plan.recipe.name}")
    print_kept(made)
    _print_scarce(tensors)
    if scaled := faint(tensors):
        note(
            f"{len(scaled)} matrices are stored times powers of two, first {scaled[0]}: their weights are below what "
            "fp16 scales hold; models that are loaded have them in 16 bit"
        )
    if slow:
        print_table(("slowest tensors", "seconds"), [(name, number(s, 2)) for name, s in slow])
    print(f"{count(made.parameters)} parameters in {size(made.bytes_on_disk or 0)}, ", end="")
    print(f"{made.bits_per_weight:.3f} bits per weight counting every file, {result.seconds:.1f} s")


def _print_scarce(tensors: "Sequence[Mapping[str, Any]]") -> None:
    """The matrices that saw so few calibration tokens that others' Hessians, or none, stood in for their own."""
    from trilobite.quantize.plan.report import scarce

    rows = [
        (where, matrices, str(tokens), f"{own:.0%}" if tokens else "none")
        for where, matrices, tokens, own in scarce(tensors)
    ]
    if rows:
        print_table(("few calibration tokens", "matrices", "tokens", "own Hessian"), rows[:SCARCE], left=2)
        if len(rows) > SCARCE:
            print(f"… and {len(rows) - SCARCE} more; trilobite.json lists all (`tokens`, `own`)\n")


def print_report(made: "Report", title: str) -> None:
    """The table by role, with every byte of the folder where there is one."""
    rows = [
        (
            r.role,
            ", ".join(r.formats),
            str(r.tensors),
            count(r.parameters),
            size(r.bytes),
            number(r.bits_per_weight, 3),
            number(r.rank, 1) if r.rank else "",
            number(r.error),
        )
        for r in made.roles
    ]
    tensors = str(sum(r.tensors for r in made.roles))
    total = made.tensor_bytes
    if made.bytes_on_disk is not None:
        total = made.bytes_on_disk
        rows.append(("other files", "", "", "", size(total - made.tensor_bytes), "", "", ""))
    rows.append(
        ("total", "", tensors, count(made.parameters), size(total), number(made.bits_per_weight, 3), "", "")
    )
    print_table(COLUMNS, rows, title=title, left=2)


def print_kept(made: "Report") -> None:
    """What stays in 16 bit, and why."""
    rows = [(role, reason, str(tensors), count(numel)) for role, reason, tensors, numel in made.kept]
    if rows:
        print_table(("kept", "because", "tensors", "params"), rows, left=2)
