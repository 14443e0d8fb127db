"""The experts of a model in slots of memory, and the transfers that bring them there."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from trilobite.runtime.offload.memory import Arena
from trilobite.runtime.offload.policies import Key, Policy
from trilobite.runtime.offload.slots import Counters, SlotCache, split
from trilobite.runtime.offload.store import ExpertStore
from trilobite.runtime.offload.transfers import Transfer


class ExpertCache:
    """Slots in front of a slower store, for all layers of a model; `tables` say where the experts are now.

    A guess is brought into a staging buffer. When its layer needs it, that buffer becomes a slot and the evicted
    expert's slot becomes the staging buffer: nothing is copied, and a wrong guess evicts nobody.

    slab: all slots and staging buffers, [bytes] uint8    tables: for every layer [E, 3, columns] int64, as the store's
    rows; absent: -1    changes: for every layer, how often its table has changed
    """

    def __init__(
        self, store: ExpertStore, arena: Arena, *, staging: int, shared: bool, policy: Policy
    ) -> None:
        """arena: slots for all layers together, and `staging` buffers for guesses and for streams, >= 1."""
        slots = arena.slots - staging
        self.store, self.arena = store, arena
        self.slots = SlotCache(split(slots, range(len(store.rows)), shared=shared), policy)
        self.slab: Tensor = arena.tensor
        self.tables = [torch.from_numpy(rows.copy()) for rows in store.rows]
        self.changes = [0] * len(store.rows)
        self.lock = threading.RLock()
        # Through numpy: torch would count the changes, and calls be bound anew.
        self._rows = [table.numpy() for table in self.tables]
        for rows in self._rows:
            rows[:, :, store.offsets[0]] = -1
        self._staging = list(range(slots, slots + staging))
        self._guesses: dict[Key, tuple[Transfer, int]] = {}
        self._coming: dict[Key, Transfer] = {}
        self._leaving: list[tuple[Transfer, int]] = []

    @contextmanager
    def completed(self, layer: int) -> Iterator[Tensor]:
        """The table of a layer as if all its experts were there, for whoever has to know their formats."""
        rows = self._rows[layer]
        now = rows.copy()
        rows[...] = self.store.rows[layer]
        try:
            yield self.tables[layer]
        finally:
            rows[...] = now

    def holds(self, layer: int, count: int) -> bool:
        """Whether so many experts of a layer may be there at a time."""
        return count <= self.slots.room(layer)

    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of a call that are neither there nor on their way, which nothing counts."""
        keys = ((layer, e) for e in experts)
        return [key[1] for key in keys if self.slots.slot(key) is None and key not in self._guesses]

    def missing(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of a call that somebody would have to wait for, which nothing counts."""
        keys = ((layer, e) for e in experts)
        return [key[1] for key in keys if self.slots.slot(key) is None or key in self._coming]

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """For those that were to come later than the others of `ensure`. Raises OffloadError."""
        self._fill([], {(layer, e) for e in experts})

    def abandon(self, layer: int, experts: Sequence[int]) -> None:
        """Let go of those of them that are still on their way."""
        for key in [(layer, e) for e in experts if (layer, e) in self._coming]:
            self._abandon(key, self._coming.pop(key))

    def ensure(
        self,
        layer: int,
        experts: Sequence[int],
        later: Collection[int] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Bring the experts of a call into slots. Raises OffloadError when that fails; they are absent then.

        later: those absent experts for which nobody waits now; they are on their way when this returns
        meanwhile: called while the others are on theirs
        """
        missing = self.slots.begin(layer, experts)
        self.forget_guesses(layer, experts)
        if missing:
            self.store.expect(layer, [e for _, e in missing])
        self._fill(missing, {(layer, e) for e in experts}, {(layer, e) for e in later}, meanwhile)

    def bring(self, key: Key, keep: Collection[Key]) -> None:
        """Bring one expert into a slot, for a call that needs others too. keep: never evicted. Raises OffloadError."""
        self._fill(self.slots.begin(key[0], [key[1]]), keep)

    def _fill(
        self,
        missing: Sequence[Key],
        keep: Collection[Key],
        later: Collection[Key] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Bring absent experts of a layer into slots; wait for them, and for those of `keep` that were on their way."""
        begun = {key: self._coming.pop(key) for key in list(self._coming) if key in keep}
        try:
            for key in missing:
                begun[key] = self._admit(key, keep, urgent=key not in later)
            waited = {key: transfer for key, transfer in begun.items() if key not in later}
            for transfer in waited.values():
                transfer.hurry()
            if meanwhile is not None:
                meanwhile()
            if waited:
                self._wait(next(iter(waited))[0], list(waited.values()))
        except BaseException:
            for key, transfer in begun.items():
                self._abandon(key, transfer)
            raise
        self._coming |= {key: transfer for key, transfer in begun.items() if key not in waited}

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to bring these experts into free staging buffers, unless they are there or on their way."""
        for expert in experts:
            key = layer, expert
            if self.slots.slot(key) is not None or key in self._guesses:
                continue
            self._reclaim()
            if not self._staging:
                return
            if not self.store.near(key):
                continue
            self._guesses[key] = self._fetch(key, self._staging[-1], urgent=False), self._staging.pop()
            self.slots.counters[layer].guesses += 1

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[list[int]]:
        """All experts of a call that needs more of them than there are slots, group by group, in ascending order.

        Those of a group are there until the next one is asked for; the next ones are brought meanwhile, each once.
        Raises OffloadError when that fails.
        """
        experts = sorted(experts)
        missing = set(self.slots.begin(layer, experts))
        self.forget_guesses(layer, experts)
        self.store.expect(layer, sorted(e for _, e in missing))
        self._fill([], {(layer, e) for e in experts})
        staged: dict[Key, tuple[Transfer, int]] = {}
        waiting = [key for key in ((layer, e) for e in experts) if key in missing]
        try:
            while experts:
                waiting = self._stage(waiting, staged)
                count = next((i for i, e in enumerate(experts) if (layer, e) in waiting), len(experts))
                ahead = sum((layer, e) in staged for e in experts[:count])
                if waiting and ahead > 1:  # half of the buffers for this group, half for the next one
                    count = _cut(experts, {e for _, e in staged}, ahead // 2)
                group, experts = experts[:count], experts[count:]
                mine = [key for key in ((layer, e) for e in group) if key in staged]
                self._wait(layer, [staged[key][0] for key in mine])
                for key in mine:
                    self._place(key, staged[key][1])
                yield group
                for key in mine:
                    self._unplace(key)
                    self._staging.append(staged.pop(key)[1])
        finally:
            for key, (transfer, buffer) in staged.items():
                self._unplace(key)
                self._drop(key[0], transfer, buffer)

    def drop(self, key: Key) -> None:
        """Let go of an expert that is there."""
        self._unplace(key)
        self.slots.evict(key)

    def close(self) -> None:
        """End the threads."""
        self.store.close()

    @property
    def spare(self) -> int:
        """Staging buffers that guesses may take."""
        return len(self._staging) + len(self._leaving)

    @property
    def counters(self) -> Counters:
        """Of all layers together."""
        return self.slots.total()

    def _stage(self, waiting: list[Key], staged: dict[Key, tuple[Transfer, int]]) -> list[Key]:
        """Begin to bring what waits into all free buffers, at least one; returns what still waits."""
        while waiting:
            key = waiting[0]
            if (guess := self._right_guess(key)) is not None:
                staged[key] = guess
                guess[0].hurry()
            else:
                self._reclaim(wait=not staged)
                if not self._staging:
                    break
                staged[key] = self._fetch(key, self._staging[-1], urgent=True), self._staging.pop()
            waiting = waiting[1:]
        return waiting

    def _admit(self, key: Key, keep: Collection[Key], *, urgent: bool) -> Transfer:
        """Give an absent expert a slot and bring it there, or make the staging buffer it is guessed into its slot."""
        found = self.slots.admit(key, keep)
        assert found is not None, "the caller asked `holds`"
        slot, gone = found
        if gone is not None:
            self._unplace(gone)
            self._stop(gone)
        guess = self._right_guess(key)
        if guess is None:
            try:
                transfer = self._fetch(key, slot, urgent=urgent)
            except BaseException:
                self.slots.evict(key)
                raise
        else:
            transfer, buffer = guess
            self.slots.move(key, buffer)
            self._staging.append(slot)
            slot = buffer
        self._place(key, slot)
        return transfer

    def _right_guess(self, key: Key) -> tuple[Transfer, int] | None:
        """What was begun on speculation for an expert that is needed now; one that failed is begun anew."""
        guess = self._guesses.pop(key, None)
        if guess is not None and guess[0].error is not None:
            self._drop(key[0], *guess)
            return None
        if guess is not None:
            self.slots.counters[key[0]].used += 1
        return guess

    def _stop(self, key: Key) -> None:
        """Nobody waits any more for an expert that was to come later; its slot is free when this returns."""
        transfer = self._coming.pop(key, None)
        if transfer is not None:
            self.slots.counters[key[0]].bytes -= transfer.cancel()
            transfer.settle()

    def _fetch(self, key: Key, slot: int, *, urgent: bool) -> Transfer:
        transfer = self.store.fetch(key, self.arena, slot, urgent=urgent)
        self.slots.counters[key[0]].bytes += self.store.size(key)
        return transfer

    def _wait(self, layer: int, transfers: Sequence[Transfer]) -> None:
        started = perf_counter()
        for transfer in transfers:
            transfer.wait()
        self.slots.counters[layer].stalled += perf_counter() - started

    def _abandon(self, key: Key, transfer: Transfer) -> None:
        """Free the slot of an expert whose transfer failed or was interrupted; not before its last piece is over."""
        transfer.cancel()
        transfer.settle()
        self._unplace(key)
        self.slots.evict(key)

    def forget_guesses(self, layer: int, experts: Sequence[int]) -> None:
        """The layer has come: what was guessed for it and is not needed leaves its staging buffer."""
        needed = set(experts)
        for key in [k for k in self._guesses if k[0] == layer and k[1] not in needed]:
            self._drop(layer, *self._guesses.pop(key))
            self.slots.counters[layer].wasted += 1

    def _drop(self, layer: int, transfer: Transfer, buffer: int) -> None:
        self.slots.counters[layer].bytes -= transfer.cancel()
        self._leaving.append((transfer, buffer))

    def _reclaim(self, *, wait: bool = False) -> None:
        """Take back staging buffers into which nothing is written any more. wait: for one, if there is no other."""
        if wait and not self._staging and not any(transfer.over for transfer, _ in self._leaving):
            if not self._leaving:  # all are taken by guesses for other layers
                key = next(iter(self._guesses))
                self._drop(key[0], *self._guesses.pop(key))
                self.slots.counters[key[0]].wasted += 1
            self._leaving[0][0].settle()
        self._staging += [buffer for transfer, buffer in self._leaving if transfer.over]
        self._leaving = [(transfer, buffer) for transfer, buffer in self._leaving if not transfer.over]

    def _place(self, key: Key, slot: int) -> None:
        """Let the table say that an expert lies in a slot or staging buffer."""
        layer, expert = key
        rows, columns = self.store.rows[layer][expert].copy(), self.store.offsets
        offsets = rows[:, columns]
        shift = self.arena.offset(slot) // self.store.unit
        rows[:, columns] = np.where(offsets >= 0, offsets + shift, offsets)
        self._rows[layer][expert] = rows
        self.changes[layer] += 1

    def _unplace(self, key: Key) -> None:
        """Let the table say that an expert is absent: a call that needs it all the same fails in one line."""
        self._rows[key[0]][key[1], :, self.store.offsets[0]] = -1
        self.changes[key[0]] += 1


def _cut(experts: Sequence[int], staged: set[int], count: int) -> int:
    """How many experts there are before the one behind the `count`th staged one."""
    for i, e in enumerate(experts):
        if e in staged:
            if count == 0:
                return i
            count -= 1
    return len(experts)
