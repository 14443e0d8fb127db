"""Compare a packed checkpoint with the checksums that were taken when it was written."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trilobite.checkpoint.checksums import CHECKSUMS, checksum, of_tensor
from trilobite.checkpoint.packed import REPORT, read_report, report_text
from trilobite.checkpoint.source import Source, open_source
from trilobite.errors import CheckpointError

DAMAGE = (AttributeError, LookupError, TypeError, ValueError)
"""What reading a report of another form than ours raises."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A tensor or file that was compared. damage: what is wrong with it, empty where nothing is."""

    name: str
    nbytes: int
    damage: str


def verify(source: Source) -> Iterator[Checked]:
    """Read every file and tensor of which trilobite.json holds a checksum.

    What one of them knows and the other lacks is damage, too.
    Raises CheckpointError for a folder without checksums, and for a report that is itself damaged.
    """
    files, tensors = _expected(source.path)
    for name, value in files.items():
        yield _check_file(source.path / name, value)
    for name, value in tensors.items():
        yield _check_tensor(source, name, value)
    for name in source.tensors.keys() - tensors.keys():
        yield Checked(name=name, nbytes=0, damage=f"is not in {REPORT}")


def check_intact(source: Source) -> None:
    """Raise CheckpointError unless all checksums hold."""
    if damaged := [checked for checked in verify(source) if checked.damage]:
        raise CheckpointError(tell(source, damaged))


def check_names(source: Source) -> None:
    """Raise CheckpointError for a tensor that is in trilobite.json and not in the files, by name alone.

    Without its second-level scales a matrix may look like one in another format. Reports without checksums name none.
    """
    _, tensors = _listed(source.path)
    for name in tensors.keys() - source.tensors.keys():
        raise CheckpointError(f"{source}: tensor {name!r} of {REPORT} is missing; copy the folder again")


def tell(source: Source, damaged: Sequence[Checked]) -> str:
    """One line for people."""
    others = f", and so are {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return f"{source}: {damaged[0].name} {damaged[0].damage}{others}; copy the folder again"


def refreshed(report: str, folder: Path) -> str:
    """A report's text with the checksums of the tensors that are in `folder` now, and none of files.

    Raises CheckpointError for a text that is no report.
    """
    source = open_source(str(folder))
    try:
        found = json.loads(report)
        found.pop(CHECKSUMS, None)
        rows: dict[str, Any] = {row["name"]: {**row, CHECKSUMS: {}} for row in found.pop("tensors")}
    except DAMAGE as e:
        raise CheckpointError(f"{REPORT} beside the loaded model: damaged ({e}); copy the file again") from e
    for name in source.tensors:
        owner = name
        while owner and owner not in rows:
            owner = owner.rpartition("_")[0]
        if owner:
            rows[owner][CHECKSUMS][name.removeprefix(owner)] = of_tensor(
                source.tensors[name].dtype, _data(source, name)
            )
    return report_text(found, list(rows.values()))


def _expected(folder: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Checksums by file and by tensor. Raises CheckpointError where there are none."""
    files, tensors = _listed(folder)
    if not tensors:
        raise CheckpointError(
            f"{folder / REPORT}: holds no checksums, it was written before there were any; compress the original again"
        )
    return files, tensors


def _listed(folder: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Checksums by file and by tensor, those that there are."""
    report = read_report(folder)
    try:
        files = dict(report.get(CHECKSUMS, {}))
        rows = {row["name"]: dict(row.get(CHECKSUMS, {})) for row in report["tensors"]}
        tensors = {name + suffix: value for name, row in rows.items() for suffix, value in row.items()}
        if any(Path(name).name != name for name in files):
            raise ValueError(f"{CHECKSUMS} of files elsewhere")
        if not all(isinstance(value, str) for value in (*files.values(), *tensors.values())):
            raise ValueError(f"{CHECKSUMS} that are no strings")
    except DAMAGE as e:
        raise CheckpointError(f"{folder / REPORT}: damaged ({e}); copy the file again") from e
    return files, tensors


def _check_file(path: Path, expected: str) -> Checked:
    try:
        data = path.read_bytes()
    except OSError as e:
        return Checked(name=path.name, nbytes=0, damage=f"cannot be read ({e.strerror})")
    return Checked(name=path.name, nbytes=len(data), damage=_difference(checksum(data), expected))


def _check_tensor(source: Source, name: str, expected: str) -> Checked:
    if name not in source.tensors:
        return Checked(name=name, nbytes=0, damage="is missing")
    data = _data(source, name)
    found = of_tensor(source.tensors[name].dtype, data)
    if " " not in expected:  # written before dtypes were kept
        found = found.rpartition(" ")[2]
    return Checked(name=name, nbytes=len(data), damage=_difference(found, expected))


def _data(source: Source, name: str) -> memoryview:
    tensor = source.read(name)
    return memoryview(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")  # type: ignore[arg-type]


def _difference(found: str, expected: str) -> str:
    return "" if found == expected else f"is not as it was written (checksum {found}, not {expected})"
