"""What a run has left, finished or not."""

import hashlib
from pathlib import Path

from trilobite.checkpoint.packed import TIMES


def digests(path: Path) -> dict[str, str]:
    """sha256 of every file, hidden ones too, but for the one that holds clocks."""
    files = (p for p in path.rglob("*") if p.is_file() and p.name != TIMES)
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def journal(dst: Path) -> int:
    """How many tensors an unfinished run has noted as finished."""
    path = dst / ".partial" / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
