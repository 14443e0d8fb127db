"""Where a checkpoint lies: its files by name, to be read by ranges.

The small files (configuration, index, tokenizer) are always in a folder of this machine: transformers reads them, too.
"""

import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trilobite.checkpoint.files import check_regular
from trilobite.errors import CheckpointError, one_line

INDEX = "model.safetensors.index.json"
INCOMPLETE = "the copy is incomplete: copy it again"


class RangeFile(Protocol):
    """A file as it was when it was opened; as text, what messages call it.

    All methods raise CheckpointError, or StoreError of a URL, once it has changed.
    """

    @property
    def path(self) -> Path:
        """Where it is on this machine, or would be."""

    @property
    def size(self) -> int:
        """In bytes."""

    def read(self, start: int, nbytes: int) -> bytes:
        """Some bytes; fewer where the file ends."""

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """Bytes of the file, all of which it has, as uint8 that may be written to."""

    def check_unchanged(self) -> None:
        """Look whether it is still what was opened."""


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine (RangeFile)."""

    path: Path
    size: int
    mtime_ns: int

    def __str__(self) -> str:
        """Its path."""
        return str(self.path)

    def read(self, start: int, nbytes: int) -> bytes:
        """Some bytes; fewer where the file ends."""
        self.check_unchanged()
        try:
            with self.path.open("rb") as f:
                f.seek(start)
                return f.read(nbytes)
        except OSError as e:
            raise CheckpointError(
                f"{self.path}: cannot be read ({e.strerror}); check the disk and the file's rights"
            ) from e

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """A private mapping, released when the tensor is freed."""
        self.check_unchanged()
        page = start - start % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as f:
            # A private mapping may be written to, which torch insists on, without ever changing the file.
            pages = mmap.mmap(f.fileno(), start - page + nbytes, offset=page, access=mmap.ACCESS_COPY)
        return torch.frombuffer(pages, dtype=torch.uint8, offset=start - page, count=nbytes)

    def check_unchanged(self) -> None:
        """Reading past the end of a mapped file that has shrunk kills the process: look before every mapping."""
        try:
            stat = self.path.stat()
        except OSError as e:
            raise CheckpointError(
                f"{self.path}: gone since it was opened ({e.strerror}); restore it and run again"
            ) from e
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise CheckpointError(
                f"{self.path}: changed since it was opened; wait until it is complete and run again"
            )


@dataclass(frozen=True)
class Folder:
    """A checkpoint's files by name. path: of the small ones    url: of all of them, where they are elsewhere."""

    path: Path
    files: Mapping[str, RangeFile]
    url: str = ""

    def __str__(self) -> str:
        """What messages call it."""
        return self.url or str(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files.values())

    def json(self, name: str) -> dict[str, Any]:
        """A small file that holds an object. Raises CheckpointError."""
        try:
            data = json.loads((self.path / name).read_bytes())
        except FileNotFoundError as e:
            raise CheckpointError(
                f"{self}/{name}: missing; expected the folder of a Hugging Face checkpoint"
            ) from e
        except OSError as e:
            raise CheckpointError(f"{self}/{name}: cannot be read ({e.strerror}); copy it again") from e
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{self}/{name}: not valid JSON ({one_line(e)}); copy it again") from e
        if not isinstance(data, dict):
            raise CheckpointError(
                f"{self}/{name}: expected a JSON object, found {type(data).__name__}; copy it again"
            )
        return data

    def weight_map(self) -> dict[str, str] | None:
        """File names by tensor, where there is an index. Raises CheckpointError."""
        if not (self.path / INDEX).is_file():
            return None
        weight_map = self.json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(
                f"{self}/{INDEX}: expected a mapping 'weight_map' from tensors to files; copy it again"
            )
        return weight_map

    def tensor_files(self) -> list[RangeFile]:
        """The safetensors files of the checkpoint, in order. Raises CheckpointError when any is missing."""
        if (weight_map := self.weight_map()) is not None:
            shards = sorted(set(weight_map.values()))
            for shard in shards:
                if Path(shard).name != shard:
                    raise CheckpointError(
                        f"{self}/{INDEX}: shard {shard!r}; expected a file name: copy it again"
                    )
                if shard not in self.files:
                    raise CheckpointError(f"{self}/{shard}: listed in {INDEX} but missing; {INCOMPLETE}")
            return [self.files[shard] for shard in shards]
        if "model.safetensors" in self.files:
            return [self.files["model.safetensors"]]
        names = sorted(name for name in self.files if name.endswith(".safetensors"))
        for name in names:
            # Without an index, only the names tell how many parts there should be.
            if m := re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", name):
                for i in range(1, int(m[3]) + 1):
                    part = f"{m[1]}-{i:0{len(m[2])}}-of-{m[3]}.safetensors"
                    if part not in self.files:
                        raise CheckpointError(f"{self}/{part}: missing beside {name}; {INCOMPLETE}")
        if names:
            return [self.files[name] for name in names]
        pickles = sorted(name for name in self.files if Path(name).suffix in {".bin", ".pt", ".pth", ".ckpt"})
        if pickles:
            raise CheckpointError(
                f"{self}: only pickled weights ({pickles[0]}), which can run code when loaded; "
                "convert them to safetensors first (on the hub: huggingface.co/spaces/safetensors/convert)"
            )
        raise CheckpointError(
            f"{self}: no *.safetensors files; expected the folder of a Hugging Face checkpoint"
        )


def local_folder(path: Path) -> Folder:
    """A folder of this machine. Raises CheckpointError for what nobody can read to its end."""
    check_regular(path)
    files: dict[str, RangeFile] = {}
    for file in path.iterdir():
        if file.is_file():
            stat = file.stat()
            files[file.name] = LocalFile(file, stat.st_size, stat.st_mtime_ns)
    return Folder(path=path, files=files)
