"""A checkpoint at a URL: its small files in a folder of this machine, the others read by ranges."""

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trilobite.checkpoint.folder import Folder, RangeFile
from trilobite.checkpoint.journal import PARTIAL
from trilobite.checkpoint.remote.store import (
    PIECE,
    check_tag,
    filesystem,
    join,
    listing,
    patiently,
    read_range,
    tag_of,
)
from trilobite.errors import CheckpointError

OURS = {"README.md", "trilobite.json"}
"""Small files whatever their size: the licence stands in the one, and the checksums in the other."""

_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL (RangeFile). path: where it would be    tag: what the store called these bytes."""

    url: str
    path: Path
    size: int
    tag: str

    def __str__(self) -> str:
        """Its URL."""
        return self.url

    def read(self, start: int, nbytes: int) -> bytes:
        """Some bytes; fewer where the file ends."""
        return read_range(self.url, start, max(0, min(nbytes, self.size - start)), self.size, self.tag)

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """Bytes in memory, a piece at a time: a fault costs no more than that."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        for first in range(0, nbytes, PIECE):
            last = min(first + PIECE, nbytes)
            view[first:last] = self.read(start + first, last - first)
        return data

    def check_unchanged(self) -> None:
        """Ask the store."""
        check_tag(self.url, self.size, self.tag)


def remote_folder(url: str, suffixes: Collection[str], most: int) -> Folder:
    """What lies at a URL; files with these suffixes, of so many bytes at most, are downloaded.

    Raises CheckpointError where nothing is, StoreError for a store that does not answer.
    """
    url = _pinned(url.rstrip("/"))
    found = listing(url)
    if not found:
        raise CheckpointError(f"{url}: nothing is there; check the name, and whether you may list it")
    if PARTIAL in found and "config.json" not in found:
        raise CheckpointError(
            f"{url}: an unfinished run; run the same `trilobite compress` again to finish it"
        )
    _folders.append(tempfile.TemporaryDirectory(prefix="trilobite-"))
    path = Path(_folders[-1].name) / url.rpartition("/")[2]
    path.mkdir()
    files: dict[str, RangeFile] = {}
    for name, info in found.items():
        if info.get("type") == "directory":
            continue
        file = RemoteFile(join(url, name), path / name, int(info["size"]), tag_of(info))
        files[name] = file
        if name in OURS or (Path(name).suffix in suffixes and file.size <= most):
            file.path.write_bytes(file.read(0, file.size))
    return Folder(path=path, files=files, url=url)


def _pinned(url: str) -> str:
    """A hub model's URL with the commit that its branch is at: what is read all along is one state of it."""
    if not url.startswith("hf://"):
        return url
    fs = filesystem(url)

    def resolve() -> str:
        place = fs.resolve_path(url)
        if getattr(place, "repo_type", "") != "model":  # a bucket has no commits
            return url
        commit = fs._api.repo_info(place.repo_id, revision=place.revision).sha
        return f"hf://{place.repo_id}@{commit}/{place.path_in_repo}".rstrip("/")

    return patiently(url, resolve)


def how_to_download(url: str) -> str:
    """The remedy where files have to be on this machine."""
    kind, _, place = url.partition("://")
    if kind == "hf":
        return f"pass the hub id, {'/'.join(place.split('/')[:2])}, which is downloaded"
    copy = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp -r"}.get(kind, "download")
    return f"copy it first: {copy} {url} FOLDER"
