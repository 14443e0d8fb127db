"""The map from experts to slots of fast memory, and what it counts."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from trilobite.runtime.offload.policies import Key, Policy


@dataclass
class Counters:
    """hits, misses: experts that a call needed, by whether they were there (or guessed in time)

    guesses: loads begun on speculation    used, wasted: of these, needed by their call, or not
    bytes: read    stalled: seconds that calls waited for reads
    """

    hits: int = 0
    misses: int = 0
    guesses: int = 0
    used: int = 0
    wasted: int = 0
    bytes: int = 0
    stalled: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Hits ÷ needs; 0 before the first call."""
        return self.hits / max(1, self.hits + self.misses)

    def __add__(self, other: "Counters") -> "Counters":
        """Both together."""
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: "Counters") -> "Counters":
        """What came since `other` was taken."""
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class SlotCache:
    """k slots for each layer, or one pool of slots for all layers. Only the map: the bytes are somebody else's.

    counters: by layer
    """

    def __init__(self, pools: Mapping[int, Sequence[int]], policy: Policy) -> None:
        """pools: layer -> its slots; layers given the same sequence object share them."""
        self.policy = policy
        self.now = 0
        self.counters = {layer: Counters() for layer in pools}
        distinct = {id(slots): _Pool(slots) for slots in pools.values()}
        self._pool = {layer: distinct[id(slots)] for layer, slots in pools.items()}

    def begin(self, layer: int, experts: Iterable[int]) -> list[Key]:
        """A call of a layer needs these experts, each named once: count them; returns those that are not there."""
        self.now += 1
        pool, counts, missing = self._pool[layer], self.counters[layer], list[Key]()
        for expert in experts:
            key = layer, expert
            self.policy.used(key, self.now)
            if key in pool.slot:
                pool.slot.move_to_end(key)
                counts.hits += 1
            else:
                missing.append(key)
                counts.misses += 1
        return missing

    def slot(self, key: Key) -> int | None:
        """Where an expert is, or None."""
        return self._pool[key[0]].slot.get(key)

    def admit(self, key: Key, keep: Collection[Key]) -> tuple[int, Key | None] | None:
        """Give an absent expert a slot; returns it and the key that was evicted for it.

        keep: never evicted. None when the pool has only such.
        """
        pool, gone = self._pool[key[0]], None
        assert key not in pool.slot, key
        if not pool.free:
            gone = self.policy.victim(pool.slot, keep, self.now)
            if gone is None:
                return None
            self.evict(gone)
        pool.slot[key] = slot = pool.free.pop()
        return slot, gone

    def evict(self, key: Key) -> None:
        """Free an expert's slot, for example when reading into it failed."""
        pool = self._pool[key[0]]
        pool.free.append(pool.slot.pop(key))

    def move(self, key: Key, slot: int) -> None:
        """An expert lies in another slot from now on, which becomes one of its pool in the place of its old one."""
        self._pool[key[0]].slot[key] = slot

    def room(self, layer: int) -> int:
        """Slots of a layer's pool."""
        return self._pool[layer].size

    def resident(self, layer: int) -> list[int]:
        """The experts of a layer that are there, the longest unused first."""
        return [expert for owner, expert in self._pool[layer].slot if owner == layer]

    def reset(self) -> None:
        """Count from now on."""
        self.counters = {layer: Counters() for layer in self.counters}

    def total(self) -> Counters:
        """The counters of all layers together."""
        return sum(self.counters.values(), Counters())


class _Pool:
    """slot: key -> slot, the longest unused first."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.size = len(slots)
        self.free = list(reversed(slots))
        self.slot: OrderedDict[Key, int] = OrderedDict()


def split(slots: int, layers: Sequence[int], *, shared: bool) -> dict[int, Sequence[int]]:
    """Pools for `SlotCache`: all slots for all layers, or an equal number for each, as in the paper.

    What does not divide goes to the first layers.
    """
    if shared:
        everything = range(slots)
        return dict.fromkeys(layers, everything)
    count, more = divmod(slots, len(layers))
    pools, at = dict[int, Sequence[int]](), 0
    for i, layer in enumerate(layers):
        size = count + (i < more)
        pools[layer] = range(at, at + size)
        at += size
    return pools
