"""Rank policies as text: what `dense-h/8+kurtosis-16` means for a hidden size. `quantize.ranks` applies them."""

import re

from trilobite.errors import RecipeError

RANK_POLICIES = ("uniform", "dense", "sparse", "kurtosis", "frequency")


def parse_rank(text: str, hidden: int) -> int:
    """`16`, `h/8`, `25h/64` -> a rank. Raises RecipeError."""
    m = re.fullmatch(r"([0-9]*)h(?:/0*([1-9][0-9]*))?", text)
    if m and not hidden:
        raise RecipeError(
            f"rank {text!r}: config.json names no hidden_size to take a fraction of; give an integer"
        )
    if m:
        return max(1, round(int(m[1] or 1) * hidden / int(m[2] or 1)))
    if re.fullmatch(r"[0-9]+", text):
        return int(text)
    raise RecipeError(
        f"rank {text!r}: expected an integer or a fraction of the hidden size, for example 16 or h/8"
    )


def parse_policies(text: str, hidden: int) -> list[tuple[str, int]]:
    """`dense-512+kurtosis-16` -> [("dense", 512), ("kurtosis", 16)]. Raises RecipeError."""
    policies = []
    for part in filter(None, (p.strip() for p in text.split("+"))):
        kind, _, rank = part.partition("-")
        if kind not in RANK_POLICIES:
            raise RecipeError(
                f"rank policy {part!r}: expected one of {', '.join(p + '-r' for p in RANK_POLICIES)} "
                "joined by +, for example dense-512+kurtosis-16"
            )
        policies.append((kind, parse_rank(rank, hidden)))
    return policies


MILO_RANKS = {
    "milo-s1": {"coarse": "dense-h/8+kurtosis-h/256", "fine": "dense-25h/64"},
    "milo-s2": {"coarse": "dense-h/4+kurtosis-h/128", "fine": "dense-h/2+frequency-h/64"},
}
"""MiLo Table 4 as fractions of the hidden size: Mixtral-8x7B (few large experts: `coarse`, h = 4096) and
DeepSeek-MoE-16B (many small experts beside shared ones: `fine`, h = 2048). `auto:NAME` in a recipe's rank picks."""


def resolve_auto_rank(rank: str, *, experts: int, shared: bool) -> str:
    """Replace `auto:milo-s1` by the policy of the published model that this architecture resembles.

    Fine-grained: shared experts, or more than 16 routed ones.
    """
    if not rank.startswith("auto:"):
        return rank
    return MILO_RANKS[rank.removeprefix("auto:")]["fine" if shared or experts > 16 else "coarse"]
