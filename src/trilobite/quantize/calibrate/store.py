"""Hessians on disk, for several recipes of one checkpoint: a manifest, and a file for each collection of a block.

    manifest.json                 source, calibration, and by matrix: file, tensor, tokens, share of its own Hessian
    hessians-00003.safetensors    lower triangles, fp32, row by row: K (K + 1) / 2 values each
    hessians-00003-1.safetensors  what another recipe needed besides, or what was lost
    .lock                         held by the run that collects

Only the original model's Hessians can be kept: what enters a block behind quantized ones belongs to one recipe.
"""

import json
import os
import struct
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trilobite.checkpoint.files import explained, locked, write_whole
from trilobite.errors import CalibrationError
from trilobite.quantize.calibrate.protocols import Record, Records
from trilobite.quantize.plan.plan import PlanLine

if TYPE_CHECKING:  # brings transformers along
    from trilobite.quantize.calibrate.model import BlockModel

MANIFEST = "manifest.json"
VERSION = 1
AGAIN = "collect the Hessians again with --save-hessians"
ENTRY = 320
"""Bytes of the header that are set aside for each matrix of a block: how many Hessians there are shows only later."""


class HessianStore:
    """A folder of Hessians: receives them from a run of the model, and gives them back. Thread safe."""

    copies = 5
    """As many as packing needs, so that both walk through a block alike."""

    def __init__(self, folder: Path, *, source: str, calibration: Mapping[str, Any] | None) -> None:
        """Open a folder, or begin one.

        source: fingerprint of the checkpoint    calibration: what is wanted of it, None = whatever it holds
        Raises CalibrationError when the folder holds something else.
        """
        self.folder = folder
        self._source, self._wanted = source, calibration
        self._lock = threading.Lock()
        self._file: _Triangles | None = None
        self._rows: dict[str, Record] = {}
        self._manifest = self._open()

    def _open(self) -> dict[str, Any]:
        """The manifest on disk, or that of a new folder."""
        folder, wanted = self.folder, self._wanted
        if (folder / MANIFEST).exists():
            manifest = _read(folder / MANIFEST)
            if manifest["source"] != self._source:
                raise CalibrationError(
                    f"{folder}: holds the Hessians of another checkpoint; choose another folder for this one's"
                )
            if wanted is not None and manifest["calibration"] != dict(wanted):
                differs = [k for k in wanted if manifest["calibration"].get(k) != wanted[k]]
                raise CalibrationError(
                    f"{folder}: was collected on another calibration ({', '.join(differs)} differ); choose another "
                    "folder, or the same text and options"
                )
            return manifest
        if wanted is None:
            raise CalibrationError(
                f"{folder}: holds no {MANIFEST}; collect Hessians with --save-hessians and --propagate original"
            )
        return {"version": VERSION, "source": self._source, "calibration": dict(wanted), "matrices": {}}

    @property
    def calibration(self) -> dict[str, Any]:
        """What the Hessians were collected on."""
        return dict(self._manifest["calibration"])

    def missing(self, names: Collection[str]) -> set[str]:
        """The matrices without a Hessian that can be read or the note that the model never runs them."""
        entries = self._manifest["matrices"]
        files = {entries[name]["file"] for name in names if "file" in entries.get(name, {})}
        there = {(file, tensor) for file in files for tensor in _tensors(self.folder / file)}
        return {
            name
            for name in names
            if name not in entries
            or ("file" in entries[name] and (entries[name]["file"], entries[name]["tensor"]) not in there)
        }

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Entered around all that adds Hessians: one run at a time, which sees what those before it left.

        Raises DestinationError when another run is at it.
        """
        with ExitStack() as lock:
            with explained(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.enter_context(locked(self.folder))
            self._manifest = self._open()
            yield

    @contextmanager
    def block(self, index: int | None, lines: Sequence[PlanLine]) -> Iterator[None]:
        """Make a file for a block, whole or not at all; None is what is outside of all blocks.

        Raises DestinationError, as all that writes here, when the disk is full or the folder cannot be written to.
        """
        path = self._unused("hessians-head" if index is None else f"hessians-{index:05d}")
        with explained(self.folder):
            file = self._file = _Triangles(path, room=ENTRY * (len(lines) + 1))
        self._rows.clear()
        try:
            yield
            with explained(self.folder):
                file.close()
        finally:
            with self._lock:
                self._file = None
                file.discard()
        self._note({name: {"file": path.name, **row} for name, row in self._rows.items()})

    def _unused(self, stem: str) -> Path:
        """A file that no matrix is in."""
        taken = {entry.get("file") for entry in self._manifest["matrices"].values()}
        names = (f"{stem}{end}.safetensors" for end in chain([""], (f"-{i}" for i in count(1))))
        return self.folder / next(name for name in names if name not in taken)

    def slots(self, jobs: int) -> int:
        """One a thread."""
        return jobs

    def take(self, lines: Sequence[PlanLine], hessian: Tensor, note: Mapping[str, Any]) -> Records:
        """Keep the Hessian that some lines share. hessian: [K, K] fp32."""
        data = _triangle(hessian.cpu())
        with explained(self.folder), self._lock:
            assert self._file is not None
            self._file.append(lines[0].matrix.name, data)
        row = {"tensor": lines[0].matrix.name, **note}
        return [(line, row) for line in lines]

    def done(self, line: PlanLine, record: Record) -> None:
        """Remember where the Hessian of a line is."""
        self._rows[line.matrix.name] = record

    def unseen(self, lines: Sequence[PlanLine]) -> None:
        """Note matrices that the model never runs."""
        self._note({line.matrix.name: {"tokens": 0} for line in lines})

    def put(self, model: "BlockModel", index: int) -> None:
        """Nothing is packed here: only the original model's Hessians are kept."""

    def _note(self, rows: Mapping[str, Record]) -> None:
        """Add matrices to the manifest."""
        self._manifest["matrices"] |= rows
        with explained(self.folder):
            write_whole(self.folder / MANIFEST, (json.dumps(self._manifest, indent=1) + "\n").encode())

    def get(self, name: str, k: int) -> tuple[Tensor, dict[str, Any]]:
        """The Hessian [K, K] fp32 of a matrix, and its note. Raises CalibrationError when it is not there."""
        entry = self._manifest["matrices"].get(name)
        if entry is None:
            raise CalibrationError(
                f"{self.folder}: holds no Hessian for {name}, which this recipe calibrates; collect them again with "
                "this recipe and --save-hessians"
            )
        note = {key: entry[key] for key in ("tokens", "own") if key in entry}
        if "file" not in entry:
            return torch.eye(k), note
        path = self.folder / entry["file"]
        try:
            with safe_open(path, "pt") as file:
                data = file.get_tensor(entry["tensor"])
        except (OSError, SafetensorError) as e:
            raise CalibrationError(f"{path}: cannot be read; {AGAIN}") from e
        if data.numel() != k * (k + 1) // 2:
            raise CalibrationError(
                f"{path}: {entry['tensor']} does not fit K={k}; delete the file and {AGAIN}"
            )
        return _square(data, k), note


def _read(path: Path) -> dict[str, Any]:
    """A manifest. Raises CalibrationError."""
    remedy = f"delete {path.parent} and {AGAIN}"
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise CalibrationError(f"{path}: cannot be read; {remedy}") from e
    if isinstance(manifest, dict) and manifest.get("version", VERSION) != VERSION:
        raise CalibrationError(
            f"{path}: version {manifest['version']}, this release reads {VERSION}; {remedy}"
        )
    types = {"version": int, "source": object, "calibration": dict, "matrices": dict}
    if not _has(manifest, types) or not all(_is_entry(entry) for entry in manifest["matrices"].values()):
        raise CalibrationError(f"{path}: not a manifest of Hessians; {remedy}")
    return {key: manifest[key] for key in types}


def _is_entry(entry: Any) -> bool:
    """Whether that is what `_note` writes of a matrix."""
    return _has(entry, {"tokens": int}) and ("file" not in entry or _has(entry, {"file": str, "tensor": str}))


def _has(row: Any, types: Mapping[str, type]) -> bool:
    return isinstance(row, dict) and all(key in row and isinstance(row[key], t) for key, t in types.items())


def _tensors(path: Path) -> list[str]:
    """Names of a file's tensors, none where it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError):
        return []


class _Triangles:
    """A safetensors file that grows tensor by tensor; its header has room set aside and is written at the end.

    What a kill leaves of it is overwritten by the next collection: the folder is locked.
    """

    def __init__(self, path: Path, *, room: int) -> None:
        self.path, self._room = path, room
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._entries: dict[str, Any] = {}
        self._at = 0
        self._file = self._temporary.open("wb")
        self._file.seek(8 + room)

    def append(self, name: str, data: Tensor) -> None:
        self._file.write(memoryview(data.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        span = [self._at, self._at + data.nbytes]
        self._entries[name] = {"dtype": "F32", "shape": [data.numel()], "data_offsets": span}
        self._at += data.nbytes

    def close(self) -> None:
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        assert len(header) <= self._room
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)

    def discard(self) -> None:
        """Leave nothing behind of what was not closed."""
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def _triangle(h: Tensor) -> Tensor:
    """[K, K] -> its lower triangle, row by row."""
    return torch.cat([row[: i + 1] for i, row in enumerate(h)])


def _square(data: Tensor, k: int) -> Tensor:
    """The inverse of `_triangle`."""
    h = torch.zeros(k, k)
    for i, row in enumerate(torch.split(data, list(range(1, k + 1)))):
        h[i, : i + 1] = row
    return h + h.tril(-1).T
