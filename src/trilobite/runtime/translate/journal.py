"""A file of translations that outlives interruptions.

FILE holds the translations of the first sentences, in order, and beside it FILE.resume what is done of the next ones: a
line that says what is being made, then one for each sentence. It is deleted when FILE is complete.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trilobite.errors import DestinationError

SUFFIX = ".resume"


class TranslationFile:
    """The file under way. done: sentences in FILE    found: place -> lines, of those in FILE.resume."""

    def __init__(self, path: Path, made_of: Mapping[str, Any], *, sentences: int, each: int) -> None:
        """Continue a file, or begin one. made_of: what must not change meanwhile    each: lines of a sentence.

        Raises DestinationError for a file made of something else, or with too many lines.
        """
        self.path, self.made_of, self.each = path, dict(made_of), each
        if not path.absolute().parent.is_dir():
            raise DestinationError(
                f"{path}: cannot be written, there is no folder {path.parent}; make it first"
            )
        if path.is_dir():
            raise DestinationError(f"{path}: is a folder; name a file")
        self.notes = path.with_name(path.name + SUFFIX)
        self.done = self._whole_sentences()
        if self.done > sentences:
            raise DestinationError(
                f"{path}: holds {self.done} translations, the input has {sentences} lines: it is of something else; "
                "delete it, or choose another file"
            )
        self.found = self._read_notes()
        self.complete = self.done == sentences and path.exists()
        self._file: TextIO | None = None
        self._journal: TextIO | None = None

    def begin(self) -> None:
        """Open both files; what an interruption left of a sentence's lines goes."""
        _keep_lines(self.path, self.done * self.each)
        self._file = self.path.open("a", encoding="utf-8", newline="\n")
        self._journal = self._fresh_journal()
        for place, lines in self.found.items():
            self._note(place, lines)

    def note(self, place: int, lines: Sequence[str]) -> None:
        """A sentence is done, those before it perhaps not."""
        self.found[place] = list(lines)
        self._note(place, lines)

    def advance(self) -> None:
        """Move the sentences that follow on those in FILE over to it."""
        assert self._file is not None
        assert self._journal is not None
        while self.done in self.found:
            self._file.writelines(line + "\n" for line in self.found.pop(self.done))
            self.done += 1
        self._file.flush()
        self._journal.close()
        self._journal = self._fresh_journal()
        for place, lines in self.found.items():
            self._note(place, lines)

    def finish(self) -> None:
        """All are there."""
        for file in (self._file, self._journal):
            if file is not None:
                file.close()
        self.notes.unlink(missing_ok=True)

    def _note(self, place: int, lines: Sequence[str]) -> None:
        assert self._journal is not None
        self._journal.write(json.dumps({"place": place, "lines": list(lines)}) + "\n")
        self._journal.flush()

    def _fresh_journal(self) -> TextIO:
        journal = self.notes.open("w", encoding="utf-8")
        journal.write(json.dumps(self.made_of) + "\n")
        journal.flush()
        return journal

    def _whole_sentences(self) -> int:
        if not self.path.exists():
            return 0
        with self.path.open("rb") as f:
            return sum(line.endswith(b"\n") for line in f) // self.each

    def _read_notes(self) -> dict[int, list[str]]:
        """Raises DestinationError where the file was begun with something else."""
        if not self.notes.exists():
            return {}
        records = []
        for line in self.notes.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:  # the interruption fell into it
                break
        if not records:
            return {}
        begun = records[0]
        changed = [name for name, value in self.made_of.items() if begun.get(name) != value]
        if changed:
            raise DestinationError(
                f"{self.path}: was begun with another {' and '.join(changed)}; delete it and {self.notes.name}, "
                "or choose another file"
            )
        return {r["place"]: r["lines"] for r in records[1:] if r["place"] >= self.done}


def _keep_lines(path: Path, lines: int) -> None:
    """Cut a file behind so many lines."""
    if not path.exists():
        return
    with path.open("rb+") as f:
        for _ in range(lines):
            f.readline()
        f.truncate(f.tell())
