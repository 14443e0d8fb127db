"""The writer of packed checkpoints on disks that fill up, beside other runs, and after damage."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trilobite.checkpoint import files
from trilobite.checkpoint.files import write_whole
from trilobite.checkpoint.layout import StoredTensor, Unit
from trilobite.checkpoint.packed import PARTIAL, PackedWriter
from trilobite.errors import DestinationError

UNITS = [
    Unit(name=name, tensors=(StoredTensor(name=name, dtype="U8", shape=(7, 9)),), block=name)
    for name in ("a", "b")
]
DATA = torch.arange(63, dtype=torch.uint8).view(7, 9)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def finish(dst: Path) -> None:
    with PackedWriter(dst, UNITS, {"source": 1}) as writer:
        for unit in UNITS:
            if unit.name not in writer.done:
                writer.write(unit, [DATA], {})
        writer.finish(config={}, notes={"trilobite.json": "{}"}, companions={})
    found = load_file(dst / "model-00001-of-00001.safetensors")
    assert torch.equal(found["a"], DATA)
    assert torch.equal(found["b"], DATA)
    assert sorted(p.name for p in dst.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "trilobite.json",
    ]


def open_in(*places: Path) -> list[str]:
    """Files in these places that this process has open (others come and go meanwhile)."""
    handles = [os.path.realpath(handle) for handle in Path("/proc/self/fd").iterdir()]
    return sorted(file for file in handles if any(Path(file).is_relative_to(place) for place in places))


def test_two_runs_do_not_write_one_destination(tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    with PackedWriter(dst, UNITS, {"source": 1}) as writer:
        writer.write(UNITS[0], [DATA], {})
        for identity in ({"source": 1}, {"source": 2}):
            with pytest.raises(DestinationError, match="another run is writing here; wait") as e:
                PackedWriter(dst, UNITS, identity)
            assert "\n" not in str(e.value)
    finish(dst)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_that_died_does_not_keep_others_out(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        PackedWriter(tmp_path / "dst", UNITS, {"source": 1})
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (tmp_path / "dst" / PARTIAL).exists()
    finish(tmp_path / "dst")


def test_a_run_that_finished_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the destination and the lock."""
    dst, real = tmp_path / "dst", files.locked
    PackedWriter(dst, UNITS, {"source": 1}).__exit__(None)

    def late(folder: Path) -> object:
        monkeypatch.undo()
        finish(dst)
        folder.mkdir()
        return real(folder)

    monkeypatch.setattr("trilobite.checkpoint.packed.locked", late)
    with pytest.raises(DestinationError, match="is not empty"):
        PackedWriter(dst, UNITS, {"source": 1})


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", unsupported)
    finish(tmp_path / "dst")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
@pytest.mark.parametrize("failure", [None, KeyError])
def test_a_journal_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[Exception] | None
) -> None:
    """One error, that of the run if it has one; everything is closed, and the next run goes on."""
    dst, journal = tmp_path / "dst", tmp_path / "dst" / PARTIAL / "journal.jsonl"
    PackedWriter(dst, UNITS, {"source": 1}).__exit__(None)
    journal.unlink()
    journal.symlink_to("/dev/full")
    monkeypatch.setattr("trilobite.checkpoint.packed.read_journal", lambda *_: {})
    places = (tmp_path.resolve(), Path("/dev/full"))
    before = open_in(*places)

    def fill() -> None:
        with PackedWriter(dst, UNITS, {"source": 1}) as writer:
            writer.write(UNITS[0], [DATA], {})
            if failure:
                raise failure

    with pytest.raises(failure or DestinationError, match=None if failure else f"{dst}: the disk is full"):
        fill()
    assert open_in(*places) == before
    monkeypatch.undo()
    journal.unlink()
    finish(dst)


def test_a_journal_is_torn_and_then_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that failed half way leaves nothing that the next one trips over."""
    dst = tmp_path / "dst"
    with PackedWriter(dst, UNITS, {"source": 1}) as writer:
        writer.write(UNITS[0], [DATA], {})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(DestinationError, match="disk is full"):
                writer.commit()
        writer.write(UNITS[1], [DATA], {})
    assert len((dst / PARTIAL / "journal.jsonl").read_text().splitlines()) == 2


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")
def test_a_writer_that_cannot_begin_closes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DestinationError, match="disk is full"):
            PackedWriter(tmp_path / "dst", UNITS, {"source": 1})
    assert open_in(tmp_path.resolve()) == []
    finish(tmp_path / "dst")


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"{", b"[]", b"3"])
def test_a_damaged_identity(tmp_path: Path, content: bytes) -> None:
    dst = tmp_path / "dst"
    PackedWriter(dst, UNITS, {"source": 1}).__exit__(None)
    (dst / PARTIAL / "identity.json").write_bytes(content)
    with pytest.raises(DestinationError, match=r"identity.json: damaged, .*; delete .*dst to begin") as e:
        PackedWriter(dst, UNITS, {"source": 1})
    assert "\n" not in str(e.value)


def test_a_journal_of_another_shape(tmp_path: Path) -> None:
    PackedWriter(tmp_path / "dst", UNITS, {"source": 1}).__exit__(None)
    (tmp_path / "dst" / PARTIAL / "journal.jsonl").write_text("3\n")
    finish(tmp_path / "dst")


def test_a_small_file_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, move = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: steps.append("fsync") or sync(handle))
    monkeypatch.setattr(os, "replace", lambda a, b: steps.append("replace") or move(a, b))
    write_whole(tmp_path / "f", b"new")
    assert steps == ["fsync", "replace"]
    assert (tmp_path / "f").read_bytes() == b"new"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_small_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / "f").write_bytes(b"old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "f", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


def test_small_files_do_not_share_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer of the same file comes between."""
    real = os.replace

    def meanwhile(source: Path, target: Path) -> None:
        monkeypatch.undo()
        write_whole(tmp_path / "f", b"other")
        real(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    write_whole(tmp_path / "f", b"mine")
    assert (tmp_path / "f").read_bytes() == b"mine"
