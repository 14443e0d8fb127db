"""What a trace says about caches and guesses: figure 2 of arXiv:2312.17238, and the policies and guessers beside it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trilobite.evaluate.trace import Trace
from trilobite.runtime.offload.policies import POLICIES, Belady, Key
from trilobite.runtime.offload.slots import SlotCache, split

NAMES = (*POLICIES, "belady")
REPEAT, PRIOR = "repeat", "frequency"
"""Guessers that need no model: the last tokens' experts, the latest first; the experts used most often so far."""


def calls(found: Trace, tokens: int | None = None) -> list[list[Key]]:
    """The experts of every layer of every token, in the order in which decoding needs them."""
    return [
        [(layer, int(e)) for e in dict.fromkeys(row[token].tolist()) if e >= 0]
        for token in range(found.experts.shape[1] if tokens is None else min(tokens, found.experts.shape[1]))
        for layer, row in enumerate(found.experts)
    ]


def hit_ratio(found: Sequence[Sequence[Key]], layers: int, slots: int, policy: str, *, shared: bool) -> float:
    """Hits ÷ needs of a cache of `slots` slots in all, empty at first; `slots` ÷ layers each, or one pool."""
    chosen = Belady([[], *found]) if policy == "belady" else POLICIES[policy]()
    cache = SlotCache(split(slots, range(layers), shared=shared), chosen)
    for now, keys in enumerate(found):
        keep = set(keys)
        for key in cache.begin(now % layers, [e for _, e in keys]):
            cache.admit(key, keep)
    return cache.total().hit_ratio


def hit_ratios(
    found: Trace, *, tokens: int | None = None, shared: bool = False
) -> dict[str, dict[int, float]]:
    """policy -> k -> hit ratio, for every k up to the experts of a layer, at most 16 of them (figure 2, left)."""
    needs, layers, most = calls(found, tokens), len(found.names), max(found.experts_of)
    sizes = sorted({max(1, round(most * i / 16)) for i in range(1, 17)})
    return {
        policy: {k: hit_ratio(needs, layers, k * layers, policy, shared=shared) for k in sizes}
        for policy in NAMES
    }


def recalls(found: Trace) -> dict[str, dict[int, float]]:
    """guesser -> number guessed -> share of the needed experts among the guesses (figure 2, right).

    Over the tokens and layers for which the guesser has a guess.
    """
    guesses = {**found.guesses, REPEAT: _repeat(found), PRIOR: _prior(found)}
    return {name: _recall(found.experts, guess) for name, guess in guesses.items()}


def _recall(needed: np.ndarray, guess: np.ndarray) -> dict[int, float]:
    """needed: [L, T, A]    guess: [L, T, G], -1 = none."""
    asked = (guess[:, :, :1] >= 0) & (needed >= 0)
    total = max(1, int(asked.sum()))
    return {
        n: float(((needed[..., None] == guess[:, :, None, :n]).any(-1) & asked).sum() / total)
        for n in range(1, guess.shape[2] + 1)
    }


def _repeat(found: Trace) -> np.ndarray:
    """[L, T, G]: the experts used latest in the layer; those of one token in the order of their weights."""

    def orders(row: np.ndarray) -> Iterator[list[int]]:
        latest: list[int] = []
        for token in row.tolist():
            yield latest
            now = [e for e in dict.fromkeys(token) if e >= 0]
            latest = now + [e for e in latest if e not in now]

    return _padded(found, orders)


def _prior(found: Trace) -> np.ndarray:
    """[L, T, G]: the experts used most often in the layer until then."""

    def orders(row: np.ndarray) -> Iterator[list[int]]:
        counts: Counter[int] = Counter()
        for token in row.tolist():
            yield [e for e, _ in counts.most_common()]
            counts.update(e for e in set(token) if e >= 0)

    return _padded(found, orders)


def _padded(found: Trace, orders: Callable[[np.ndarray], Iterator[list[int]]]) -> np.ndarray:
    width = max([8, *(g.shape[2] for g in found.guesses.values())])
    guess = np.full((*found.experts.shape[:2], min(width, max(found.experts_of))), -1, np.int16)
    for layer, row in enumerate(found.experts):
        for token, order in enumerate(orders(row)):
            order = order[: guess.shape[2]]
            guess[layer, token, : len(order)] = order
    return guess
