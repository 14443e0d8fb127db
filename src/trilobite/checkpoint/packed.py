"""Write a packed checkpoint so that it can be killed at any moment and continued to the same bytes; read its report.

Every tensor's size is known from the plan, so every byte's place in every file is known before the first matrix is
quantized. Files are laid out in a hidden folder `DST/.partial`, tensors are written to their places in any order, and
a journal lists what is complete. Only when all is there do the files move up, config.json last: a folder without
config.json is not a checkpoint, for us and for everybody else.

    DST/.partial/identity.json   what is being made: plan, source fingerprint, versions
    DST/.partial/journal.jsonl   one line for every finished matrix, appended after its bytes are on disk
    DST/.partial/model-*.safetensors
    DST/.partial/.lock           held by the run that writes
    DST/.partial/mark            tells processes on other machines that they see this folder
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from trilobite.checkpoint.checksums import CHECKSUMS
from trilobite.checkpoint.files import check_regular, explained, locked, write_at, write_whole
from trilobite.checkpoint.journal import (
    JOURNAL,
    PARTIAL,
    as_json,
    as_rows,
    check_free,
    claim,
    read_journal,
    read_rows,
)
from trilobite.checkpoint.layout import Shard, Unit, make_shards
from trilobite.checkpoint.places import Place, new_mark, opened
from trilobite.checkpoint.remote.upload import WAITING, Upload
from trilobite.errors import CheckpointError, DestinationError, FormatVersionError

FORMAT_VERSION = 1
SCALED_VERSION = 2
"""The same, with `exponents` in quantization_config: powers of two, by matrix, which older releases would pass by."""
REPORT = "trilobite.json"
TIMES = "trilobite-times.json"
"""Seconds by tensor: the one file that differs between equal runs."""
SHARD_BYTES = 5 * 10**9
COMMIT_SECONDS = 1.0
"""How much work a kill may cost: finished matrices enter the journal at least this often."""


class PackedWriter:
    """Writes the tensors of a packed checkpoint to their places. Thread safe; a context manager.

    done: records of finished units by name, those of earlier runs included
    places: of all units by name, for processes elsewhere    mark: tells them that they see this folder; None where they
    need not, for it is not the destination
    """

    def __init__(
        self,
        dst: Path,
        units: Sequence[Unit],
        identity: Mapping[str, Any],
        *,
        shard_bytes: int = SHARD_BYTES,
        upload: Upload | None = None,
    ) -> None:
        """Begin, or continue where an earlier run with the same identity stopped.

        upload: what takes finished files from DST, which is its folder
        Raises DestinationError when DST holds something else, when another run is writing it, when the disk cannot hold
        the rest, or cannot be written to.
        """
        self.dst, self.work = dst, dst / PARTIAL
        self._upload = upload
        self._shards = make_shards(units, shard_bytes)
        self._lock = threading.Lock()
        self._writing, self._closed = 0, False
        self._pending: list[dict[str, Any]] = []
        self._committed = time.monotonic()
        self.done: dict[str, dict[str, Any]] = {}
        self._files: dict[Path, int] = {}
        self._sent: set[str] = set()
        with explained(dst), ExitStack() as lock, ExitStack() as handles:
            check_free(dst)
            self.work.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(self.work))
            claim(dst, identity, upload.url if upload else str(dst))
            if upload:
                upload.begin()
            self._recall({u.name for u in units})
            self._left = {s.name: sum(u.name not in self.done for u in s.units) for s in self._shards}
            self._check_space(units)
            self.places: dict[str, Place] = {}
            for shard in self._shards:
                self._open(shard, handles)
            self._journal = os.open(self.work / JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
            handles.callback(os.close, self._journal)
            self._journaled = os.fstat(self._journal).st_size
            self.mark = None if upload else new_mark(self.work)
            self._claimed, self._handles = lock.pop_all(), handles.pop_all()

    def _recall(self, known: set[str]) -> None:
        """What earlier runs have done: the journal tells of files here, each shard that was sent of itself."""
        journal = self.work / JOURNAL
        self.done = read_journal(journal, known)
        sent = self._upload.sent if self._upload else {}
        lost = []
        for shard in self._shards:
            names = {u.name for u in shard.units}
            size, rows = sent.get(shard.name, (0, b""))
            records, _ = read_rows(rows, names)
            if size == shard.file_bytes and len(records) == len(names):
                self._sent.add(shard.name)
                self.done |= records
            elif not any((folder / shard.name).exists() for folder in (self.work, self.dst)):
                lost += [name for name in names if self.done.pop(name, None)]
        if lost:
            write_whole(journal, as_rows(self.done))

    def _check_space(self, units: Sequence[Unit]) -> None:
        needed = sum(u.nbytes for u in units if u.name not in self.done)
        if self._upload and not self._upload.late:
            needed = min(needed, (WAITING + 1) * max(shard.nbytes for shard in self._shards))
        needed += 16 * 2**20
        free = shutil.disk_usage(self.dst).free
        if free < needed:
            raise DestinationError(
                f"{self.dst}: the rest needs {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free; free some "
                "space and run the same command again: it continues"
            )

    def _open(self, shard: Shard, handles: ExitStack) -> None:
        header = shard.header()
        path = self.work / shard.name
        if not path.exists() and (self.dst / shard.name).exists():
            path = self.dst / shard.name  # killed while the finished files were moving up
        offset = len(header)
        for unit in shard.units:
            self.places[unit.name] = Place(file=path, offset=offset, unit=unit)
            offset += unit.nbytes
        if shard.name in self._sent:
            path.unlink(missing_ok=True)
            return
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        handles.callback(os.close, handle)
        self._files[path] = handle
        if os.fstat(handle).st_size != shard.file_bytes:
            os.ftruncate(handle, shard.file_bytes)
        if os.pread(handle, len(header), 0) != header:
            write_at(handle, memoryview(header), 0)
            os.fdatasync(handle)

    def __enter__(self) -> "PackedWriter":
        """Nothing to acquire: the constructor did."""
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Record what is finished and close the files; an unfinished checkpoint stays resumable.

        Raises DestinationError, unless the run has failed already.
        """
        with suppress(DestinationError) if failed else nullcontext(), self._claimed:
            try:
                self.commit()
            finally:
                with explained(self.dst), self._lock:
                    self._closed = True
                    if not self._writing:
                        self._handles.close()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Keep the files open: after a failure elsewhere a thread may still be writing when the writer is left."""
        with self._lock:
            if self._closed:
                raise DestinationError(f"{self.dst}: the run has ended")
            self._writing += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing -= 1
                if self._closed and not self._writing:
                    self._handles.close()

    def write(self, unit: Unit, tensors: Sequence[Tensor], record: Mapping[str, Any]) -> None:
        """Write one unit's tensors (in its order) and note it as finished, with what is to be remembered of it.

        Raises DestinationError when the disk is full; everything committed so far stays.
        """
        place = self.places[unit.name]
        with explained(self.dst), self._busy():
            self._wait()
            sums = place.put(self._files[place.file], place.named(tensors))
            self._remember({"name": unit.name, **record, CHECKSUMS: sums})
            self._send_if_done(place)

    def remember(self, name: str, record: Mapping[str, Any]) -> None:
        """Note a unit as finished that another process has put in its place on disk. record: with checksums."""
        with explained(self.dst), self._busy():
            self._wait()
            self._remember({"name": name, **record})
            self._send_if_done(self.places[name])

    def _wait(self) -> None:
        if self._upload:
            self._upload.wait()

    def _send_if_done(self, place: Place) -> None:
        """Send the shard of a place that has just been filled, if it was the last one in it."""
        if self._upload is None or self._upload.late:
            return
        with self._lock:
            name = place.file.name
            if self._left[name] or name in self._sent:
                return
            self._sent.add(name)
        self._send(next(s for s in self._shards if s.name == name), self._upload)

    def _send(self, shard: Shard, upload: Upload) -> None:
        """Send a finished shard and free its room on this disk."""
        path = self.places[shard.units[0].name].file
        self.commit()
        assert path.stat().st_size == shard.file_bytes
        upload.send_shard(path, {u.name: self.done[u.name] for u in shard.units})
        with self._lock:
            if not self._closed:  # else another run may be at it
                os.ftruncate(self._files.pop(path), 0)
                path.unlink()

    def _remember(self, row: dict[str, Any]) -> None:
        with self._lock:
            if self._closed:
                return
            self._pending.append(row)
            self._left[self.places[row["name"]].file.name] -= row["name"] not in self.done
            self.done[row["name"]] = row
            if time.monotonic() - self._committed > COMMIT_SECONDS:
                self._commit()

    def read(self, unit: Unit) -> list[Tensor]:
        """The tensors of a finished unit, in its order, as they are on disk."""
        place = self.places[unit.name]
        with explained(self.dst), self._busy():
            with self._lock:  # else it is sent and removed meanwhile
                if place.file in self._files:
                    return place.read()
            assert self._upload is not None
            return place.tensors(self._upload.read(place.file.name, place.offset, unit.nbytes))

    def rewrite(self, tensors: Mapping[str, Tensor]) -> None:
        """Put other values in the place of some tensors, by name, of finished units; they are on disk at the end.

        Not journaled: a caller that is killed has to be able to do it again.
        """
        with explained(self.dst), self._busy():
            for path, places in groupby(self.places.values(), lambda place: place.file):
                if path not in self._files:  # sent, by a run that had come this far
                    continue
                with opened(path, os.O_RDWR) as handle:
                    for place in places:
                        self.done[place.unit.name][CHECKSUMS] |= place.put(handle, tensors)
                    os.fdatasync(handle)

    def note(self, name: str, data: str | bytes) -> None:
        """Leave a small file for a later run of the same identity, whole or not at all. Raises DestinationError."""
        with explained(self.dst):
            write_whole(self.work / name, data if isinstance(data, bytes) else data.encode())

    def commit(self) -> None:
        """Make everything written so far survive a kill."""
        with explained(self.dst), self._lock:
            self._commit()

    def _commit(self) -> None:
        if not self._pending:
            return
        for handle in self._files.values():
            os.fdatasync(handle)
        rows = as_rows({row["name"]: row for row in self._pending})
        write_at(self._journal, memoryview(rows), self._journaled)
        os.fsync(self._journal)
        self._journaled += len(rows)
        self._pending.clear()
        self._committed = time.monotonic()

    def finish(
        self, *, config: Mapping[str, Any], notes: Mapping[str, str], companions: Mapping[str, bytes]
    ) -> None:
        """All units are written: add index, notes, tokenizer files and config, and move the files to their names.

        notes: texts by file name, `trilobite.json` among them    companions: tokenizer files by name
        """
        missing = [u.name for s in self._shards for u in s.units if u.name not in self.done]
        assert not missing, f"{len(missing)} units are missing, first {missing[0]}"
        self.commit()
        with explained(self.dst):
            for name, data in companions.items():
                self._add(name, data)
            for shard in self._shards:
                if self._upload:
                    if shard.name not in self._sent:
                        self._send(shard, self._upload)
                elif (self.work / shard.name).exists():
                    os.replace(self.work / shard.name, self.dst / shard.name)
            self._add("model.safetensors.index.json", as_json(self._index()))
            for name, text in notes.items():
                self._add(name, text.encode())
            self._add("config.json", as_json(config))
            shutil.rmtree(self.work)
            if self._upload:
                self._upload.finish()

    def _add(self, name: str, data: bytes) -> None:
        write_whole(self.dst / name, data, aside=self.work)
        if self._upload:
            self._upload.send(name)

    def _index(self) -> dict[str, Any]:
        names = {t.name: s.name for s in self._shards for u in s.units for t in u.tensors}
        total = sum(s.nbytes for s in self._shards)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}


def report_text(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """JSON that people read and compare: the head over several lines, then `tensors`, one line each."""
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    return f'{json.dumps(head, indent=2)[:-2]},\n  "tensors": [\n    {lines}\n  ]\n}}\n'


def read_report(path: Path) -> dict[str, Any]:
    """`trilobite.json` of a finished packed checkpoint.

    Raises CheckpointError when it is absent or unreadable, FormatVersionError for a version we do not read.
    """
    check_finished(path)
    if path.is_dir():
        check_regular(path)
    try:
        report = json.loads((path / REPORT).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no {REPORT}; expected a folder made by `trilobite compress`"
        ) from None
    except OSError as e:
        raise CheckpointError(f"{path / REPORT}: cannot be read ({e.strerror}); copy the file again") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path / REPORT}: not valid JSON ({e}); copy the file again") from e
    if not isinstance(report, dict):
        raise CheckpointError(f"{path / REPORT}: not a JSON object; copy the file again")
    check_version(report.get("format_version"), str(path))
    return report


def check_finished(path: Path) -> None:
    """Raise CheckpointError when `path` holds a run of `trilobite compress` that did not end."""
    if (path / PARTIAL).exists() and not (path / "config.json").exists():
        raise CheckpointError(
            f"{path}: an unfinished run; run the same `trilobite compress` again to finish it"
        )


def check_version(version: object, where: str) -> None:
    """Raise FormatVersionError unless this release reads packed checkpoints of that version."""
    if type(version) is not int or version not in (FORMAT_VERSION, SCALED_VERSION):
        raise FormatVersionError(
            f"{where}: packed in format version {version!r}, this release reads version {FORMAT_VERSION} "
            f"and {SCALED_VERSION}; "
            "upgrade trilobite, or compress the original again"
        )
