"""Rank policies: how much compensator every matrix gets (MiLo section 3.2.4, Table 4)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trilobite.errors import RecipeError
from trilobite.formats.weight import low_rank_bytes, stored_shapes
from trilobite.recipe import DENSE_ROLES, AnyFormat, Format, Role

EIGHT_BITS = Format(bits=8, group=0)
"""The next wider format after the widest lattice format."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A matrix that may get a compensator. cap: the largest rank it may have.

    kurtosis, frequency: what policies of these names go by, where known; frequency is relative to the layer's mean
    """

    name: str
    role: Role
    cap: int
    kurtosis: float | None = None
    frequency: float | None = None


def assign_ranks(candidates: Sequence[Candidate], policies: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Rank of every candidate under a sum of policies.

    `dense-r` and `sparse-r` give r to their roles; `uniform-r` gives r, `kurtosis-r` shares an average of r by
    2**kurtosis, and `frequency-r` shares an average of r among the experts by how often each is used. In a sum, the
    last three work on what `dense` and `sparse` leave over.

    Raises RecipeError when a policy needs statistics that are not there.
    """
    ranks = {c.name: 0 for c in candidates}
    kinds = {kind for kind, _ in policies}
    claimed = {
        role for kind in kinds for role in {"dense": DENSE_ROLES, "sparse": (Role.EXPERT,)}.get(kind, ())
    }
    for kind, r in policies:
        roles = {"dense": DENSE_ROLES, "sparse": (Role.EXPERT,), "frequency": (Role.EXPERT,)}.get(kind, Role)
        free = kind not in ("dense", "sparse")
        chosen = [c for c in candidates if c.role in roles and not (free and c.role in claimed)]
        shares = [r] * len(chosen)
        if kind in ("kurtosis", "frequency"):
            shares = apportion([_score(c, kind) for c in chosen], [c.cap for c in chosen], r)
        for c, rank in zip(chosen, shares, strict=True):
            ranks[c.name] = min(c.cap, ranks[c.name] + rank)
    return ranks


def _score(c: Candidate, kind: str) -> float:
    if kind == "kurtosis":
        assert c.kurtosis is not None
        return float(2.0 ** min(max(c.kurtosis, -8.0), 8.0))
    if c.frequency is None:
        raise RecipeError(
            f"{c.name}: a frequency policy needs expert frequencies, and there are none; run "
            "`trilobite stats MODEL --text FILE -o stats.json` and pass --stats stats.json, or choose another rank"
        )
    return c.frequency


def apportion(scores: Sequence[float], caps: Sequence[int], average: int) -> list[int]:
    """Integers proportional to the scores, at most the caps, that hold the average as far as the caps allow.

    Water filling: the factor on the scores grows until the sum fits; what rounding leaves goes to the largest
    remainders, ties to the earlier one.
    """
    total = min(average * len(scores), sum(caps))
    if not scores or total <= 0:
        return [0] * len(scores)
    low, high = 0.0, 1.0
    positive = [max(s, 1e-9) for s in scores]
    while (
        sum(min(c, high * s) for c, s in zip(caps, positive, strict=True)) < total * (1 - 1e-12)
        and high < 1e18
    ):
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if sum(min(c, middle * s) for c, s in zip(caps, positive, strict=True)) < total:
            low = middle
        else:
            high = middle
    exact = [min(float(c), high * s) for c, s in zip(caps, positive, strict=True)]
    ranks = [int(x + 1e-9) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (ranks[i] - exact[i], i))
    left = total - sum(ranks)
    for i in order * 2:
        if left <= 0:
            break
        if ranks[i] < caps[i]:
            ranks[i] += 1
            left -= 1
    return ranks


def weight_bytes(fmt: AnyFormat, n: int, k: int) -> int:
    """Bytes of codes and metadata of an [n, k] matrix."""
    return sum(math.prod(shape) for shape in stored_shapes(fmt, n, k).values())


def rank_cap(fmt: AnyFormat, compensator: str, n: int, k: int, *, capped: bool) -> int:
    """Largest rank that is useful: below N K / (N + K), and cheaper than the next wider format when `capped`."""
    limit = max(n * k // (n + k), 1)
    if not capped:
        return min(n, k)
    bits = {2: 3, 3: 4, 4: 8}.get(fmt.bits)
    if bits is None:
        return 0
    if isinstance(fmt, Format):
        wider: AnyFormat = fmt.with_bits(bits)
    else:
        wider = replace(fmt, bits=bits) if bits < 8 else EIGHT_BITS
    spare = weight_bytes(wider, n, k) - weight_bytes(fmt, n, k)
    return min(limit, spare // low_rank_bytes(compensator, 1, n, k))


def relative_usage(frequency: Mapping[str, Sequence[int]]) -> dict[tuple[str, int], float]:
    """Counts of tokens per layer and expert -> (layer, expert): usage relative to the layer's mean."""
    usage = {}
    for layer, counts in frequency.items():
        mean = sum(counts) / max(len(counts), 1)
        for expert, count in enumerate(counts):
            usage[layer, expert] = count / mean if mean else 1.0
    return usage
