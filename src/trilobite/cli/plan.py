"""plan, recipes: what compress would make, and of what."""

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

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
from trilobite.cli.compress import SourceArgument, fixed_options, print_kept, print_report
from trilobite.cli.console import Progress, note, print_json, print_table, quiet, size
from trilobite.cli.options import (
    ColumnsOption,
    CompensatorOption,
    GroupOption,
    ImportanceOption,
    IterationsOption,
    JsonOption,
    KeepOption,
    MethodOption,
    RankOption,
    RecipeOption,
    RevisionOption,
    RoomOption,
    RuntimeOption,
    StatsOption,
    UnmatchedOption,
    chosen_recipe,
    frequencies,
)

if TYPE_CHECKING:
    from trilobite.quantize.plan.plan import Plan


def plan(
    src: SourceArgument,
    recipe: RecipeOption = None,
    bits: BitsOption = None,
    size_: SizeOption = None,
    fit: FitOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    keep: KeepOption = None,
    group_size: GroupOption = None,
    rank: RankOption = None,
    method: MethodOption = None,
    compensator: CompensatorOption = None,
    iterations: IterationsOption = None,
    columns: ColumnsOption = None,
    importance: ImportanceOption = None,
    stats: StatsOption = None,
    context: RoomOption = None,
    per_expert: PerExpertOption = False,
    ranks: RanksOption = None,
    lattice: LatticeOption = False,
    sensitivity: SensitivityOption = None,
    keep_unmatched: UnmatchedOption = False,
    runtime: RuntimeOption = None,
    revision: RevisionOption = None,
    json: JsonOption = False,
) -> None:
    """Show what compress would make, by role.

    Nothing is quantized or written; a kurtosis-r rank reads the weights once.

    \b
    Example: trilobite plan mistralai/Mixtral-8x7B-v0.1 --size 20GB

    \b
    Example: trilobite plan mistralai/Mixtral-8x7B-v0.1 --recipe milo-s1 --group-size 128
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
    from trilobite.checkpoint.source import open_source
    from trilobite.quantize.columns.choose import with_column_scales
    from trilobite.quantize.plan.plan import plan_json
    from trilobite.quantize.plan.report import report
    from trilobite.quantize.plan.runtimes import RUNTIMES
    from trilobite.quantize.run.compress import prepare
    from trilobite.quantize.run.options import Options
    from trilobite.quantize.run.planned import plan_within
    from trilobite.quantize.watcher import Watcher

    source, account = open_source(src, revision=revision, remote=True), None
    with quiet() if budget else nullcontext(), Progress() as bars:
        watcher = Watcher(progress=bars.show, note=note)
        if budget:
            planned = plan_within(
                source, budget, keep_unmatched=keep_unmatched, options=Options(watcher=watcher)
            )
            chosen, account = planned.recipe, planned.account
        else:
            chosen = chosen_recipe(
                recipe, keep, group_size, rank, method, compensator, iterations, columns, importance
            )
        source = with_column_scales(source, chosen, keep_unmatched=keep_unmatched)
        made = prepare(
            source, chosen, frequency=frequencies(stats), keep_unmatched=keep_unmatched, watcher=watcher
        )
        bars.complete()
    if runtime:
        RUNTIMES[runtime](made)
    if json:
        sys.stdout.write(plan_json(made, account))
        return
    if account:
        print_account(account)
    summary = report(made.to_dict()["tensors"])
    if tensors:
        _print_tensors(made)
    print_report(summary, f"{src}, recipe {chosen.name}, ranks {made.rank or 'none'}")
    print_kept(summary)
    print("This counts tensor data; headers, index and tokenizer files come on top. Nothing was written.")


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="A preset or a YAML file, to print.", metavar="NAME")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the presets, or print one as YAML.

    \b
    Example: trilobite recipes milo-s1 > mine.yaml
    """
    from trilobite.recipe import PRESETS, load_recipe

    if name is not None:
        data = load_recipe(name).to_dict()
        if json:
            print_json(data)
            return
        import yaml

        print(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110), end="")
    elif json:
        print_json({r.name: r.to_dict() | {"summary": r.summary} for r in PRESETS.values()})
    else:
        print_table(("recipe", "what it does"), [(r.name, r.summary) for r in PRESETS.values()], left=2)


def _print_tensors(made: "Plan") -> None:
    rows = [
        (
            line.matrix.name,
            str(line.format or "16 bit"),
            "x".join(map(str, line.matrix.shape)),
            str(line.rank or ""),
            size(line.nbytes),
            line.note,
        )
        for line in made.lines
    ]
    print_table(("tensor", "format", "shape", "rank", "bytes", "note"), rows, left=2)
