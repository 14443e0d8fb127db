"""Policies and the map of slots, against a model that is too naive to be wrong."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilobite.runtime.offload.policies import POLICIES, Belady, Key, Policy
from trilobite.runtime.offload.slots import Counters, SlotCache, split

LAYERS, EXPERTS = 3, 5
Calls = list[tuple[int, list[int]]]
CALLS = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1), st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True)
    ),
    max_size=40,
)


def run(calls: Calls, slots: int, policy: Policy, *, shared: bool) -> tuple[SlotCache, list[bool]]:
    """Every need of every call as hit (True) or miss, as a token-by-token run admits experts."""
    cache = SlotCache(split(slots, range(LAYERS), shared=shared), policy)
    hits = []
    for layer, experts in calls:
        missing = cache.begin(layer, experts)
        hits += [(layer, e) not in missing for e in experts]
        keep = {(layer, e) for e in experts}
        for key in missing:
            cache.admit(key, keep)
    return cache, hits


def naive(
    calls: Calls, slots: int, shared: bool, worst: Callable[[list[Key], Calls, int], Key]
) -> list[bool]:
    """The same with lists, and the victim found from the whole history (and future) of calls."""
    size = {layer: len(own) for layer, own in split(slots, range(LAYERS), shared=shared).items()}
    resident: list[Key] = []
    hits = []
    for now, (layer, experts) in enumerate(calls):
        there = [key for key in resident if shared or key[0] == layer]
        hits += [(layer, e) in there for e in experts]
        hit = {(layer, e) for e in experts if (layer, e) in there}
        for key in [(layer, e) for e in experts if (layer, e) in hit]:
            resident.remove(key)
            resident.append(key)
        for e in experts:
            if (layer, e) in hit:
                continue
            there = [key for key in resident if shared or key[0] == layer]
            candidates = [k for k in there if k[0] != layer or k[1] not in experts]
            if len(there) >= size[layer]:
                if not candidates:
                    continue
                resident.remove(worst(candidates, calls, now))
            resident.append((layer, e))
    return hits


def uses(key: Key, calls: Calls, now: int) -> list[int]:
    return [t for t, (layer, experts) in enumerate(calls[: now + 1]) if layer == key[0] and key[1] in experts]


def oldest(keys: list[Key], calls: Calls, now: int) -> Key:
    last = [uses(k, calls, now)[-1] for k in keys]
    assert last == sorted(last)
    return keys[0]


def rarest(keys: list[Key], calls: Calls, now: int) -> Key:
    fewest = min(len(uses(k, calls, now)) for k in keys)
    return oldest([k for k in keys if len(uses(k, calls, now)) == fewest], calls, now)


def rarest_and_oldest(keys: list[Key], calls: Calls, now: int) -> Key:
    def rank(k: Key) -> float:
        u = uses(k, calls, now)
        return len(u) / (now - u[-1] + 1)

    lowest = min(map(rank, keys))
    return oldest([k for k in keys if rank(k) == lowest], calls, now)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("name", "worst"), [("lru", oldest), ("lfu", rarest), ("lfru", rarest_and_oldest)])
@given(calls=CALLS, slots=st.integers(0, 9))
def test_a_policy_is_what_it_says(
    calls: Calls, slots: int, name: str, worst: Callable[[list[Key], Calls, int], Key], shared: bool
) -> None:
    cache, hits = run(calls, slots, POLICIES[name](), shared=shared)
    assert hits == naive(calls, slots, shared, worst)
    total = cache.total()
    assert (total.hits, total.misses) == (sum(hits), len(hits) - sum(hits))


def best_possible(calls: Calls, slots: int) -> int:
    """Most hits of one pool that must take in what it misses, by trying every victim. Calls of one expert."""
    states = {frozenset[Key](): 0}
    for layer, (expert,) in calls:
        key, following = (layer, expert), dict[frozenset[Key], int]()
        for state, hits in states.items():
            if key in state:
                successors = [(state, hits + 1)]
            elif len(state) < slots:
                successors = [(state | {key}, hits)]
            else:
                successors = [((state - {k}) | {key}, hits) for k in state]
            for successor, count in successors:
                following[successor] = max(following.get(successor, 0), count)
        states = following
    return max(states.values())


@given(
    calls=st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=1)), max_size=12
    ),
    slots=st.integers(1, 4),
)
def test_belady_is_the_best(calls: Calls, slots: int) -> None:
    future = [[], *([(layer, e) for e in experts] for layer, experts in calls)]  # the first call has time 1
    _, hits = run(calls, slots, Belady(future), shared=True)
    assert sum(hits) == best_possible(calls, slots)


@given(calls=CALLS, slots=st.integers(0, 9), shared=st.booleans(), name=st.sampled_from(sorted(POLICIES)))
def test_a_slot_holds_one_expert_and_a_call_keeps_what_it_needs(
    calls: Calls, slots: int, shared: bool, name: str
) -> None:
    cache = SlotCache(split(slots, range(LAYERS), shared=shared), POLICIES[name]())
    for layer, experts in calls:
        keep = {(layer, e) for e in experts}
        there = [key for key in keep if cache.slot(key) is not None]
        for key in cache.begin(layer, experts):
            before = cache.slot(key)
            found = cache.admit(key, keep)
            assert before is None
            assert found is None or found[1] not in keep
        assert all(cache.slot(key) is not None for key in there)
        taken = [
            cache.slot(key)
            for key in itertools.product(range(LAYERS), range(EXPERTS))
            if cache.slot(key) is not None
        ]
        assert len(taken) == len(set(taken)) <= slots
        assert set(taken) <= set(range(slots))


def test_what_failed_to_load_leaves_its_slot() -> None:
    cache = SlotCache(split(1, [0], shared=False), Policy())
    (key,) = cache.begin(0, [4])
    assert cache.admit(key, {key}) == (0, None)
    cache.evict(key)
    assert cache.slot(key) is None
    assert cache.begin(0, [4]) == [key]
    assert cache.admit(key, {key}) == (0, None)


def test_more_needed_than_slots_are_not_admitted() -> None:
    cache = SlotCache(split(2, [0], shared=False), Policy())
    missing = cache.begin(0, [0, 1, 2])
    found = [cache.admit(key, set(missing)) for key in missing]
    assert found == [(0, None), (1, None), None]


def test_random_is_seeded() -> None:
    calls: Calls = [(0, [i * 7 % EXPERTS]) for i in range(30)]
    runs = [run(calls, 3, POLICIES["random"](), shared=True)[1] for _ in range(2)]
    assert runs[0] == runs[1]


def test_layers_share_what_does_not_divide() -> None:
    pools = split(8, [3, 5, 9], shared=False)
    assert {layer: len(own) for layer, own in pools.items()} == {3: 3, 5: 3, 9: 2}
    assert sorted(s for own in pools.values() for s in own) == list(range(8))


def test_counters_add_up() -> None:
    a, b = Counters(hits=3, misses=1, bytes=10, stalled=0.5), Counters(hits=1, guesses=2)
    assert (a + b - b) == a
    assert a.hit_ratio == 0.75
    assert Counters().hit_ratio == 0.0
