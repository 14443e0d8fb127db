"""What is a planned recipe worth beside a preset of as many bits, and where should the importance of columns come from?

    python -m benchmarks.quality.budgets MODEL... [--tokens 12288] [--page docs/results.md]

Packs every model with the presets rtn3, search3, fine2, fine3 and fine4, and with the planner's answers to `--bits` of
as many bits and to `--bits 3.5`, two of them with importance from other places than the default, and rounded by Hessians
of what the model writes itself; prints the KL divergence from 16 bit of each. Bits are those of all matrices in
attention, MLPs and experts, scales included. The last line is JSON.
"""

from benchmarks.lib.divergence_table import run
from trilobite.quantize.budget.goal import Budget
from trilobite.recipe import PRESETS, Recipe

IMPORTANCES = ("none", "builtin", "self")
"""Beside the default, `weights`."""


def recipes() -> dict[str, Recipe | Budget]:
    """By their name in the table."""
    rows: dict[str, Recipe | Budget] = {name: PRESETS[name] for name in ("rtn3", "search3")}
    for preset, budgets in (("fine2", (2.5625,)), ("fine3", (3.5, 3.5625)), ("fine4", (4.3125,))):
        rows[preset] = PRESETS[preset]
        for bits in budgets:
            rows[f"--bits {bits}"] = Budget(bits=bits)
            if bits in (2.5625, 3.5):
                for importance in IMPORTANCES:
                    name = f"--bits {bits} --importance {importance}"
                    rows[name] = Budget(bits=bits, importance=importance)
                rows[f"--bits {bits} --method gptq"] = Budget(bits=bits, method="gptq")
    return rows


def main() -> None:
    """Measure, print."""
    run("budgets", __doc__, recipes())


if __name__ == "__main__":
    main()
