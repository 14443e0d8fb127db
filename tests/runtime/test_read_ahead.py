"""Mapped files are read ahead where there is memory for them, and no longer than somebody holds them."""

import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures import build_checkpoint

from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime import read_ahead as reading
from trilobite.runtime.load import load
from trilobite.runtime.read_ahead import CHUNK, read_ahead

MAPS = Path("/proc/self/smaps")
PAGE = mmap.PAGESIZE
linux = pytest.mark.skipif(sys.platform != "linux" or not MAPS.exists(), reason="Linux reads ahead")


def mapped(path: Path, nbytes: int) -> Any:
    """An array of uint8 over a file of so many bytes."""
    with path.open("wb") as file:
        file.truncate(nbytes)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY), dtype=np.uint8)


def resident(path: Path) -> int:
    """Bytes of a file that this process has in its table of pages."""
    found, holds = 0, False
    for line in MAPS.read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            holds = words[-1] == str(path.resolve())
        elif holds and words[0] == "Rss:":
            found += 1024 * int(words[1])
    return found


def whole(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@linux
def test_all_files_to_their_last_byte(tmp_path: Path) -> None:
    sizes = (1, 3 * PAGE + 5, CHUNK + PAGE + 1, 2 * CHUNK)
    files = [mapped(tmp_path / str(i), size) for i, size in enumerate(sizes)]
    assert [resident(tmp_path / str(i)) for i in range(4)] == [0, 0, 0, 0]
    reader = read_ahead(files)
    assert reader is not None
    assert reader.daemon
    reader.join()
    assert [resident(tmp_path / str(i)) for i in range(4)] == list(map(whole, sizes))


@linux
@pytest.mark.parametrize("room", [None, 4 * PAGE - 1, 4 * PAGE])
def test_memory_for_all_of_them_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    monkeypatch.setattr(reading, "available_bytes", lambda: room)
    files = [mapped(tmp_path / name, 2 * PAGE) for name in "ab"]
    reader = read_ahead(files)
    if room != 4 * PAGE:
        assert reader is None
        return
    assert reader is not None
    reader.join()
    assert resident(tmp_path / "b") == 2 * PAGE


def test_other_systems_have_no_such_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(reading, "available_bytes", lambda: 1 << 40)
    assert read_ahead([mapped(tmp_path / "a", PAGE)]) is None


class Advice:
    """libc with an `madvise` of ours."""

    def __init__(self, answer: Callable[[int], int]) -> None:
        self.sizes: list[int] = []
        self.answer = answer

    def madvise(self, address: Any, size: Any, advice: int) -> int:
        assert advice == reading.POPULATE_READ
        self.sizes.append(size.value)
        return self.answer(len(self.sizes))


@linux
def test_what_nobody_holds_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [mapped(tmp_path / "a", 3 * CHUNK), mapped(tmp_path / "b", PAGE)]

    def let_go(call: int) -> int:
        files[:1] = [] if call == 2 else files[:1]
        return 0

    libc = Advice(let_go)
    monkeypatch.setattr(reading.ctypes, "CDLL", lambda _: libc)
    reader = read_ahead(files)
    assert reader is not None
    reader.join()
    assert libc.sizes == [CHUNK, CHUNK, PAGE]


@linux
def test_an_older_system_is_asked_once_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Advice(lambda _: -1)
    monkeypatch.setattr(reading.ctypes, "CDLL", lambda _: libc)
    files = [mapped(tmp_path / name, 2 * CHUNK) for name in "ab"]
    reader = read_ahead(files)
    assert reader is not None
    reader.join()
    assert libc.sizes == [CHUNK, CHUNK]


def test_models_are_read_ahead_but_where_experts_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint("mixtral", tmp_path / "original")
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    asked: list[int] = []
    monkeypatch.setattr("trilobite.runtime.load.read_ahead", lambda files: asked.append(len(files)))
    monkeypatch.setattr("trilobite.runtime.load.bound", lambda *_: None)  # what fits depends on this process
    for memory in (None, "auto", "1GiB"):
        load(str(tmp_path / "packed"), memory=memory)
    assert asked == [1, 1]
