"""One option for every unit, so that the sum of losses is least and the sum of bytes within a bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Option:
    """What one way of storing a unit costs."""

    nbytes: int
    loss: float


Options = Sequence[Option]
"""The ways to store one unit, never none."""


def hull(options: Options) -> list[int]:
    """The options on the lower convex hull of bytes against loss, from the smallest to the best one."""
    order = sorted(range(len(options)), key=lambda i: (options[i].nbytes, options[i].loss, i))
    found: list[int] = []
    for i in order:
        if found and options[i].loss >= options[found[-1]].loss:
            continue
        while len(found) > 1 and _gain(options, found[-1], i) >= _gain(options, found[-2], found[-1]):
            found.pop()
        found.append(i)
    return found


def _gain(options: Options, smaller: int, larger: int) -> float:
    """Loss that a step to a larger option saves, for each byte."""
    extra = options[larger].nbytes - options[smaller].nbytes
    return (options[smaller].loss - options[larger].loss) / max(extra, 1)


def solve(units: Sequence[Options], bound: int) -> list[int]:
    """Which option each unit gets. bound: at least the bytes of the smallest options.

    The price of a byte is bisected: at a price each unit takes the steps of its hull that save more than they cost,
    which is exact where the bytes come out as the bound. What is left over goes to the step that saves most for each
    byte among all that fit, again and again. Equal units are told apart by their order.
    """
    hulls = [hull(options) for options in units]
    gains = [
        [_gain(options, *pair) for pair in pairwise(of_unit)]
        for options, of_unit in zip(units, hulls, strict=True)
    ]
    prices = sorted({gain for of_unit in gains for gain in of_unit})
    low, high = 0, len(prices)  # at prices[high] the bytes fit; without any step they do
    while low < high:
        middle = (low + high) // 2
        if _bytes(units, _at(hulls, gains, prices[middle])) <= bound:
            high = middle
        else:
            low = middle + 1
    chosen = _at(hulls, gains, prices[low]) if low < len(prices) else [of_unit[0] for of_unit in hulls]
    return _repaired(units, chosen, bound - _bytes(units, chosen))


def _at(hulls: Sequence[Sequence[int]], gains: Sequence[Sequence[float]], price: float) -> list[int]:
    """What units take at a price of a byte. Gains fall along a hull."""
    return [
        of_unit[sum(gain >= price for gain in steps)] for of_unit, steps in zip(hulls, gains, strict=True)
    ]


def _bytes(units: Sequence[Options], chosen: Sequence[int]) -> int:
    return sum(options[i].nbytes for options, i in zip(units, chosen, strict=True))


def _repaired(units: Sequence[Options], chosen: list[int], left: int) -> list[int]:
    """Spend the bytes that are left over."""
    while True:
        best, step = 0.0, None
        for u, options in enumerate(units):
            now = options[chosen[u]]
            for i, option in enumerate(options):
                if option.nbytes - now.nbytes <= left and option.loss < now.loss:
                    gain = (now.loss - option.loss) / max(option.nbytes - now.nbytes, 1)
                    if gain > best:
                        best, step = gain, (u, i)
        if step is None:
            return chosen
        u, i = step
        left -= units[u][i].nbytes - units[u][chosen[u]].nbytes
        chosen[u] = i
