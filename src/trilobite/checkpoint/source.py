"""A Hugging Face checkpoint on disk: which tensors it has, and one of them at a time.

The headers of the safetensors files are parsed and checked here, so that a broken copy is refused before
hours of work and not in the middle of them. Data is read through a mapping of one tensor's bytes,
released together with the tensor: a checkpoint of 1 TB is walked in the memory of its largest tensor.
Pickles are never opened.

    file:  8 bytes n (little endian) | n bytes of JSON {name: {dtype, shape, data_offsets}} | data
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trilobite.checkpoint.folder import INCOMPLETE, INDEX, Folder, RangeFile, local_folder
from trilobite.checkpoint.hub import download
from trilobite.checkpoint.remote.mirror import how_to_download, remote_folder
from trilobite.checkpoint.remote.store import is_url
from trilobite.errors import CheckpointError, one_line
from trilobite.pool import ThreadPool

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of dtypes."""
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

ROWS = "rows"
"""Key of a header's metadata in files that we wrote: N by name, of packed matrices whose last tiles are partial."""
MAX_HEADER = 100_000_000
"""safetensors' own limit. A longer header means that the file is something else."""
READERS = 16
"""Files whose headers are read at a time."""
SAMPLE, SAMPLES = 64 * 1024, 8
"""Bytes of one slice, and slices of one file, that the fingerprint reads."""

COMPANIONS = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
MAX_COMPANION = 100 * 2**20
NOT_COMPANIONS = {
    "config.json",  # rewritten, with the quantization in it
    "trilobite.json",
    "trilobite-times.json",
    "trilobite-eval.json",
    # These describe the weights that are replaced; vLLM would believe them.
    "hf_quant_config.json",
    "quantize_config.json",
    "params.json",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. offset: absolute, in the file    dtype: safetensors' name, such as BF16"""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _File:
    """A tensor file, and what its header says."""

    data: RangeFile
    data_start: int
    rows: dict[str, int] | None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.data.size

    def sample(self) -> list[bytes]:
        """The header and some slices, for the fingerprint."""
        span = max(0, self.size - self.data_start - SAMPLE)
        starts = [self.data_start + span * i // (SAMPLES - 1) for i in range(SAMPLES)]
        return [self.data.read(0, self.data_start), *(self.data.read(start, SAMPLE) for start in starts)]


class Rescaling(Protocol):
    """Factors on rows and columns that leave what the model computes as it is.

    identity: tells one from another    columns: names of the matrices whose columns are divided
    """

    identity: str
    columns: frozenset[str]

    def apply(self, name: str, w: Tensor) -> Tensor:
        """A matrix by its name, or a whole tensor by its name on disk, in fp32 where it changes."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, opened: its config.json and a directory of its tensors. Make one with `open_source`.

    rescaling: of what is read as a matrix (`roles.read_matrix`); raw tensors are as on disk
    """

    folder: Folder
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: dict[Path, _File]
    rescaling: Rescaling | None = None

    def __str__(self) -> str:
        """What messages call it: its path, or its URL."""
        return str(self.folder)

    @property
    def path(self) -> Path:
        """The folder of this machine that holds its small files, and its tensors unless they are read from a URL."""
        return self.folder.path

    @property
    def rows(self) -> dict[str, int] | None:
        """N of the packed matrices whose last tiles are partial; None for files that do not say."""
        found: dict[str, int] = {}
        for file in self.files.values():
            if file.rows is None:
                return None
            found.update(file.rows)
        return found

    def read(self, name: str) -> Tensor:
        """One tensor. Of a file on this machine it is a private mapping, released when the tensor is freed."""
        info = self.info(name)
        return self._map(info, 0, info.nbytes).view(DTYPES[info.dtype]).view(info.shape)

    def read_part(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of dimension 0: for example one expert of a fused [E, N, K] tensor."""
        info = self.info(name)
        assert 0 <= start <= stop <= info.shape[0], (name, info.shape, start, stop)
        row = info.nbytes // max(1, info.shape[0])
        part = self._map(info, start * row, (stop - start) * row).view(DTYPES[info.dtype])
        return part.view(stop - start, *info.shape[1:])

    def info(self, name: str) -> TensorInfo:
        """The directory entry of a tensor; raises CheckpointError when there is none."""
        if name not in self.tensors:
            raise CheckpointError(f"{self}: no tensor {name!r}; it has {len(self.tensors)} others")
        return self.tensors[name]

    def fingerprint(self) -> str:
        """A hash that changes when config.json, the tensor directory, rescaling or (very likely) the weights change.

        Of each file it reads the header and eight slices of 64 KiB: seconds for 1 TB. One edited weight
        between the slices stays unnoticed; another training step, fine-tune or revision does not.
        """
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        if self.rescaling is not None:
            digest.update(self.rescaling.identity.encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        files = sorted(self.files.items())
        with ThreadPool(READERS) as pool:
            for (path, file), slices in zip(files, pool.map(_File.sample, dict(files).values()), strict=True):
                digest.update(f"{path.name} {file.size}\n".encode())
                for data in slices:
                    digest.update(data)
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raise CheckpointError unless all tensor files are what was opened."""
        for file in self.files.values():
            file.data.check_unchanged()

    def companions(self) -> list[Path]:
        """Tokenizer, generation and chat-template files, to be copied beside packed weights. Never code."""
        return [
            p
            for p in sorted(self.path.iterdir())
            if p.suffix in COMPANIONS
            and p.name not in NOT_COMPANIONS
            and not p.name.startswith(".")
            and not p.name.endswith(".index.json")
            and p.is_file()
            and p.stat().st_size <= MAX_COMPANION
        ]

    def _map(self, info: TensorInfo, start: int, nbytes: int) -> Tensor:
        """nbytes of a tensor's data as uint8, aligned for its dtype."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        data = self.files[info.file].data.tensor(info.offset + start, nbytes)
        # safetensors aligns data only by habit, and a kernel may fault on less than the dtype's size.
        return data if data.data_ptr() % DTYPES[info.dtype].itemsize == 0 else data.clone()


def open_source(path_or_id: str | Path, *, revision: str | None = None, remote: bool = False) -> Source:
    """Open a checkpoint: a folder, or a hub id such as `mistralai/Mixtral-8x7B-v0.1` (downloaded if need be).

    remote: or a URL (s3://, gs://, hf://), of which tensors are read by ranges and only small files are downloaded
    Raises CheckpointError when it is missing, incomplete, corrupt, or made of pickles, StoreError for a URL that does
    not answer, MissingExtraError where what reads it is not installed.
    """
    folder = _open_folder(path_or_id, revision, remote)
    config = folder.json("config.json")
    tensors: dict[str, TensorInfo] = {}
    files: dict[Path, _File] = {}
    found = folder.tensor_files()
    if is_url(path_or_id):
        with ThreadPool(READERS) as pool:
            headers = list(pool.map(_read_header, found))
    else:  # no threads: one that starts when memory ends keeps its maker waiting for ever
        headers = [_read_header(shard) for shard in found]
    for shard, (files[shard.path], of_shard) in zip(found, headers, strict=True):
        for name in of_shard.keys() & tensors.keys():
            raise CheckpointError(
                f"{shard}: tensor {name!r} is also in {tensors[name].file.name}; expected every tensor once: "
                "delete the file that does not belong to this checkpoint"
            )
        tensors.update(of_shard)
    _check_index(folder, tensors)
    return Source(folder=folder, config=config, tensors=tensors, files=files)


def _open_folder(path_or_id: str | Path, revision: str | None, remote: bool) -> Folder:
    if is_url(path_or_id):
        if not remote:
            raise CheckpointError(
                f"{path_or_id}: a URL, and this needs the files on this machine; "
                f"{how_to_download(str(path_or_id))}"
            )
        if revision is not None:
            raise CheckpointError(
                f"{path_or_id}: a URL; --revision goes with a hub id: write hf://NAME@{revision}"
            )
        return remote_folder(str(path_or_id), COMPANIONS, MAX_COMPANION)
    path = Path(path_or_id).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path}: a file; expected the folder of a checkpoint: pass {path.parent}")
    if not path.is_dir():
        path = download(str(path_or_id), revision, COMPANIONS)
    elif revision is not None:
        raise CheckpointError(f"{path}: a folder; --revision goes with a hub id: leave it out")
    return local_folder(path)


def _check_index(folder: Folder, tensors: dict[str, TensorInfo]) -> None:
    for name, shard in (folder.weight_map() or {}).items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"{folder}/{shard}: tensor {name!r} is missing though {INDEX} puts it there; "
                "the files are of different checkpoints: copy them again"
            )


def _read_header(file: RangeFile) -> tuple[_File, dict[str, TensorInfo]]:
    """Parse and check the header of one safetensors file."""
    start = file.read(0, 8)
    if start == b"version ":
        raise CheckpointError(f"{file}: a Git LFS pointer, not the file itself; run `git lfs pull`")
    if len(start) < 8:
        raise CheckpointError(f"{file}: {file.size} bytes long; {INCOMPLETE}")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{file}: not a safetensors file (a header of {length} bytes is impossible); copy it again"
        )
    if 8 + length > file.size:
        short = 8 + length - file.size
        raise CheckpointError(f"{file}: {short} bytes too short for its own header; {INCOMPLETE}")
    header = file.read(8, length)
    try:
        entries = json.loads(header, object_pairs_hook=_without_duplicates)
        if not isinstance(entries, dict):
            raise ValueError(f"a {type(entries).__name__}, not an object")
        "".join(entries).encode()  # JSON may have halves of characters, a text may not
        rows = _rows(entries.pop("__metadata__", None))
        tensors = {name: _tensor_info(file, 8 + length, name, entry) for name, entry in entries.items()}
    except (ValueError, RecursionError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{file}: the header is garbage ({one_line(e)}); copy it again") from e
    _check_extent(file, 8 + length, tensors)
    return _File(data=file, data_start=8 + length, rows=rows), tensors


def _rows(metadata: Any) -> dict[str, int] | None:
    if not isinstance(metadata, dict) or ROWS not in metadata:
        return None
    rows = json.loads(metadata[ROWS]) if isinstance(metadata[ROWS], str) else None
    if not isinstance(rows, dict) or not _naturals(list(rows.values())):
        raise ValueError(f"{ROWS} {metadata[ROWS]!r} is no object of sizes by name")
    return rows


def _tensor_info(file: RangeFile, data_start: int, name: str, entry: Any) -> TensorInfo:
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: no dtype, shape and data_offsets in the header; copy it again")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    span: Any = entry.get("data_offsets")
    if not _naturals(shape) or not _naturals(span) or len(span) != 2:
        raise CheckpointError(f"{where}: impossible shape {shape} or data_offsets {span}; copy it again")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype {dtype}; this release reads {', '.join(DTYPES)}")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if span[1] - span[0] != nbytes:
        raise CheckpointError(f"{where}: {dtype} {shape} needs {nbytes} bytes, not {span}; copy it again")
    return TensorInfo(file.path, dtype, tuple(shape), offset=data_start + span[0], nbytes=nbytes)


def _naturals(value: Any) -> bool:
    # bool is an int to Python, and `true` in a shape is garbage.
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_extent(file: RangeFile, data_start: int, tensors: dict[str, TensorInfo]) -> None:
    """The tensors must cover the data exactly: no overlap, no hole, nothing beyond the end of the file."""
    end = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            raise CheckpointError(
                f"{file}: tensor {name!r} starts at byte {info.offset}, expected {end} "
                f"({'overlap' if info.offset < end else 'hole'}); copy it again"
            )
        end += info.nbytes
    size = file.size
    if size < end:
        raise CheckpointError(f"{file}: {end - size} bytes shorter than its header says; {INCOMPLETE}")
    if size > end:
        raise CheckpointError(f"{file}: {size - end} bytes longer than its header says; copy it again")


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"{key!r} occurs twice")
        entries[key] = value
    return entries
