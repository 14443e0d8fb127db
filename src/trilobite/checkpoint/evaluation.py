"""What was measured on a checkpoint, kept beside it: trilobite-eval.json."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trilobite.checkpoint.files import explained, write_whole
from trilobite.errors import CheckpointError, DestinationError, FormatVersionError

EVALUATION = "trilobite-eval.json"
KIND = "trilobite evaluation"
VERSION = 1
WHAT = ("text", "rows", "context", "windows", "reference", "limit", "activations", "tasks")
"""Which measurement an entry is: a new one of the same replaces it."""


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The measurements kept beside a checkpoint, oldest first; none where there is no file.

    Raises CheckpointError for a damaged file, FormatVersionError for a version that this release does not read.
    """
    path = folder / EVALUATION
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: cannot be read ({e}); delete it and measure again") from e
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise CheckpointError(f"{path}: not a file of evaluations; delete it and measure again")
    if document.get("version") != VERSION:
        raise FormatVersionError(
            f"{path}: version {document.get('version')!r}, this release reads {VERSION}; upgrade trilobite"
        )
    found = document.get("measured")
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise CheckpointError(f"{path}: `measured` must be a list of objects; delete it and measure again")
    return found


def save_evaluation(folder: Path, found: Mapping[str, Any]) -> None:
    """Keep a measurement, in place of an older one of the same; the file is whole at any moment.

    found: plain data; numbers that are not finite become null    Raises as `read_evaluations` does, and DestinationError
    """
    document = {"kind": KIND, "version": VERSION, "measured": with_evaluation(folder, found)}
    with explained(folder):
        write_whole(folder / EVALUATION, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def with_evaluation(folder: Path, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measurements beside a checkpoint and a new one, in place of an older one of the same; raises likewise."""
    check_destination(folder)
    entry = _finite(dict(found))
    return [*(old for old in read_evaluations(folder) if _what(old) != _what(entry)), entry]


class Fact(NamedTuple):
    """One number of a measurement. value: None where it is not finite    error: standard error, where known."""

    on: str
    what: str
    value: float | None
    error: float | None = None


_TEXT = {
    "perplexity": "perplexity",
    "reference_perplexity": "perplexity of the original",
    "kl": "KL to the original, nats",
    "top1": "top-1 agreement with the original",
}
_TRANSLATION = {
    "bleu": "BLEU",
    "reference_bleu": "BLEU of the original",
    "chrf": "chrF",
    "reference_chrf": "chrF of the original",
}


def measures(entry: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """On what texts and translations there are numbers, and these. entry: of `read_evaluations`."""
    if "text" in entry:
        yield f"{entry['text']}, {entry.get('windows')} windows of {entry.get('context')} tokens", entry
    found = entry.get("translation")
    if isinstance(found, dict) and isinstance(found.get("files"), list):
        yield f"{' to '.join(map(str, found['files']))}, beams {found.get('beams')}", found


def facts(entry: Mapping[str, Any]) -> Iterator[Fact]:
    """What a measurement says, number by number. entry: of `read_evaluations`; what we would not write is left out."""
    for on, found in measures(entry):
        names = _TEXT if found is entry else _TRANSLATION
        yield from (Fact(on, what, _number(found[key])) for key, what in names.items() if key in found)
    tasks = entry.get("tasks")
    for task, results in tasks.items() if isinstance(tasks, dict) else ():
        for metric, value in results.items() if isinstance(results, dict) else ():
            if metric != "n" and "stderr" not in metric:
                on = f"{task}, {_number(results.get('n')) or 0:.0f} items"
                yield Fact(on, metric, _number(value), _number(results.get(f"{metric}_stderr")))


def _number(value: object) -> float | None:
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def check_destination(folder: Path) -> None:
    """Raise DestinationError unless `folder` is that of a checkpoint."""
    if not (folder / "config.json").is_file():
        raise DestinationError(
            f"{folder}: not a checkpoint's folder; --save keeps what is measured beside the model: give a folder"
        )


def _what(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tasks by their names, translations by their files and beams, all else as it is."""
    tasks, translation = entry.get("tasks"), entry.get("translation")
    made = [translation.get(key) for key in ("files", "beams")] if isinstance(translation, dict) else None
    return *(entry.get(key) for key in WHAT[:-1]), sorted(tasks) if isinstance(tasks, dict) else None, made


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
