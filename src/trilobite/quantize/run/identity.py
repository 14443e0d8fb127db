"""What two runs must have in common for one to continue the other, or to find that nothing is left to do."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import trilobite
from trilobite.checkpoint.journal import IDENTITY, PARTIAL
from trilobite.checkpoint.packed import FORMAT_VERSION, REPORT, PackedWriter
from trilobite.checkpoint.source import Source, open_source
from trilobite.errors import CheckpointError, DestinationError
from trilobite.kernels.cpu import quantize as cpu_quantize
from trilobite.quantize.plan.plan import Plan
from trilobite.recipe import Recipe

RANKS = "ranks.json"


def run_identity(
    source: Source,
    recipe: Recipe,
    device: torch.device,
    *,
    frequency: Mapping[str, Sequence[int]] | None,
    calibration: Mapping[str, Any] | None,
    planner: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that decides about the bytes of a packed checkpoint: its inputs, and the code that rounds them.

    calibration: the identity of one, for recipes that need it    planner: the account of how the recipe was found
    """
    identity: dict[str, Any] = {
        "source": source.fingerprint(),
        "recipe": recipe.to_dict(),
        "frequency": _digest(frequency),
        "version": code_version(device),
    }
    if calibration is not None:
        identity["calibration"] = calibration
    if planner is not None:
        identity["planner"] = planner
    return identity


def code_version(device: torch.device) -> str:
    """The code that rounds, as it runs in this process."""
    kernels = f"kernels {cpu_quantize.tier()}" if device.type == "cpu" else f"torch on {device.type}"
    code = f"trilobite {trilobite.__version__}, format {FORMAT_VERSION} with rows and checksums"
    return f"{code}, torch {torch.__version__}, {kernels}"


def _digest(frequency: Mapping[str, Sequence[int]] | None) -> str:
    if frequency is None:
        return ""
    rows = [[layer, list(counts)] for layer, counts in sorted(frequency.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def finished_ranks(folder: Path, identity: Mapping[str, Any], dst: str) -> dict[str, int]:
    """The ranks of the finished checkpoint at `dst`, a folder or URL. folder: of its report

    Raises DestinationError unless it is what a run of this identity makes, with all its files.
    """
    try:
        report = json.loads((folder / REPORT).read_bytes())
        made = dict(report["identity"])
        ranks = {row["name"]: row["rank"] for row in report["tensors"] if "rank" in row}
    except (OSError, ValueError, KeyError, TypeError):
        made, ranks = {}, {}
    differs = [key for key in identity if made.get(key) != identity[key]]
    if differs:
        raise DestinationError(
            f"{dst}: holds a checkpoint that differs in its {' and '.join(differs)}; choose another destination"
        )
    try:
        open_source(dst, remote=True)
    except CheckpointError as e:
        raise DestinationError(f"{e}, or delete {dst} and run the same command again") from e
    return ranks


def keep_ranks(writer: PackedWriter, plan: Plan) -> None:
    """Leave the ranks of a plan to a later run of the same identity."""
    writer.note(RANKS, json.dumps({line.matrix.name: line.rank for line in plan.lines if line.rank}))


def kept_ranks(dst: Path, identity: Mapping[str, Any]) -> dict[str, int] | None:
    """The ranks that an interrupted run with this identity found: a kurtosis policy need not read all weights again."""
    try:
        begun = json.loads((dst / PARTIAL / IDENTITY).read_bytes())
        ranks = json.loads((dst / PARTIAL / RANKS).read_bytes())
    except (OSError, ValueError):
        return None
    return ranks if begun == identity and isinstance(ranks, dict) else None
