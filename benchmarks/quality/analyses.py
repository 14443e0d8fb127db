"""MiLo's analyses (arXiv:2504.02658) on our models: tables, and plots in docs/figures/.

    python -m benchmarks.quality.analyses [--only table2 figure10 table5 table7 figure11] [--tokens 65536]

table2    kurtosis and rank of the quantization residual by role, and (Figure 5) kurtosis against error
figure10  the error of eq. 14 over the iterations, for attention and expert matrices
table5    compensators in INT3, INT8 and 16 bit at several ranks
table7    rank policies at equal memory, one iteration, HQQ inside, as in the paper
figure11  rank against perplexity and memory

Ranks are the paper's as fractions of the hidden size. Perplexity and KL as in quality.py. Needs matplotlib
(extra `plot`). The last line is JSON.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.lib.markdown import insert, table
from benchmarks.lib.packed import Packed, frequencies, pack
from benchmarks.lib.rank_recipes import INT3, compensated, compensator_bytes, equal_memory, once
from benchmarks.lib.scoring import Bench, open_bench
from benchmarks.lib.script import SHARED, add_page, add_text, add_work, parser
from trilobite.checkpoint.roles import Matrix, identify, read_matrix
from trilobite.checkpoint.source import Source, open_source
from trilobite.evaluate.perplexity import Score
from trilobite.quantize.methods.bands import relative_error
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS, quantize
from trilobite.quantize.plan.statistics import TAU, kurtosis, residual_rank
from trilobite.recipe import PUBLISHED_ITERATIONS, Recipe, Role

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs/figures"
TITLES = {
    Role.ATTENTION: "attention (D)",
    Role.SHARED_EXPERT: "shared expert (D)",
    Role.DENSE_MLP: "dense MLP (D)",
    Role.EXPERT: "expert (S)",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What to run on. outliers: the model of the sections that need only one    models: of the others."""

    outliers: Path
    models: tuple[Path, ...]
    text: Path
    context: int
    tokens: int
    work: Path
    fresh: bool
    benches: dict[Path, Bench] = field(default_factory=dict)

    def bench(self, model: Path) -> Bench:
        """The text, tokenised for a model once."""
        if model not in self.benches:
            self.benches[model] = open_bench(model, self.text, context=self.context, tokens=self.tokens)
        return self.benches[model]


@dataclass(frozen=True, kw_only=True)
class Section:
    """The markdown of one section, and its figures as plain data."""

    text: str
    data: Any


def measure(setting: Setting, model: Path, recipes: Mapping[str, Recipe]) -> dict[str, tuple[Packed, Score]]:
    """Compress a model with several recipes and score them all in one pass."""
    frequency = frequencies(model, setting.work)
    packed: dict[str, Packed] = {}
    for name, recipe in recipes.items():
        packed[name] = pack(model, recipe, setting.work, frequency=frequency, fresh=setting.fresh)
        print(f"{model.name} {name}: {packed[name].seconds:.1f} s", flush=True)
    scores = setting.bench(model).scores({name: p.path for name, p in packed.items()})
    return {name: (packed[name], scores[name]) for name in recipes}


def hidden_size(model: Path) -> int:
    """H of a model."""
    return int(open_source(str(model)).config["hidden_size"])


def save(figure: Any, name: str) -> str:
    """Write a plot and return the markdown that shows it."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    return f"![{name}](figures/{name}.png)"


# Table 2 and Figure 5


def table2(setting: Setting) -> Section:
    """Kurtosis and residual rank by role; kurtosis against relative error of INT3 RTN."""
    figure, axes = plt.subplots(1, len(setting.models), figsize=(4 * len(setting.models), 3.4), squeeze=False)
    rows, data = [], []
    for model, axis in zip(setting.models, axes[0], strict=True):
        source = open_source(str(model))
        found = {
            role: [_statistics(source, m) for m in identify(source) if m.role is role] for role in TITLES
        }
        for role, values in found.items():
            if not values:
                continue
            means = [statistics.mean(column) for column in zip(*values, strict=True)]
            rows.append((f"{model.name}: {TITLES[role]}", str(len(values)), *_formatted(means)))
            data.append({"model": model.name, "role": role.value, "means": means})
            axis.scatter(*zip(*[(v[0], v[3]) for v in values], strict=True), s=8, label=TITLES[role])
        every = [v for values in found.values() for v in values]
        r = statistics.correlation(_order([v[0] for v in every]), _order([v[3] for v in every]))
        axis.set(title=f"{model.name}\nrank correlation {r:.2f}", xlabel="excess kurtosis")
        if max(v[0] for v in every) > 20:
            axis.set_xscale("log")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("relative error, INT3 RTN")
    header = (
        "model: role",
        "matrices",
        "kurtosis",
        "small values",
        "share",
        "residual rank",
        "relative error",
    )
    note = (
        f"Small values: singular values of the INT3 residual below {TAU} of the largest, which the caption "
        "of the paper's Table 2 calls its rank; residual rank: the others, as the paper's numbers have it."
    )
    return Section(text=f"{table(header, rows)}\n\n{note}\n\n{save(figure, 'table2')}", data=data)


def _order(values: Sequence[float]) -> list[int]:
    """The place of each value in the sorted list."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return sorted(range(len(values)), key=order.__getitem__)


def _statistics(source: Source, m: Matrix) -> tuple[float, float, float, float]:
    """(excess kurtosis, small singular values, all singular values, relative error) at INT3 g64 RTN."""
    w = read_matrix(source, m)
    small = residual_rank(w)
    return kurtosis(w), small, min(m.shape), relative_error(w, quantize(w, INT3, "rtn"))


def _formatted(means: Sequence[float]) -> tuple[str, str, str, str, str]:
    value, small, every, error = means
    return f"{value:.2f}", f"{small:.0f}", f"{small / every:.0%}", f"{every - small:.0f}", f"{error:.4f}"


# Figure 10


def figure10(setting: Setting) -> Section:
    """The error over the iterations for the attention and the first experts of the middle layer."""
    source = open_source(str(setting.outliers))
    hidden = hidden_size(setting.outliers)
    matrices = identify(source)
    middle = max(m.layer for m in matrices if m.layer is not None) // 2
    chosen = [m for m in matrices if m.layer == middle and (m.role is Role.ATTENTION or m.expert in (0, 1))]
    chosen = [m for m in chosen if m.quantizable]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    rows, data = [], []
    for m in chosen:
        dense = m.role is Role.ATTENTION
        rank = hidden // 8 if dense else hidden // 64
        for method in ("search", "hqq"):
            result = METHODS[method](
                read_matrix(source, m),
                INT3,
                compensation=Compensation(rank=rank, iterations=PUBLISHED_ITERATIONS),
            )
            errors = result.errors
            label = _label(m)
            rises = [b / a - 1 for a, b in pairwise(errors) if b > a]
            rows.append(
                (
                    f"{label} r{rank}, {method}",
                    f"{errors[0]:.4f}",
                    f"{errors[result.best]:.4f}",
                    f"{1 - errors[result.best] / errors[0]:.1%}",
                    "yes" if not rises else f"no ({len(rises)} rises, at most {max(rises):.1e})",
                    f"{len(errors)}{' (cap)' if len(errors) == 20 else ''}",
                )
            )
            rounded = [round(e, 6) for e in errors]
            data.append({"matrix": m.name, "rank": rank, "method": method, "errors": rounded})
            axis, style = axes[0 if dense else 1], "-" if method == "search" else "--"
            color, name = f"C{(len(data) - 1) // 2 % 10}", label if method == "search" else None
            axis.plot(range(1, len(errors) + 1), errors, style, color=color, label=name)
    for axis, title in zip(axes, ("attention", "experts"), strict=True):
        axis.set(title=f"{title}, layer {middle}", xlabel="iteration (solid: search, dashed: HQQ)")
        axis.set(ylim=(None, axis.get_ylim()[1] * 1.1))
        axis.legend(fontsize=6, ncol=3)
    axes[0].set_ylabel("relative error (eq. 14)")
    header = ("matrix", "first", "best", "gain", "monotone", "ended at iteration")
    return Section(text=f"{table(header, rows)}\n\n{save(figure, 'figure10')}", data=data)


def _label(m: Matrix) -> str:
    return f"expert {m.expert} {m.projection}" if m.expert is not None else str(m.projection)


# Table 5


def table5(setting: Setting) -> Section:
    """INT3, INT8 and fp16 compensators of uniform rank."""
    hidden = hidden_size(setting.outliers)
    ranks = [hidden // 64, hidden // 32, hidden // 16]
    kinds = ("fp16", "int8", "int3")
    recipes = {
        f"uniform-{r} {kind}": compensated(f"uniform-{r} {kind}", f"uniform-{r}", compensator=kind)
        for r in ranks
        for kind in kinds
    }
    found = measure(setting, setting.outliers, recipes)
    rows, data = [], []
    for r in ranks:
        results = [found[f"uniform-{r} {kind}"] for kind in kinds]
        sizes = [compensator_bytes(p.plan) for p, _ in results]
        rows.append(
            (
                str(r),
                *(f"{s / 1e3:.0f}" for s in sizes),
                *(f"{s.perplexity:.2f}" for _, s in results),
                *(f"{s.kl:.5f}" for _, s in results),
            )
        )
        for kind, size, (_, s) in zip(kinds, sizes, results, strict=True):
            data.append({"rank": r, "kind": kind, "bytes": size, "perplexity": s.perplexity, "kl": s.kl})
    header = ["rank", *(f"{what} {kind}" for what in ("kB", "perplexity", "KL") for kind in kinds)]
    return Section(text=table(header, rows), data=data)


# Table 7


def table7(setting: Setting) -> Section:
    """Policies by model structure at equal bytes, and by expert data beside a fixed dense rank."""
    rows, data = [], []
    for model in setting.models:
        hidden = hidden_size(model)
        shared = any(m.role is Role.SHARED_EXPERT for m in identify(open_source(str(model))))
        dense = (
            hidden // 4 if shared else hidden // 8
        )  # Dense-512 of 2048 (DeepSeek-MoE) and of 4096 (Mixtral)
        recipes = {"none (HQQ)": once("hqq", "")} | equal_memory(model, dense)
        for r in (hidden // 128, hidden // 64):
            for policy in ("sparse", "kurtosis", "frequency"):
                title = f"dense-{hidden // 8} + {'uniform' if policy == 'sparse' else policy}-{r}"
                recipes[title] = once(title, f"dense-{hidden // 8}+{policy}-{r}")
        for name, (p, s) in measure(setting, model, recipes).items():
            size = compensator_bytes(p.plan)
            rows.append((f"{model.name}: {name}", f"{size / 1e3:.0f}", f"{s.perplexity:.3f}", f"{s.kl:.5f}"))
            row = {"model": model.name, "policy": name, "bytes": size}
            data.append(row | {"perplexity": s.perplexity, "kl": s.kl, "top1": s.top1})
    return Section(text=table(("model: ranks", "compensators kB", "perplexity", "KL"), rows), data=data)


# Figure 11


def figure11(setting: Setting) -> Section:
    """Rank of dense or of sparse compensators against perplexity and bytes."""
    hidden = hidden_size(setting.outliers)
    series = {
        "dense": [hidden // f for f in (64, 32, 16, 8, 4)],
        "sparse": [hidden // f for f in (256, 128, 64, 32, 16)],
    }
    recipes = {"none": compensated("none", "")}
    recipes |= {
        f"{kind}-{r}": compensated(f"{kind}-{r}", f"{kind}-{r}")
        for kind, ranks in series.items()
        for r in ranks
    }
    found = measure(setting, setting.outliers, recipes)
    rows, data = [], []
    for name, (p, s) in found.items():
        size = compensator_bytes(p.plan)
        rows.append((name, f"{size / 1e3:.0f}", f"{s.perplexity:.2f}", f"{s.kl:.5f}"))
        data.append({"policy": name, "bytes": size, "perplexity": s.perplexity, "kl": s.kl})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for kind, ranks in series.items():
        points = [found[name] for name in ["none", *(f"{kind}-{r}" for r in ranks)]]
        sizes = [compensator_bytes(p.plan) / 1e3 for p, _ in points]
        axes[0].plot([0, *ranks], [s.perplexity for _, s in points], "o-", label=kind)
        axes[1].plot(sizes, [s.perplexity for _, s in points], "o-", label=kind)
    base = next(iter(found.values()))[1].reference_perplexity
    for axis, label in zip(axes, ("rank", "compensators, kB"), strict=True):
        axis.axhline(base, color="grey", linestyle=":", label="16 bit")
        axis.set(xlabel=label, ylabel="perplexity")
        axis.set_xscale("symlog", base=2 if label == "rank" else 10, linthresh=1 if label == "rank" else 10)
        axis.set_xlim(left=0)
        axis.legend()
    header = ("ranks", "compensators kB", "perplexity", "KL")
    return Section(text=f"{table(header, rows)}\n\n{save(figure, 'figure11')}", data=data)


SECTIONS: dict[str, Callable[[Setting], Section]] = {
    "table2": table2,
    "figure10": figure10,
    "table5": table5,
    "table7": table7,
    "figure11": figure11,
}


def main() -> None:
    args = _arguments()
    setting = Setting(
        outliers=args.models_folder / "tiny-mixtral-outliers",
        models=tuple(args.models_folder / name for name in args.models),
        text=args.text,
        context=args.context,
        tokens=args.tokens,
        work=args.work,
        fresh=args.fresh,
    )
    data = {}
    for name in args.only or SECTIONS:
        section = SECTIONS[name](setting)
        print(f"\n## {name}\n\n{section.text}\n", flush=True)
        data[name] = section.data
        if args.page:
            insert(args.page, name, section.text)
    print(json.dumps({"benchmark": "analyses", "tokens": args.tokens, "sections": data}))


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--models-folder", type=Path, default=SHARED / "models")
    options.add_argument(
        "--models", nargs="*", default=["tiny-mixtral", "tiny-mixtral-outliers", "tiny-deepseek"]
    )
    options.add_argument("--only", nargs="*", choices=list(SECTIONS), help="sections; default all")
    add_text(options, tokens=65_536)
    add_work(options)
    options.add_argument("--fresh", action="store_true", help="compress everything anew")
    add_page(options, "SECTION")
    return options.parse_args()


if __name__ == "__main__":
    main()
