"""Options of commands that give work to a cluster, and what they print of it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.cli.console import count, note, print_table

if TYPE_CHECKING:
    from trilobite.integrations.ray import RayWorkers

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        help="Pack with the workers of a Ray cluster: HOST:PORT of its head, auto for the cluster of this machine, or "
        "local for worker processes on this machine alone.",
        metavar="ADDRESS",
    ),
]
WorkersOption = Annotated[
    int,
    typer.Option("--workers", help="Workers of --ray; 0 = one a core of the cluster.", min=0, metavar="N"),
]
NodesOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="With --ray: also say what each node did, and how fast.")
]


def chosen_workers(address: str | None, workers: int) -> "RayWorkers | None":
    """Workers that pack, where a cluster is asked for."""
    if address is None:
        if workers:
            raise typer.BadParameter("goes with --ray; on one machine it is --jobs", param_hint="--workers")
        return None
    from trilobite.integrations.ray import RayWorkers

    return RayWorkers(address, workers, note)


def described_nodes(workers: "RayWorkers") -> list[dict[str, Any]]:
    """What each node of a cluster did, for JSON."""
    return [
        {"node": n.name, "tensors": n.tensors, "weights": n.weights, "weights_per_second": round(n.rate)}
        for n in workers.nodes.values()
    ]


def print_nodes(workers: "RayWorkers") -> None:
    """What each node of a cluster did."""
    rows = [(n.name, str(n.tensors), count(n.weights), f"{n.rate / 1e6:.1f}") for n in workers.nodes.values()]
    print_table(("node", "tensors", "weights", "Mweights/s"), sorted(rows))
