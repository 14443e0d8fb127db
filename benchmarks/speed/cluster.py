"""How long would models take that nobody compressed here, on clusters that nobody has here? An extrapolation.

    python -m benchmarks.speed.cluster [--cores 32] [--storage 2] [--network 3]

From rates of one core that docs/results.md measured (Zen 5, AVX-512) and from shapes of the models. A run takes as
long as what binds it: the cores of all nodes, the storage that all read and write, or the one matrix that takes longest.
Calibrated recipes take that and the passes of the model, which the cores of one node make, and no less than its network
takes for the Hessians. Left out: Ray's own cost, the start of some ten seconds, what storage does with many readers, and
that the cores of a node share its memory. The last line is JSON.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_output, add_page, parser, publish

SEARCH, MILO, GPTQ, PRODUCT = 155e6, 1.0e6, 3.1e6, 171e9
"""Of one core: weights per second by search, by MiLo with rank 512, by GPTQ at K = 4096 (in proportion to 1 / K);
operations per second of fp32 products."""
FACTOR = 1.1 / 4096**3
"""Seconds of a core to prepare a Hessian for GPTQ, by K cubed."""
TOKENS = 128 * 2048
PASSES = 2.5
"""Forward passes of calibration: one to watch, one to go on, and the experts' gate and up once more."""
BITS = 3.5


@dataclass(frozen=True, kw_only=True)
class Model:
    """Shapes of a model: experts are [inner, hidden] twice and [hidden, inner].

    active: weights that a token meets    inputs: columns of what else has a Hessian in a layer
    longest: weights of the largest dense matrix    nbytes: of the original
    """

    name: str
    layers: int
    experts: int
    chosen: int
    hidden: int
    inner: int
    dense: float
    active: float
    inputs: tuple[int, ...]
    longest: float
    nbytes: float

    @property
    def sparse(self) -> float:
        """Weights of routed experts."""
        return 3.0 * self.layers * self.experts * self.hidden * self.inner


MODELS = (
    Model(
        name="Qwen3-235B-A22B",
        layers=94,
        experts=128,
        chosen=8,
        hidden=4096,
        inner=1536,
        dense=6.7e9,
        active=22e9,
        inputs=(4096, 8192),
        longest=8192 * 4096,
        nbytes=470e9,
    ),
    Model(
        name="DeepSeek-V3-671B",
        layers=58,
        experts=256,
        chosen=8,
        hidden=7168,
        inner=2048,
        dense=15.2e9,
        active=37e9,
        inputs=(7168, 1536, 512, 16384, 7168, 2048),
        longest=7168 * 16384,
        nbytes=688e9,
    ),
)


def core_seconds(model: Model, recipe: str) -> tuple[float, float]:
    """Of all rounding, and of the longest matrix."""
    weights = model.sparse + model.dense
    if recipe == "search3":
        return weights / SEARCH, model.longest / SEARCH
    if recipe == "milo-s1":
        return model.sparse / SEARCH + model.dense / MILO, model.longest / MILO
    # Of an expert's weights two thirds have K = hidden, one third K = inner.
    mean = (2 * model.hidden + model.inner) / 3
    prepare = model.layers * model.experts * FACTOR * (model.hidden**3 + model.inner**3)
    widest = max(model.inputs)
    longest = FACTOR * widest**3 + model.longest / GPTQ * widest / 4096
    return weights / GPTQ * mean / 4096 + prepare, longest


def passes(model: Model) -> float:
    """Operations of calibration: the forward passes, and the sums of x xᵀ."""
    squares = sum(k * k for k in model.inputs) + model.chosen * (model.hidden**2 + model.inner**2)
    return 2.0 * TOKENS * (PASSES * model.active + model.layers * squares)


def estimate(
    model: Model, recipe: str, *, nodes: int, cores: int, storage: float, network: float
) -> dict[str, Any]:
    """Seconds by what binds. storage, network: bytes per second of the storage, and of one node's network."""
    work, longest = core_seconds(model, recipe)
    written = (model.sparse + model.dense) * BITS / 8
    row: dict[str, Any] = {
        "cores": work / (nodes * cores),
        "storage": (model.nbytes + written) / min(storage, nodes * network),
        "longest matrix": longest,
    }
    calibrated = recipe == "gptq3"
    if calibrated and nodes > 1:
        of_expert = 4.0 * (model.hidden**2 + model.inner**2)
        row["network"] = model.layers * model.experts * of_expert / network
    row["passes"] = passes(model) / (PRODUCT * cores) if calibrated else 0.0
    bound = max((name for name in row if name != "passes"), key=lambda name: row[name])
    row["total"] = row[bound] + row["passes"]
    row["binds"] = "passes" if row["passes"] > row[bound] else bound
    return {"model": model.name, "recipe": recipe, "nodes": nodes, **row}


def minutes(seconds: float | None) -> str:
    """A cell."""
    return "" if not seconds else f"{seconds / 60:.1f}" if seconds < 600 else f"{seconds / 60:.0f}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cores", type=int, default=32, help="of a node")
    options.add_argument("--storage", type=float, default=2.0, help="GB/s of the storage, all nodes together")
    options.add_argument("--network", type=float, default=3.0, help="GB/s of one node")
    add_output(options)
    add_page(options, "cluster")
    args = options.parse_args()
    rows = [
        estimate(
            model,
            recipe,
            nodes=nodes,
            cores=args.cores,
            storage=args.storage * 1e9,
            network=args.network * 1e9,
        )
        for model in MODELS
        for recipe in ("search3", "milo-s1", "gptq3")
        for nodes in (1, 8, 64)
    ]
    kinds = ("cores", "storage", "longest matrix", "network", "passes", "total")
    cells = [
        (r["model"], r["recipe"], str(r["nodes"]), *(minutes(r.get(kind)) for kind in kinds), r["binds"])
        for r in rows
    ]
    report = f"Minutes; {args.cores} cores a node, storage {args.storage:g} GB/s, "
    report += f"network {args.network:g} GB/s a node.\n\n"
    report += table(("model", "recipe", "nodes", *kinds, "what binds"), cells)
    publish(
        report, {"benchmark": "cluster", "rows": rows}, page=args.page, marker="cluster", output=args.output
    )


if __name__ == "__main__":
    main()
