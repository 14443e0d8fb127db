"""What a plan or a finished run comes to: bytes, bits and errors by role, and every byte of the folder."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trilobite.formats.bitpack import ROWS
from trilobite.formats.padding import filled_up
from trilobite.formats.weight import low_rank_bytes, stored_shapes
from trilobite.recipe import LatticeFormat, Role, parse_format

Rows = Sequence[Mapping[str, Any]]
"""Tensors as `quantize.plan.describe` writes them: in `Plan.to_dict()["tensors"]` and in trilobite.json."""
SLOWEST = 5


@dataclass(kw_only=True)
class RoleReport:
    """The tensors of one role. bytes: of their data    formats: tensors by format, kept ones as `16 bit`.

    ranks: of the quantized matrices    errors: relative Frobenius error of each quantized matrix, where known
    """

    role: str
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    ranks: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Bits for every parameter of this role, compensators and scales included."""
        return self.bytes * 8 / max(1, self.parameters)

    @property
    def error(self) -> float | None:
        """Mean error; None where no matrix was quantized, or none yet."""
        return _mean(self.errors)

    @property
    def rank(self) -> float | None:
        """Mean rank of the quantized matrices; None where there is none."""
        return _mean(self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "formats": dict(self.formats),
            "rank": None if self.rank is None else {"mean": self.rank, "max": max(self.ranks)},
            "error": self.error,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """All roles of a plan, or of a packed checkpoint.

    bytes_on_disk: of the whole folder; None for a plan
    kept: (role, reason, tensors, parameters) of what stays in 16 bit
    """

    roles: tuple[RoleReport, ...]
    kept: tuple[tuple[str, str, int, int], ...]
    bytes_on_disk: int | None = None

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(r.parameters for r in self.roles)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(r.bytes for r in self.roles)

    @property
    def bits_per_weight(self) -> float:
        """All bytes * 8 / parameters: of the folder where there is one, else of the tensors alone."""
        total = self.tensor_bytes if self.bytes_on_disk is None else self.bytes_on_disk
        return total * 8 / max(1, self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data: dict[str, Any] = {} if self.bytes_on_disk is None else {"bytes_on_disk": self.bytes_on_disk}
        return data | {
            "tensor_bytes": self.tensor_bytes,
            "parameters": self.parameters,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "roles": {r.role: r.to_dict() for r in self.roles},
            "kept": [
                dict(zip(("role", "reason", "tensors", "parameters"), row, strict=True)) for row in self.kept
            ],
        }


def report(rows: Rows, *, bytes_on_disk: int | None = None) -> Report:
    """Add up described tensors, in the order of roles."""
    roles: dict[str, RoleReport] = {}
    kept: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        numel = torch.Size(row["shape"]).numel()
        role = roles.setdefault(row["role"], RoleReport(role=row["role"]))
        role.tensors += 1
        role.parameters += numel
        role.bytes += row["bytes"]
        role.formats[row.get("format", "16 bit")] += 1
        if "format" in row:
            role.ranks.append(row["rank"])
        else:
            kept.setdefault((row["role"], row["kept"]), []).append(numel)
        if "error" in row:
            role.errors.append(row["error"])
    order: list[str] = [r.value for r in Role if r.value in roles]
    return Report(
        roles=tuple(roles[name] for name in order),
        kept=tuple(
            (role, reason, len(sizes), sum(sizes))
            for (role, reason), sizes in sorted(kept.items(), key=lambda item: order.index(item[0][0]))
        ),
        bytes_on_disk=bytes_on_disk,
    )


def scarce(rows: Rows) -> list[tuple[str, str, int, float]]:
    """Where calibration saw too few tokens: (module, its matrices, tokens, share of the own Hessian), fewest first.

    rows: of trilobite.json    The share is the smallest of the module's matrices.
    """
    by_module: dict[tuple[str, int], list[tuple[str, float]]] = {}
    for row in rows:
        own = float(row.get("own", 0.0 if row.get("tokens") == 0 else 1.0))
        if own < 1:
            where, _, leaf = str(row["name"]).removesuffix(".weight").rpartition(".")
            by_module.setdefault((where, row["tokens"]), []).append((leaf, own))
    table = [
        (where, ", ".join(leaf for leaf, _ in parts), tokens, min(own for _, own in parts))
        for (where, tokens), parts in by_module.items()
    ]
    return sorted(table, key=lambda row: (row[2], row[0]))


def faint(rows: Rows) -> list[str]:
    """Names of the matrices that are stored times a power of two, since fp16 scales do not reach down to their weights.

    rows: of trilobite.json
    """
    return [str(row["name"]) for row in rows if row.get("exponent")]


PARTS = ("codes", "scales", "signs", "compensator", "padding")
"""Where the bytes of a packed matrix go."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """Bits per weight of the quantized matrices of one role and format (QuIP# section F.1).

    bits: by part of PARTS: codes of the weights themselves; scales and offsets, of a lattice format its record;
    sign vectors of the transforms; compensators; codes of the rows and columns that fill the last tile
    """

    role: str
    format: str
    weights: int
    bits: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bits per weight on disk."""
        return sum(self.bits.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        parts = {name: round(value, 6) for name, value in self.bits.items()}
        return {"role": self.role, "format": self.format, "weights": self.weights, **parts}


def account(rows: Rows) -> list[Account]:
    """Where the bits go, by role and format. Raises RecipeError for a format that this release does not know."""
    nbytes: dict[tuple[str, str], Counter[str]] = {}
    weights: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if "format" in row:
            key = row["role"], row["format"]
            weights[key] += torch.Size(row["shape"]).numel()
            nbytes.setdefault(key, Counter()).update(_parts(row))
    order = [r.value for r in Role]
    return [
        Account(
            role=key[0],
            format=key[1],
            weights=weights[key],
            bits={part: 8 * nbytes[key][part] / weights[key] for part in PARTS},
        )
        for key in sorted(nbytes, key=lambda k: (order.index(k[0]), k[1]))
    ]


def _parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of one packed matrix by part; what the formulas leave over are signs, tuned or not."""
    rows, columns = row["shape"]
    fmt = parse_format(row["format"])
    n, k = filled_up((rows, columns), fmt, expert=row["role"] == Role.EXPERT.value)
    shapes = {suffix: torch.Size(shape).numel() for suffix, shape in stored_shapes(fmt, n, k).items()}
    tile_rows = -(-n // ROWS)
    parts = {
        "codes": rows * columns * fmt.bits / 8,
        "padding": (tile_rows * ROWS * k - rows * columns) * fmt.bits / 8,
        "compensator": low_rank_bytes(row["compensator"], row["rank"], n, k) if row["rank"] else 0,
    }
    if isinstance(fmt, LatticeFormat):
        parts["scales"] = shapes["lattice"]
        parts["signs"] = row["bytes"] - sum(parts.values())
    else:
        parts["scales"] = shapes["packed"] + shapes.get("scale", 0) - parts["codes"] - parts["padding"]
    return parts


def slowest(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float]]:
    """The tensors that took longest, with their seconds. records: `compress.Result.records`."""
    seconds = [(name, float(r.get("seconds", 0.0))) for name, r in records.items()]
    return sorted(seconds, key=lambda s: -s[1])[:SLOWEST]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
