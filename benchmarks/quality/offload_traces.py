"""Figure 2 of arXiv:2312.17238 for models at hand: hit ratios of caches, recall of guesses.

    python -m benchmarks.quality.offload_traces examples/tiny-moe ../shared/models/tiny-mixtral \
      ../shared/models/tiny-deepseek ../shared/models/tiny-mixtral-outliers --page docs/offloading.md

For each model what `trilobite trace --text TEXT --samples N` and `trilobite cache` print, and one pool beside k slots
a layer; the first token of a window finds the cache as the window before left it. Draws a PNG file a model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.script import TEXT, add_output, add_page, parser, publish
from trilobite.evaluate.cache_plot import draw
from trilobite.evaluate.cache_simulation import hit_ratios, recalls
from trilobite.evaluate.measure import trace_experts
from trilobite.runtime.load import load, load_tokenizer

FIGURES = Path(__file__).resolve().parents[2] / "docs/figures"
POOLED = ("lru", "lfru")
Curves = Mapping[str, Mapping[int, float]]


def curves(corner: str, rows: Curves, columns: Sequence[int]) -> str:
    """A table of one curve a row."""
    cells = [[name, *(f"{row[n]:.3f}" if n in row else "" for n in columns)] for name, row in rows.items()]
    return table([corner, *map(str, columns)], cells)


def section(
    model: Path, text: Path, *, context: int, samples: int, figures: Path
) -> tuple[str, dict[str, Any]]:
    """The tables of a model, and the same as data."""
    found = trace_experts(
        load(str(model)), load_tokenizer(str(model)), text, context=context, samples=samples
    )
    ratios, recall = hit_ratios(found), recalls(found)
    pooled = hit_ratios(found, shared=True)
    ratios |= {f"{name}, one pool": pooled[name] for name in POOLED}
    draw(figures / f"offload-{model.name}.png", ratios, recall, title=f"{model.name}, {text.name}")
    layers, tokens, active = found.experts.shape
    most = max(found.experts_of)
    head = (
        f"`{model.name}`: {layers} layers of {most} experts, {active} active; {tokens:,} tokens of {text.name} in "
        f"windows of {context}."
    )
    slots = sorted(next(iter(ratios.values())))
    guessed = [n for n in range(1, 13) if n <= 2 * active or n % 2 == 0]
    guessed = [n for n in guessed if any(n in row for row in recall.values())]
    lines = [
        f"### {model.name}",
        head,
        curves("hit ratio, k", ratios, slots),
        curves("recall, guesses", recall, guessed),
        f"![hit ratio and recall of {model.name}](figures/offload-{model.name}.png)",
    ]
    return "\n\n".join(lines), {"hit_ratio": ratios, "recall": recall}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", help="folders of checkpoints, original or packed")
    options.add_argument("--text", type=Path, default=TEXT)
    options.add_argument("--context", type=int, default=512)
    options.add_argument("--samples", type=int, default=8, help="windows of the text")
    options.add_argument("--figures", type=Path, default=FIGURES, help="folder of the PNG files")
    add_output(options)
    add_page(options, "offload-traces")
    args = options.parse_args()
    made = {
        model.name: section(
            model, args.text, context=args.context, samples=args.samples, figures=args.figures
        )
        for model in args.models
    }
    summary = {name: data for name, (_, data) in made.items()}
    text = "\n\n".join(section for section, _ in made.values())
    publish(text, summary, page=args.page, marker="offload-traces", output=args.output)


if __name__ == "__main__":
    main()
