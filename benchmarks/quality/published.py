"""What do MiLo's parts cost as they are printed, beside ours: HQQ (eq. 4-9), stored compensators (eq. 13)?

    python -m benchmarks.quality.published MODEL... [--tokens 12288] [--page docs/results.md]

`paper` is the quantizer without normalization whose last iterate counts; `eq. 13` stores codes and factors as the last
round of Algorithm 1 leaves them, where ours are fitted to each other as stored. Equal bytes in each pair. The last line
is JSON.
"""

from dataclasses import replace

from benchmarks.lib.divergence_table import run
from benchmarks.lib.recipes import named, with_bits, with_method
from trilobite.recipe import PRESETS, PUBLISHED_ITERATIONS, Recipe


def variants() -> dict[str, Recipe]:
    """All recipes, by their name in the table."""
    found: dict[str, Recipe] = {}
    for bits in (3, 2):
        hqq = with_bits(PRESETS["hqq3"], bits)
        found |= {f"hqq{bits}": hqq, f"hqq{bits} paper": with_method(hqq, "hqq-paper")}
        for method in ("search", "hqq", "hqq-paper"):
            milo = with_bits(with_method(PRESETS["milo-s1"], method), bits)
            found[f"milo-s1 int{bits} {method}"] = milo
            found[f"milo-s1 int{bits} {method} eq. 13"] = replace(
                milo, refit=False, iterations=PUBLISHED_ITERATIONS
            )
    return named(found)


def main() -> None:
    """Measure, print."""
    run("published", __doc__, variants())


if __name__ == "__main__":
    main()
