"""Hessians on disk, for several recipes of one checkpoint: a file for every block and a manifest.

    manifest.json                 source, calibration, and by matrix: file, tensor, tokens, share of its own Hessian
    hessians-00003.safetensors    lower triangles, fp32, row by row: K (K + 1) / 2 values each

Only the original model's Hessians can be kept: what enters a block behind quantized ones belongs to one recipe.
"""

import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trilobite.checkpoint.files import explained, write_whole
from trilobite.errors import CalibrationError
from trilobite.quantize.plan import PlanLine
from trilobite.quantize.receiver import Record, Records

MANIFEST = "manifest.json"
VERSION = 1
ENTRY = 320
"""Bytes of the header that are set aside for each matrix of a block: how many Hessians there are shows only later."""


class HessianStore:
    """A folder of Hessians: receives them from a run of the model, and gives them back. Thread safe."""

    def __init__(self, folder: Path, *, source: str, calibration: Mapping[str, Any] | None) -> None:
        """Open a folder, or begin one.

        source: fingerprint of the checkpoint    calibration: what is wanted of it, None = whatever it holds
        Raises CalibrationError when the folder holds something else.
        """
        self.folder = folder
        self._lock = threading.Lock()
        self._file: _Triangles | None = None
        self._rows: dict[str, Record] = {}
        path = folder / MANIFEST
        if path.exists():
            found = self._read(path)
            if found["source"] != source:
                raise CalibrationError(
                    f"{folder}: holds the Hessians of another checkpoint; collect this one's with --save-hessians"
                )
            if calibration is not None and found["calibration"] != dict(calibration):
                differs = [k for k in calibration if found["calibration"].get(k) != calibration[k]]
                raise CalibrationError(
                    f"{folder}: was collected on another calibration ({', '.join(differs)} differ); choose another "
                    "folder, or the same text and options"
                )
            self._manifest = found
        elif calibration is None:
            raise CalibrationError(
                f"{folder}: holds no {MANIFEST}; collect Hessians with --save-hessians and --propagate original"
            )
        else:
            self._manifest = {
                "version": VERSION,
                "source": source,
                "calibration": dict(calibration),
                "matrices": {},
            }

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_bytes())
            if found["version"] != VERSION:
                raise CalibrationError(
                    f"{path}: version {found['version']}, this release reads {VERSION}; collect them again"
                )
            return {k: found[k] for k in ("version", "source", "calibration", "matrices")}
        except (OSError, ValueError, KeyError, TypeError) as e:
            if isinstance(e, CalibrationError):
                raise
            raise CalibrationError(f"{path}: cannot be read; collect the Hessians again") from e

    @property
    def calibration(self) -> dict[str, Any]:
        """What the Hessians were collected on."""
        return dict(self._manifest["calibration"])

    def __contains__(self, name: str) -> bool:
        """Whether there is a Hessian for a matrix, or the note that the model never runs it."""
        return name in self._manifest["matrices"]

    @contextmanager
    def block(self, index: int | None, lines: Sequence[PlanLine]) -> Iterator[None]:
        """Make the file of a block, whole or not at all; None is what is outside of all blocks.

        Raises DestinationError, as all that writes here, when the disk is full or the folder cannot be written to.
        """
        part = "head" if index is None else f"{index:05d}"
        path = self.folder / f"hessians-{part}.safetensors"
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = _Triangles(path, room=ENTRY * (len(lines) + 1))
        self._rows.clear()
        yield
        with explained(self.folder):
            self._file.close()
        self._file = None
        self._note({name: {"file": path.name, **row} for name, row in self._rows.items()})

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

    def unseen(self, names: Sequence[str]) -> None:
        """Note matrices that the model never runs."""
        self._note({name: {"tokens": 0} for name in names})

    def _note(self, rows: Mapping[str, Record]) -> None:
        """Add matrices to the manifest."""
        self._manifest["matrices"] |= rows
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
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
        if "tensor" not in entry:
            return torch.eye(k), note
        path = self.folder / entry["file"]
        try:
            with safe_open(path, "pt") as file:
                data = file.get_tensor(entry["tensor"])
        except (OSError, SafetensorError) as e:
            raise CalibrationError(f"{path}: cannot be read; collect the Hessians again") from e
        if data.numel() != k * (k + 1) // 2:
            raise CalibrationError(
                f"{path}: {entry['tensor']} does not fit K={k}; collect the Hessians again"
            )
        return _square(data, k), note


class _Triangles:
    """A safetensors file that grows tensor by tensor; its header has room set aside and is written at the end."""

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
        self._file.close()
        os.replace(self._temporary, self.path)


def _triangle(h: Tensor) -> Tensor:
    """[K, K] -> its lower triangle, row by row."""
    return torch.cat([row[: i + 1] for i, row in enumerate(h)])


def _square(data: Tensor, k: int) -> Tensor:
    """The inverse of `_triangle`."""
    h = torch.zeros(k, k)
    for i, row in enumerate(torch.split(data, list(range(1, k + 1)))):
        h[i, : i + 1] = row
    return h + h.tril(-1).T
