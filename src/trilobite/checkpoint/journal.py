"""What an unfinished run leaves in its hidden folder: what it makes, and which units of it are done."""

import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from trilobite.checkpoint.files import write_whole
from trilobite.errors import DestinationError

PARTIAL = ".partial"
IDENTITY = "identity.json"
JOURNAL = "journal.jsonl"


def check_free(dst: Path) -> None:
    """Refuse what is neither new nor empty nor an unfinished run. Raises DestinationError."""
    if dst.exists() and not dst.is_dir():
        raise DestinationError(f"{dst}: is a file; the destination must be a new folder")
    begun = (dst / PARTIAL / IDENTITY).exists()
    if not begun and dst.exists() and any(p.name != PARTIAL for p in dst.iterdir()):
        raise DestinationError(f"{dst}: is not empty and holds no unfinished run; choose another destination")


def claim(dst: Path, identity: Mapping[str, Any], name: str) -> None:
    """Make the locked DST/.partial ours, or continue it; refuse that of another run.

    name: of the destination, for people    Raises DestinationError.
    """
    check_free(dst)  # again: the run that held the lock may have finished
    record = dst / PARTIAL / IDENTITY
    if record.exists():
        begun = _read_identity(record, name)
        differs = [key for key in identity if begun.get(key) != identity[key]]
        if differs:
            verb = "differ" if differs[1:] else "differs"
            raise DestinationError(
                f"{name}: holds an unfinished run whose {' and '.join(differs)} {verb}; delete it to begin afresh, or "
                "choose another destination"
            )
        return
    write_whole(record, as_json(identity))


def _read_identity(record: Path, name: str) -> dict[str, Any]:
    try:
        identity = json.loads(record.read_bytes())
    except ValueError:
        identity = None
    if not isinstance(identity, dict):
        raise DestinationError(
            f"{record}: damaged, the unfinished run cannot be continued; delete {name} to begin afresh, or choose "
            "another destination"
        )
    return identity


def read_journal(path: Path, known: Set[str]) -> dict[str, dict[str, Any]]:
    """Finished units of earlier runs by name. A torn last line, the mark of a kill, is cut off."""
    if not path.exists():
        return {}
    done, good = read_rows(path.read_bytes(), known)
    os.truncate(path, good)
    return done


def read_rows(data: bytes, known: Set[str]) -> tuple[dict[str, dict[str, Any]], int]:
    """Records of units by name, and the bytes of whole lines that hold them."""
    done: dict[str, dict[str, Any]] = {}
    good = 0
    for line in data.splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(row, dict) or row.get("name") not in known:
            break
        done[row["name"]] = row
        good += len(line)
    return done, good


def as_rows(records: Mapping[str, Mapping[str, Any]]) -> bytes:
    """What `read_rows` reads."""
    return "".join(json.dumps(row) + "\n" for row in records.values()).encode()


def as_json(data: Mapping[str, Any]) -> bytes:
    """A JSON file's bytes."""
    return (json.dumps(data, indent=2) + "\n").encode()
