"""The destination of a run at a URL: files are made in a folder of this machine, sent when finished, and removed there.

    URL/.partial/identity.json       what is being made
    URL/.partial/SHARD.jsonl         SHARD is there and was read back; the records of its units
    URL/model-*.safetensors, …       finished files, config.json last

What is at the URL is enough to go on from any machine; work on shards that are not finished is in the folder here.
"""

import hashlib
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilobite.checkpoint.files import write_whole
from trilobite.checkpoint.journal import IDENTITY, PARTIAL, as_rows
from trilobite.checkpoint.remote.store import join, listing, put, read_range, remove
from trilobite.errors import DestinationError

WAITING = 2
"""Finished shards that may be on this machine at a time; then work waits until one of them is sent."""
SCRATCH = Path("~/.cache/trilobite")
KEPT = ("config.json", "trilobite.json")


class Upload:
    """A destination. url: where to    folder: what is not there yet, in the shape of a packed checkpoint

    sent: bytes of shards that are there, and records of what is in them, by name
    late: nothing is sent before the end: what is written may still change
    """

    def __init__(self, url: str, scratch: Path | None = None, *, late: bool = False) -> None:
        """Look what is there. scratch: a folder for that of this run, default ~/.cache/trilobite.

        Raises DestinationError for a URL that holds something else, StoreError.
        """
        self.url, self.late = url.rstrip("/"), late
        name = re.sub(r"[^\w.-]+", "-", self.url.partition("://")[2])[-60:]
        mark = hashlib.sha256(self.url.encode()).hexdigest()[:8]
        self.folder = ((scratch or SCRATCH).expanduser() / f"{name}-{mark}").absolute()
        self.sent: dict[str, tuple[int, bytes]] = {}
        self._room = threading.BoundedSemaphore(WAITING)
        there = listing(self.url)
        begun = listing(join(self.url, PARTIAL)) if there else {}
        if IDENTITY not in begun and "config.json" not in there and any(n[0] != "." for n in there):
            raise DestinationError(
                f"{self.url}: is not empty and holds no unfinished run; choose another destination"
            )
        self._recall(there, begun)

    def _recall(self, there: Mapping[str, Mapping[str, Any]], begun: Mapping[str, Mapping[str, Any]]) -> None:
        """What the URL holds of an unfinished run, or of one that has ended, goes into the folder."""
        record = self.folder / PARTIAL / IDENTITY
        identity = self._get(f"{PARTIAL}/{IDENTITY}", begun[IDENTITY]) if IDENTITY in begun else None
        if not record.exists() or record.read_bytes() != identity:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a run that is not there any more
        for name in KEPT if "config.json" in there else ():
            if name in there:
                self._keep(name, self._get(name, there[name]))
        if identity is not None:
            self._keep(f"{PARTIAL}/{IDENTITY}", identity)
        for name, info in begun.items():
            if name.endswith(".jsonl") and (shard := name.removesuffix(".jsonl")) in there:
                self.sent[shard] = int(there[shard]["size"]), self._get(f"{PARTIAL}/{name}", info)

    def _keep(self, name: str, data: bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / name, data)

    def _get(self, name: str, info: Mapping[str, Any]) -> bytes:
        size = int(info["size"])
        return read_range(join(self.url, name), 0, size, size)

    def begin(self) -> None:
        """Tell other runs what is being made."""
        put(self.folder / PARTIAL / IDENTITY, join(self.url, f"{PARTIAL}/{IDENTITY}"))

    def send(self, name: str) -> None:
        """A finished small file."""
        put(self.folder / name, join(self.url, name))

    def wait(self) -> None:
        """Wait while there is no room for another finished shard here."""
        with self._room:
            pass

    def send_shard(self, path: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
        """A finished shard with the records of all its units. The file stays."""
        with self._room:
            size = path.stat().st_size
            put(path, join(self.url, path.name))
            rows = self.folder / PARTIAL / f"{path.name}.jsonl"
            write_whole(rows, as_rows(records))
            put(rows, join(self.url, f"{PARTIAL}/{rows.name}"))
            self.sent[path.name] = size, rows.read_bytes()

    def read(self, name: str, start: int, nbytes: int) -> bytes:
        """Bytes of a shard that is there."""
        return read_range(join(self.url, name), start, nbytes, self.sent[name][0])

    def finish(self) -> None:
        """All is there: remove what an unfinished run needs."""
        remove(join(self.url, PARTIAL))
        shutil.rmtree(self.folder, ignore_errors=True)
