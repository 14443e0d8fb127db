"""How fast a disk reads, in the requests in which experts stream from it."""

import os
import tempfile
from pathlib import Path
from time import perf_counter

from trilobite.runtime.offload.memory import Arena
from trilobite.runtime.offload.reader import Reader, Stretch

PROBE_BYTES = 128 * 2**20


def measure_disk(folder: Path, nbytes: int = PROBE_BYTES) -> tuple[float, bool]:
    """Write a file, let its pages go, read it with the reader's threads: bytes per second, and whether by O_DIRECT.

    nbytes: a multiple of 4096. Raises OSError where the folder cannot be written to, OffloadError where not read.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".trilobite-") as file:
        file.write(os.urandom(2**20) * (nbytes // 2**20) + bytes(nbytes % 2**20))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path, arena = Path(file.name), Arena(1, nbytes)
        reader = Reader({path: nbytes})
        try:
            started = perf_counter()
            reader.read(Stretch(file=path, offset=0, nbytes=nbytes), arena.view(0), urgent=True).wait()
            return nbytes / (perf_counter() - started), not reader.notes
        finally:
            reader.close()
