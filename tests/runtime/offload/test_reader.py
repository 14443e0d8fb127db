"""Bytes from the disk: the right ones, in the right order of urgency, and one line when the disk fails."""

import errno
import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trilobite.errors import OffloadError
from trilobite.runtime.offload.disk import measure_disk
from trilobite.runtime.offload.memory import ALIGN, Arena, aligned
from trilobite.runtime.offload.reader import Reader, Stretch

SIZE = 5 * ALIGN + 123
PATIENCE = 20.0
preadv = os.preadv


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experts.bin"
    path.write_bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8).numpy().tobytes())
    return path


@pytest.fixture
def reader(file: Path) -> Iterator[Reader]:
    reader = Reader({file: SIZE}, threads=3, request=ALIGN)
    yield reader
    reader.close()


def found(arena: Arena, stretch: Stretch) -> bytes:
    begin = stretch.offset - stretch.start
    return bytes(arena.view(0)[begin : begin + stretch.nbytes])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 1),
        (0, ALIGN),
        (1, ALIGN),
        (ALIGN - 1, 2),
        (777, 3 * ALIGN),
        (0, SIZE),
        (SIZE - 5, 5),
        (5 * ALIGN, 123),
        (9, 0),
    ],
)
def test_the_bytes_of_a_stretch(file: Path, offset: int, nbytes: int, direct: bool) -> None:
    stretch = Stretch(file=file, offset=offset, nbytes=nbytes)
    arena = Arena(1, aligned(SIZE) + ALIGN)
    reader = Reader({file: SIZE}, request=2 * ALIGN, direct=direct)
    reader.read(stretch, arena.view(0), urgent=True).wait()
    assert found(arena, stretch) == file.read_bytes()[offset : offset + nbytes]
    reader.close()


def test_an_arena_is_aligned_and_its_slots_do_not_overlap() -> None:
    arena = Arena(3, 2 * ALIGN)
    assert arena.tensor.data_ptr() % ALIGN == 0
    for slot in range(3):
        arena.view(slot)[:] = bytes([slot + 1]) * (2 * ALIGN)
    assert arena.tensor.view(3, -1).float().mean(1).tolist() == [1.0, 2.0, 3.0]
    assert arena.offset(2) == 4 * ALIGN


def test_memory_that_nobody_has(file: Path) -> None:
    with pytest.raises(OffloadError, match="--memory"):
        Arena(1 << 30, 1 << 30)


def whole(file: Path) -> Stretch:
    return Stretch(file=file, offset=0, nbytes=SIZE)


class Gate:
    """Stands in the place of os.preadv: notes who reads what, and lets nobody through before `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.offsets: list[int] = []
        monkeypatch.setattr(os, "preadv", self.read)

    def read(self, handle: int, into: list[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        assert self.opened.wait(PATIENCE)
        return preadv(handle, into, offset)

    def until(self, count: int) -> None:
        end = time.monotonic() + PATIENCE
        while len(self.offsets) < count and time.monotonic() < end:
            time.sleep(0.001)
        assert len(self.offsets) >= count


def test_a_miss_overtakes_guesses(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader = Gate(monkeypatch), Reader({file: SIZE}, threads=1, request=ALIGN)
    arena = Arena(3, aligned(SIZE))
    guess = reader.read(whole(file), arena.view(0), urgent=False)
    gate.until(1)
    miss = reader.read(Stretch(file=file, offset=3 * ALIGN, nbytes=10), arena.view(1), urgent=True)
    late = reader.read(Stretch(file=file, offset=4 * ALIGN, nbytes=10), arena.view(2), urgent=False)
    gate.opened.set()
    for read in (miss, guess, late):
        read.wait()
    assert gate.offsets == [0, 3 * ALIGN, *range(ALIGN, aligned(SIZE), ALIGN), 4 * ALIGN]
    reader.close()


def test_a_right_guess_hurries(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader = Gate(monkeypatch), Reader({file: SIZE}, threads=1, request=ALIGN)
    arena = Arena(2, aligned(SIZE))
    reader.read(Stretch(file=file, offset=0, nbytes=2 * ALIGN), arena.view(0), urgent=False)
    right = reader.read(Stretch(file=file, offset=3 * ALIGN, nbytes=10), arena.view(1), urgent=False)
    gate.until(1)
    right.hurry()
    right.hurry()
    gate.opened.set()
    right.wait()
    assert gate.offsets[:2] == [0, 3 * ALIGN]
    reader.close()


def test_a_wrong_guess_is_cancelled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader = Gate(monkeypatch), Reader({file: SIZE}, threads=1, request=ALIGN)
    guess = reader.read(whole(file), Arena(1, aligned(SIZE)).view(0), urgent=False)
    gate.until(1)
    guess.cancel()
    assert not guess.over, "the request in flight still writes"
    gate.opened.set()
    guess.wait()
    assert gate.offsets == [0]
    reader.close()


def test_several_requests_are_in_flight(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader = Gate(monkeypatch), Reader({file: SIZE}, threads=3, request=ALIGN)
    read = reader.read(whole(file), Arena(1, aligned(SIZE)).view(0), urgent=True)
    gate.until(3)
    gate.opened.set()
    read.wait()
    reader.close()


def test_a_file_system_without_direct_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL while reading, as overlays and some network file systems answer."""
    refused = []

    def read(handle: int, into: list[memoryview], offset: int) -> int:
        if os.O_DIRECT & fcntl.fcntl(handle, fcntl.F_GETFL):
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(handle, into, offset)

    monkeypatch.setattr(os, "preadv", read)
    reader, arena = Reader({file: SIZE}, threads=4, request=ALIGN), Arena(1, aligned(SIZE))
    reader.read(whole(file), arena.view(0), urgent=True).wait()
    assert found(arena, whole(file)) == file.read_bytes()
    assert refused
    assert len(reader.notes) == 1
    assert "O_DIRECT" in reader.notes[0]
    reader.close()


def test_a_file_system_that_refuses_to_open_directly(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: object, flags: int, *more: object, **named: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    reader, arena = Reader({file: SIZE}), Arena(1, aligned(SIZE))
    reader.read(whole(file), arena.view(0), urgent=True).wait()
    assert found(arena, whole(file)) == file.read_bytes()
    assert len(reader.notes) == 1
    reader.close()


def fails(reader: Reader, file: Path, *parts: str) -> None:
    read = reader.read(whole(file), Arena(1, aligned(SIZE)).view(0), urgent=True)
    with pytest.raises(OffloadError) as caught:
        read.wait()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in (str(file), *parts)), message


@pytest.mark.parametrize("size", [0, 100, ALIGN, 2 * ALIGN + 7, SIZE - 1])
def test_a_file_that_shrinks(reader: Reader, file: Path, size: int) -> None:
    os.truncate(file, size)
    fails(reader, file, "shrunk", "copy it again")


def test_a_file_that_vanishes_reads_on(reader: Reader, file: Path) -> None:
    data, arena = file.read_bytes(), Arena(1, aligned(SIZE))
    file.unlink()
    reader.read(whole(file), arena.view(0), urgent=True).wait()
    assert found(arena, whole(file)) == data


@pytest.mark.parametrize("reason", [errno.EIO, errno.EINVAL, errno.ESTALE])
def test_a_disk_that_fails(reader: Reader, file: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    def read(handle: int, into: list[memoryview], offset: int) -> int:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "preadv", read)
    fails(reader, file, os.strerror(reason))
    monkeypatch.undo()
    arena = Arena(1, aligned(SIZE))
    reader.read(whole(file), arena.view(0), urgent=True).wait()
    assert found(arena, whole(file)) == file.read_bytes(), "the threads survived"


@pytest.mark.parametrize("edit", [lambda p: p.unlink(), lambda p: os.truncate(p, 99)])
def test_a_file_that_is_not_what_it_was(file: Path, edit: Callable[[Path], None]) -> None:
    edit(file)
    with pytest.raises(OffloadError, match=r"experts\.bin"):
        Reader({file: SIZE})


def test_a_closed_reader_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader = Gate(monkeypatch), Reader({file: SIZE}, threads=1, request=ALIGN)
    read = reader.read(whole(file), Arena(1, aligned(SIZE)).view(0), urgent=True)
    gate.until(1)
    gate.opened.set()
    reader.close()
    with pytest.raises(OffloadError, match="load it again"):
        read.wait()
    with pytest.raises(OffloadError, match="load it again"):
        reader.read(whole(file), Arena(1, aligned(SIZE)).view(0), urgent=True)


def test_a_forgotten_reader_ends_its_threads_and_closes_its_files(file: Path) -> None:
    def is_open() -> bool:
        return any(os.path.realpath(handle) == str(file) for handle in Path("/proc/self/fd").iterdir())

    reader = Reader({file: SIZE}, threads=2)
    assert is_open()
    threads = reader.transfers.workers
    del reader
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    del thread, threads
    gc.collect()
    assert not is_open()


def test_a_fork_is_told_instead_of_hanging(reader: Reader, file: Path) -> None:
    child = os.fork()
    if not child:
        try:
            reader.read(whole(file), Arena(1, aligned(SIZE)).view(0), urgent=True)
        except OffloadError as e:
            os._exit(0 if "fork" in str(e) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    arena = Arena(1, aligned(SIZE))
    reader.read(whole(file), arena.view(0), urgent=True).wait()
    assert found(arena, whole(file)) == file.read_bytes()


def test_the_speed_of_a_disk(tmp_path: Path) -> None:
    speed, _ = measure_disk(tmp_path, 3 * ALIGN)
    assert speed > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No such file"):
        measure_disk(tmp_path / "none", ALIGN)
