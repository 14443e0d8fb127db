"""The experts of a model in slots of memory, and the reads that bring them there."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from trilobite.runtime.offload.memory import Arena
from trilobite.runtime.offload.policies import Key, Policy
from trilobite.runtime.offload.reader import Read, Reader
from trilobite.runtime.offload.slots import Counters, SlotCache, split
from trilobite.runtime.offload.store import OFFSETS, ExpertStore


class ExpertCache:
    """Slots in front of the disk, for all layers of a model; `tables` say where the experts are now.

    A guess is read into a staging buffer. When its layer needs it, that buffer becomes a slot and the evicted expert's
    slot becomes the staging buffer: nothing is copied, and a wrong guess evicts nobody.

    slab: all slots and staging buffers, [bytes] uint8    tables: for every layer [E, 3, 16] int64; absent: packed = -1
    """

    def __init__(
        self,
        store: ExpertStore,
        files: Mapping[Path, int],
        *,
        slots: int,
        staging: int,
        shared: bool,
        policy: Policy,
    ) -> None:
        """files: path -> size    slots: for all layers together    staging: buffers for guesses and for streams, >= 1.

        Raises OffloadError when a file or the memory cannot be had.
        """
        self.store = store
        self.arena = Arena(slots + staging, store.slot_bytes)
        self.reader = Reader(files)
        self.slots = SlotCache(split(slots, range(len(store.rows)), shared=shared), policy)
        self.slab: Tensor = self.arena.tensor
        self.tables = [torch.from_numpy(rows.copy()) for rows in store.rows]
        self.lock = threading.RLock()
        # Through numpy: torch would count the changes, and calls be bound anew.
        self._rows = [table.numpy() for table in self.tables]
        for rows in self._rows:
            rows[:, :, 0] = -1
        self._staging = list(range(slots, slots + staging))
        self._guesses: dict[Key, tuple[Read, int]] = {}
        self._leaving: list[tuple[Read, int]] = []

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

    def ensure(self, layer: int, experts: Sequence[int]) -> None:
        """Bring the experts of a call into slots. Raises OffloadError when the disk fails; they are absent then."""
        missing = self.slots.begin(layer, experts)
        self._forget_guesses(layer, experts)
        if not missing:
            return
        keep, reads = {(layer, e) for e in experts}, dict[Key, Read]()
        try:
            for key in missing:
                reads[key] = self._admit(key, keep)
            self._wait(layer, list(reads.values()))
        except BaseException:
            for key, read in reads.items():
                self._abandon(key, read)
            raise

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to read these experts into free staging buffers, unless they are there or on their way."""
        for expert in experts:
            key = layer, expert
            if self.slots.slot(key) is not None or key in self._guesses:
                continue
            self._reclaim()
            if not self._staging:
                return
            buffer = self._staging.pop()
            self._guesses[key] = self._read(key, buffer, urgent=False), buffer
            self.slots.counters[layer].guesses += 1

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[list[int]]:
        """All experts of a call that needs more of them than there are slots, group by group, in ascending order.

        Those of a group are there until the next one is asked for; the next ones are read meanwhile, each once.
        Raises OffloadError when the disk fails.
        """
        experts = sorted(experts)
        missing = set(self.slots.begin(layer, experts))
        self._forget_guesses(layer, experts)
        staged: dict[Key, tuple[Read, int]] = {}
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
            for key, (read, buffer) in staged.items():
                self._unplace(key)
                self._drop(key[0], read, buffer)

    def close(self) -> None:
        """End the reading threads and close the files."""
        self.reader.close()

    @property
    def spare(self) -> int:
        """Staging buffers that guesses may take."""
        return len(self._staging) + len(self._leaving)

    @property
    def counters(self) -> Counters:
        """Of all layers together."""
        return self.slots.total()

    def _stage(self, waiting: list[Key], staged: dict[Key, tuple[Read, int]]) -> list[Key]:
        """Begin to read what waits into all free buffers, at least one; returns what still waits."""
        while waiting:
            key = waiting[0]
            if key in self._guesses:
                staged[key] = self._guesses.pop(key)
                staged[key][0].hurry()
                self.slots.counters[key[0]].used += 1
            else:
                self._reclaim(wait=not staged)
                if not self._staging:
                    break
                buffer = self._staging.pop()
                staged[key] = self._read(key, buffer, urgent=True), buffer
            waiting = waiting[1:]
        return waiting

    def _admit(self, key: Key, keep: set[Key]) -> Read:
        """Give an absent expert a slot and bring it there, or make the staging buffer it is guessed into its slot."""
        found = self.slots.admit(key, keep)
        assert found is not None, "the caller asked `holds`"
        slot, gone = found
        if gone is not None:
            self._unplace(gone)
        guess = self._guesses.pop(key, None)
        if guess is None:
            read = self._read(key, slot, urgent=True)
        else:
            read, buffer = guess
            read.hurry()
            self.slots.move(key, buffer)
            self._staging.append(slot)
            self.slots.counters[key[0]].used += 1
            slot = buffer
        self._place(key, slot)
        return read

    def _read(self, key: Key, slot: int, *, urgent: bool) -> Read:
        stretch = self.store.stretches[key[0]][key[1]]
        read = self.reader.read(stretch, self.arena.view(slot), urgent=urgent)
        self.slots.counters[key[0]].bytes += stretch.nbytes
        return read

    def _wait(self, layer: int, reads: Sequence[Read]) -> None:
        started = perf_counter()
        for read in reads:
            read.wait()
        self.slots.counters[layer].stalled += perf_counter() - started

    def _abandon(self, key: Key, read: Read) -> None:
        """Free the slot of an expert whose read failed or was interrupted; not before its last request is over."""
        read.cancel()
        read.settle()
        self._unplace(key)
        self.slots.evict(key)

    def _forget_guesses(self, layer: int, experts: Sequence[int]) -> None:
        """The layer has come: what was guessed for it and is not needed leaves its staging buffer."""
        needed = set(experts)
        for key in [k for k in self._guesses if k[0] == layer and k[1] not in needed]:
            self._drop(layer, *self._guesses.pop(key))
            self.slots.counters[layer].wasted += 1

    def _drop(self, layer: int, read: Read, buffer: int) -> None:
        self.slots.counters[layer].bytes -= read.cancel()
        self._leaving.append((read, buffer))

    def _reclaim(self, *, wait: bool = False) -> None:
        """Take back staging buffers into which nothing is read any more. wait: for one, if there is no other."""
        if wait and not self._staging and not any(read.over for read, _ in self._leaving):
            if not self._leaving:  # all are taken by guesses for other layers
                key = next(iter(self._guesses))
                self._drop(key[0], *self._guesses.pop(key))
                self.slots.counters[key[0]].wasted += 1
            self._leaving[0][0].settle()
        self._staging += [buffer for read, buffer in self._leaving if read.over]
        self._leaving = [(read, buffer) for read, buffer in self._leaving if not read.over]

    def _place(self, key: Key, slot: int) -> None:
        """Let the table say that an expert lies in a slot or staging buffer."""
        layer, expert = key
        rows = self.store.rows[layer][expert].copy()
        offsets = rows[:, OFFSETS]
        rows[:, OFFSETS] = np.where(offsets >= 0, offsets + self.arena.offset(slot), offsets)
        self._rows[layer][expert] = rows

    def _unplace(self, key: Key) -> None:
        """Let the table say that an expert is absent: a call that needs it all the same fails in one line."""
        self._rows[key[0]][key[1], :, 0] = -1


def _cut(experts: Sequence[int], staged: set[int], count: int) -> int:
    """How many experts there are before the one behind the `count`th staged one."""
    for i, e in enumerate(experts):
        if e in staged:
            if count == 0:
                return i
            count -= 1
    return len(experts)
