"""Table 1 of arXiv:2312.17238: bits of attention x bits of experts, in its own scheme.

    python -m benchmarks.quality.offload_mixes ../shared/models/tiny-mixtral-outliers [--page docs/results.md]

HQQ with double quantization: 4 bits in groups of 64 (256 scales share a pair), 3 bits in groups of 64 and 2 bits in
groups of 16 (128 share one); embeddings, head, routers and norms in 16 bit. `attention` is all that every token uses:
shared experts and dense MLPs too. Prints a table of sizes and losses, and one line of JSON.
"""

from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.lib.packed import bytes_on_disk, pack, parameters
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import add_model, add_output, add_page, add_text, add_work, parser, publish
from trilobite.recipe import DENSE_ROLES, Format, Recipe, Role, Rule

FORMATS = {"16": None, "4": "int4-g64-dq", "3": "int3-g64-dq", "2": "int2-g16-dq"}


def mix(attention: str, experts: str) -> Recipe:
    """The recipe of one cell."""
    rules = [
        Rule(roles=roles, format=Format.parse(text), method="hqq")
        for roles, bits in ((DENSE_ROLES, attention), ((Role.EXPERT,), experts))
        if (text := FORMATS[bits]) is not None
    ]
    return Recipe(name=f"mix-{attention}-{experts}", rules=tuple(rules))


def main() -> None:
    """Compress, measure, print, put the table on its page."""
    options = parser(__doc__)
    add_model(options)
    add_text(options, tokens=12288)
    add_work(options)
    options.add_argument("--fresh", action="store_true", help="compress everything anew")
    add_output(options)
    add_page(options, "mixes-MODEL")
    args = options.parse_args()
    bench = open_bench(args.model, args.text, context=args.context, tokens=args.tokens)
    mixes = {(a, e): mix(a, e) for a in FORMATS for e in FORMATS if (a, e) != ("16", "16")}
    packed = {m: pack(args.model, r, args.work, frequency=None, fresh=args.fresh) for m, r in mixes.items()}
    scores = bench.scores({mixes[m].name: p.path for m, p in packed.items()})
    first = next(iter(scores.values()))
    size = bytes_on_disk(args.model)
    bits = 8 * size / parameters(next(iter(packed.values())).plan)
    rows: list[dict[str, Any]] = [
        {"attention": "16", "experts": "16", "bytes": size, "bits": bits, "kl": 0.0, "top1": 1.0}
        | {"perplexity": first.reference_perplexity}
    ]
    for (attention, experts), p in packed.items():
        s = scores[mixes[attention, experts].name]
        row = {"attention": attention, "experts": experts, "bytes": p.bytes, "bits": p.bits, "kl": s.kl}
        rows.append(row | {"perplexity": s.perplexity, "top1": s.top1})
    base = rows[0]["perplexity"]
    cells = [
        [
            *(f"{r[role]}-bit" for role in ("attention", "experts")),
            *(f"{r['bytes'] / 1e6:.2f}", f"{r['bits']:.2f}", f"{r['perplexity']:.2f}"),
            *(f"{r['perplexity'] / base - 1:+.2%}", f"{r['kl']:.5f}", f"{r['top1']:.3f}"),
        ]
        for r in rows
    ]
    header = ("attention", "experts", "MB", "bits/weight", "perplexity", "loss", "KL", "top-1")
    head = f"`{args.model.name}`, {args.text.name}, {first.tokens:,} tokens predicted in windows of {args.context}:"
    summary = {"model": args.model.name, "tokens": first.tokens, "rows": rows}
    marker = f"mixes-{args.model.name}"
    publish(f"{head}\n\n{table(header, cells)}", summary, page=args.page, marker=marker, output=args.output)


if __name__ == "__main__":
    main()
