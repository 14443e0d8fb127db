"""Which expert leaves the cache when another one needs its slot.

A key is (layer, expert). Time is counted in calls of MoE layers, as in the token-by-token runs of arXiv:2312.17238.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

Key = tuple[int, int]


class Policy:
    """Sees every use of a key, and names the key to evict. This one is `lru`, the paper's.

    lru: the longest unused.
    """

    def used(self, key: Key, now: int) -> None:
        """A call needs this key, in the cache or not."""

    def victim(self, resident: Iterable[Key], keep: Collection[Key], now: int) -> Key | None:
        """The key to evict, none of `keep`; None when there is no other.

        resident: the keys of the pool, the longest unused first
        """
        return next((key for key in resident if key not in keep), None)


class _Ranked(Policy, ABC):
    """Evicts the key of the lowest rank; of equals, the longest unused."""

    @abstractmethod
    def rank(self, key: Key, now: int) -> float: ...

    def victim(self, resident: Iterable[Key], keep: Collection[Key], now: int) -> Key | None:
        """The resident key of the lowest rank that is none of `keep`."""
        candidates = (key for key in resident if key not in keep)
        return min(candidates, key=lambda key: self.rank(key, now), default=None)


class Lfu(_Ranked):
    """lfu: the least often used since the beginning, uses before an eviction included."""

    def __init__(self) -> None:
        """Nothing was used yet."""
        self.uses: dict[Key, int] = {}

    def used(self, key: Key, now: int) -> None:
        """Count it."""
        self.uses[key] = self.uses.get(key, 0) + 1

    def rank(self, key: Key, now: int) -> float:
        """Number of uses."""
        return self.uses.get(key, 0)


class Lfru(Lfu):
    """lfru: the smallest number of uses ÷ calls since the last one, so that what was popular long ago may go."""

    def __init__(self) -> None:
        """Nothing was used yet."""
        super().__init__()
        self.last: dict[Key, int] = {}

    def used(self, key: Key, now: int) -> None:
        """Count it and note when."""
        super().used(key, now)
        self.last[key] = now

    def rank(self, key: Key, now: int) -> float:
        """Uses ÷ age."""
        return self.uses.get(key, 0) / (now - self.last.get(key, -1) + 1)


class Random(Policy):
    """random: any; what a policy must beat."""

    def __init__(self, seed: int = 0) -> None:
        """Same seed, same evictions."""
        self._random = random.Random(seed)

    def victim(self, resident: Iterable[Key], keep: Collection[Key], now: int) -> Key | None:
        """Any resident key that is none of `keep`."""
        candidates = [key for key in resident if key not in keep]
        return self._random.choice(candidates) if candidates else None


class Belady(_Ranked):
    """belady: the one whose next use is farthest away, which nobody knows but a simulation: the bound for all others."""

    def __init__(self, future: Sequence[Collection[Key]]) -> None:
        """future: the keys of every call, in order; call n happens at time n."""
        self._uses: dict[Key, list[int]] = {}
        for now in range(len(future) - 1, -1, -1):
            for key in future[now]:
                self._uses.setdefault(key, []).append(now)

    def used(self, key: Key, now: int) -> None:
        """Forget the uses that are over."""
        while self._uses[key] and self._uses[key][-1] <= now:
            self._uses[key].pop()

    def rank(self, key: Key, now: int) -> float:
        """Minus the time of the next use."""
        later = self._uses.get(key)
        return -float(later[-1]) if later else -float("inf")


POLICIES: Mapping[str, Callable[[], Policy]] = {"lru": Policy, "lfu": Lfu, "lfru": Lfru, "random": Random}
"""Policies by name, without `belady`, which needs the future."""
