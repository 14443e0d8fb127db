"""Runs that are cut off, and what they leave."""

import hashlib
from pathlib import Path

from trilobite.checkpoint.packed import TIMES


class PlugPulled(Exception):
    pass


def digests(path: Path) -> dict[str, str]:
    """sha256 of every file, hidden ones too, but for the one that holds clocks."""
    files = (p for p in path.rglob("*") if p.is_file() and p.name != TIMES)
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def looks_complete(path: Path) -> bool:
    return (path / "config.json").exists()
