"""Budgets in the place of recipes: their options, and why each part of a model got what it got."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.cli.console import number, print_table, quiet, size
from trilobite.recipe import CODEBOOKS, parse_role

if TYPE_CHECKING:
    from trilobite.quantize.budget.goal import Budget

BitsOption = Annotated[
    float | None,
    typer.Option(
        "--bits",
        help="In the place of a recipe: the best one with so many bits a weight, scales included, in attention, MLPs "
        "and experts.",
        metavar="BITS",
    ),
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--size",
        help="In the place of a recipe: the best one whose files come to at most so much (18GB).",
        metavar="SIZE",
    ),
]
FitOption = Annotated[
    str | None,
    typer.Option(
        "--fit",
        help="In the place of a recipe: the best one that runs in so much memory (16GiB), with keys and values of "
        "--context tokens.",
        metavar="SIZE",
    ),
]
PerExpertOption = Annotated[
    bool,
    typer.Option("--per-expert", help="With --bits, --size, --fit: experts of a layer may differ in format."),
]
RanksOption = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        help="With --bits, --size, --fit: ranks of compensators to try as well, such as h/128,h/32 (h = hidden size); "
        "compressing then takes many times as long.",
        metavar="RANKS",
    ),
]
LATTICES_WIN = 3.1
"""Bits below which plans with lattices lost less on three of four models (docs/results.md)."""
LatticeOption = Annotated[
    bool,
    typer.Option(
        "--lattice",
        help="With --bits, --size, --fit: try e8p-2, e8p-3 and e8p-4 as well, which lose less for their bytes; they are "
        "slow to find and slower to run.",
    ),
]
SensitivityOption = Annotated[
    Path | None,
    typer.Option(
        "--sensitivity",
        help="With --bits, --size, --fit: what `trilobite sensitivity` measured, in the place of what is usual.",
        metavar="FILE",
    ),
]


def chosen_budget(
    src: str,
    bits: float | None,
    size: str | None,
    fit: str | None,
    *,
    recipe: str | None,
    context: int | None,
    per_expert: bool,
    ranks: str | None,
    lattice: bool,
    sensitivity: Path | None,
    keep: list[str] | None,
    columns: str | None,
    importance: str | None,
    method: str | None,
    revision: str | None,
    keep_unmatched: bool,
    fixed: Mapping[str, object],
) -> "Budget | None":
    """What the command line asks the planner for; None where it names a recipe.

    fixed: options that a planner leaves no room for, by name
    Raises typer.BadParameter where neither or both are given, TrilobiteError for what cannot be.
    """
    given = {"--bits": bits, "--size": size, "--fit": fit}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) + (recipe is not None) != 1:
        raise typer.BadParameter("give one of --recipe, --bits, --size and --fit")
    if not asked:
        alone = {
            "--per-expert": per_expert,
            "--ranks": ranks,
            "--lattice": lattice,
            "--sensitivity": sensitivity,
        }
        if unused := [name for name, value in alone.items() if value]:
            raise typer.BadParameter(f"{unused[0]} goes with --bits, --size or --fit")
        return None
    if unused := [name for name, value in fixed.items() if value is not None]:
        raise typer.BadParameter(f"--{unused[0]} goes with --recipe: {asked[0]} chooses that itself")
    from trilobite.quantize.budget.goal import Budget
    from trilobite.quantize.budget.measured import read_sensitivities
    from trilobite.runtime.offload.plan import parse_size

    if method is None and importance is None and not ranks:
        method = _usual_method(src, revision, keep_unmatched=keep_unmatched)
    return Budget(
        bits=bits,
        size=None if size is None else parse_size(size),
        fit=None if fit is None else parse_size(fit),
        reserved=_reserved(src, context) if fit is not None else 0,
        per_expert=per_expert,
        ranks=tuple(filter(None, (ranks or "").replace(" ", "").split(","))),
        lattice=lattice,
        keep=tuple(parse_role(role) for part in keep or () for role in part.split(",")),
        columns=columns or "auto",
        importance=importance or "auto",
        method=method or "search",
        sensitivities={} if sensitivity is None else read_sensitivities(sensitivity),
    )


def _usual_method(src: str, revision: str | None, *, keep_unmatched: bool) -> str:
    """How codes are found for such a model where nobody says."""
    with quiet():
        from trilobite.checkpoint.source import open_source
        from trilobite.quantize.run.planned import usual_method

        source = open_source(src, revision=revision, remote=True)
        return usual_method(source, keep_unmatched=keep_unmatched)


def print_account(account: Mapping[str, Any]) -> None:
    """Why each part of the model got what it got."""
    from trilobite.quantize.budget.account import by_part

    rows = [
        (
            p.role,
            p.part,
            p.formats,
            number(p.bits, 3),
            size(p.nbytes),
            number(p.loss),
            f"+{size(p.more_bytes)}" if p.more_bytes else "",
            f"-{number(p.less_loss)}" if p.more_bytes else "",
        )
        for p in by_part(account)
    ]
    columns = ("role", "part", "format", "bits/weight", "bytes", "loss", "next better", "loss")
    print_table(
        columns, rows, title="What the planner chose, and what a step more would cost and save", left=3
    )
    print(
        f"Predicted loss {number(account['loss'])} (KL divergence, as a rule of thumb); bytes that count "
        f"{size(account['bytes'])}, possible {size(account['least'])} to {size(account['most'])}"
    )
    if not account["budget"]["lattice"] and _lattices_would_help(account["choices"]):
        print(
            f"Below {LATTICES_WIN} bits a weight --lattice mostly loses less, and is slower to find and to run."
        )
    if account["budget"]["method"] == "search":
        print(
            "--method gptq feeds errors back and loses a fifth to three fifths as much; texts that the model writes, or "
            "yours\n(--calibration), then pass through it: minutes for a small model, hours for a large one."
        )
    print()


def _lattices_would_help(choices: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a plan is of few bits, and of integers alone."""
    bits = 8 * sum(row["bytes"] for row in choices) / sum(row["weights"] for row in choices)
    return bits < LATTICES_WIN and not any(row["format"].startswith(CODEBOOKS) for row in choices)


def _reserved(src: str, context: int | None) -> int:
    """Memory that weights do not get."""
    from trilobite.checkpoint.source import open_source
    from trilobite.runtime.offload.plan import Offload
    from trilobite.runtime.room import room_beside_weights

    return room_beside_weights(open_source(src, remote=True), Offload.context if context is None else context)
