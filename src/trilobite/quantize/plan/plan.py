"""Recipe + checkpoint -> Plan: one line for every tensor, with its bytes, before anything is quantized."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trilobite.checkpoint.layers import side_of
from trilobite.checkpoint.layout import StoredTensor
from trilobite.checkpoint.packed import report_text
from trilobite.checkpoint.roles import Matrix, View, read_matrix, text_config
from trilobite.checkpoint.source import DTYPES, Source
from trilobite.errors import ArchitectureError, CheckpointError, RecipeError, ShapeError
from trilobite.formats.affine import packed_shape
from trilobite.formats.bitpack import BLOCK
from trilobite.formats.incoherence import fitting_transform
from trilobite.formats.lattice import DIM
from trilobite.formats.padding import filled_up
from trilobite.formats.weight import PackedWeight, dequantize, factor_shape, stored_shapes
from trilobite.quantize.plan import ranks
from trilobite.quantize.plan.statistics import kurtosis
from trilobite.quantize.watcher import SILENT, Watcher
from trilobite.recipe import (
    BODY_ROLES,
    CALIBRATED_METHODS,
    COMPENSATORS,
    AnyFormat,
    Format,
    LatticeFormat,
    Recipe,
    Role,
    parse_policies,
    parse_rank,
    resolve_auto_rank,
)

GROUPS = (128, 64, 32)
PACKABLE = (*BODY_ROLES, Role.HEAD)
"""Roles whose matrices can run packed."""
_EXPERTS = re.compile(r"(.*\.experts)\.(?:expert_)?\d+\.")
"""Name of a matrix of an expert, after that of the module that holds all of a layer."""


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """What happens to one tensor. format None = kept, and `note` says why; rank 0 = no compensator.

    tuned: the vectors of a lattice format are stored as fp16, for fine-tuning
    columns: how the scales of its columns are found, which what writes its input takes over; "" without
    importance: where that of its columns comes from, by which `search` weighs their errors; "" without
    """

    matrix: Matrix
    format: AnyFormat | None
    method: str = ""
    rank: int = 0
    note: str = ""
    tuned: bool = False
    columns: str = ""
    importance: str = ""
    stored: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data on disk."""
        return sum(t.nbytes for t in self.stored)

    @property
    def packed_shape(self) -> tuple[int, int]:
        """[N, K] of a quantized matrix with what fills up its last blocks (formats/padding.py)."""
        assert self.format is not None
        n, k = self.matrix.shape
        return filled_up((n, k), self.format, expert=self.matrix.role is Role.EXPERT)

    @property
    def calibrated(self) -> bool:
        """Whether its method works on the Hessian of its inputs, or on the diagonal."""
        return self.format is not None and (self.method in CALIBRATED_METHODS or bool(self.importance))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe resolved for one checkpoint. rank: the policy after `auto:` was replaced."""

    recipe: Recipe
    rank: str
    lines: tuple[PlanLine, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; equal plans give equal bytes."""
        return {
            "recipe": self.recipe.to_dict(),
            "rank": self.rank,
            "tensors": [describe(line, self.recipe.compensator) for line in self.lines],
        }


def packed_weight(
    line: PlanLine, stored: Sequence[Tensor], device: torch.device, exponent: int = 0
) -> PackedWeight:
    """The packed weight of a quantized line. stored: its tensors, in its order    exponent: as its record has it."""
    parts = {
        t.name.removeprefix(f"{line.matrix.name}_"): data.to(device)
        for t, data in zip(line.stored, stored, strict=True)
    }
    return PackedWeight(shape=line.packed_shape, exponent=exponent, **parts)


def decoded(line: PlanLine, stored: Sequence[Tensor], device: torch.device, exponent: int = 0) -> Tensor:
    """What a quantized line stands for: [N, K] fp32, without what filled it up."""
    n, k = line.matrix.shape
    return dequantize(packed_weight(line, stored, device, exponent))[:n, :k]


def describe(line: PlanLine, compensator: str) -> dict[str, Any]:
    """One plan line as plain data."""
    m = line.matrix
    row: dict[str, Any] = {"name": m.name, "role": m.role.value, "shape": list(m.shape), "bytes": line.nbytes}
    if m.layer is not None:
        row["layer"] = m.layer
    if stack := side_of(m.name):
        row["stack"] = stack
    if m.expert is not None:
        row["expert"] = m.expert
    if line.format is None:
        row["kept"] = line.note
    else:
        row |= {"format": str(line.format), "method": line.method, "rank": line.rank}
        if line.rank:
            row["compensator"] = compensator
        if line.columns:
            row["columns"] = line.columns
        if line.importance:
            row["importance"] = line.importance
        if line.note:
            row["note"] = line.note
    return row


def make_plan(
    source: Source,
    matrices: Sequence[Matrix],
    recipe: Recipe,
    *,
    frequency: Mapping[str, Sequence[int]] | None = None,
    known_ranks: Mapping[str, int] | None = None,
    tuned: bool = False,
    unfit: Mapping[str, str] | None = None,
    watcher: Watcher = SILENT,
) -> Plan:
    """Resolve a recipe for a checkpoint.

    Reads weights only for a kurtosis policy. frequency: tokens per layer and expert, for a frequency policy.
    known_ranks: ranks by matrix that an earlier call for the same checkpoint and recipe found, to be taken as they are.
    tuned: leave room for tuned vectors of lattice formats
    unfit: why matrices cannot run packed, by name: they stay in 16 bit, unless they are experts
    Raises RecipeError, ArchitectureError and ShapeError when the recipe does not fit, CheckpointError for an impossible
    hidden size; nothing has been written then.
    """
    _check_roles(recipe)
    hidden = _hidden_size(source)
    experts = 1 + max((m.expert for m in matrices if m.expert is not None), default=-1)
    shared = any(m.role is Role.SHARED_EXPERT for m in matrices)
    rank = resolve_auto_rank(recipe.rank, experts=experts, shared=shared)
    lines = [_line(source, m, recipe, (unfit or {}).get(m.name, ""), tuned=tuned) for m in matrices]
    _check_experts(lines)
    lines = _whole_tensors(source, lines)
    if not any(line.format for line in lines):
        raise RecipeError(
            f"recipe {recipe.name}: no tensor of this checkpoint matches a rule; nothing to compress"
        )
    policies = parse_policies(rank, hidden)
    wanted = known_ranks
    if wanted is None:
        wanted = _ranks(source, lines, recipe, policies, hidden, frequency, watcher)
    lines = [_with_rank(line, wanted.get(line.matrix.name, 0), recipe) for line in lines]
    return Plan(recipe=recipe, rank=rank, lines=tuple(lines))


def _check_roles(recipe: Recipe) -> None:
    """Raise RecipeError when a rule gives a format to a role that cannot run packed."""
    for rule in recipe.rules:
        for role in rule.roles if rule.format else ():
            if role not in PACKABLE:
                raise RecipeError(
                    f"recipe {recipe.name}: a rule gives {role.value} the format {rule.format}; it stays in 16 bit: "
                    "drop the role from the rule"
                )


def _hidden_size(source: Source) -> int:
    """0 where config.json names none."""
    config = text_config(source)
    hidden = config.get("hidden_size") or config.get("d_model") or 0
    if type(hidden) is not int or hidden < 0:
        raise CheckpointError(
            f"{source.path / 'config.json'}: hidden_size {hidden!r}; expected a positive integer: copy it again"
        )
    return hidden


def _check_experts(lines: Sequence[PlanLine]) -> None:
    """Raise RecipeError when some experts of a module are quantized and others kept, or they are of other sizes: they
    run in one call.
    """
    total: Counter[str] = Counter()
    packed: Counter[str] = Counter()
    kinds: dict[str, set[bool]] = {}
    for line in lines:
        m = line.matrix
        if m.role is Role.EXPERT and m.quantizable and (module := _EXPERTS.match(m.name)):
            total[module[1]] += 1
            packed[module[1]] += line.format is not None
            if line.format is not None and any(side % BLOCK for side in m.shape):
                kinds.setdefault(module[1], set()).add(isinstance(line.format, LatticeFormat))
    for name, count in packed.items():
        if 0 < count < total[name]:
            raise RecipeError(
                f"{name}: the recipe quantizes {count} of its {total[name]} matrices; expected all or none: give its "
                "experts a format by roles and layers, or pass --keep expert"
            )
    for name, kind in kinds.items():
        if len(kind) > 1:
            raise RecipeError(
                f"{name}: sides are no multiple of {BLOCK}, and some of its matrices are to be in a lattice format and "
                "others not; give all its experts formats of one kind"
            )


def _line(source: Source, m: Matrix, recipe: Recipe, unfit: str, *, tuned: bool) -> PlanLine:
    rule = recipe.rule_for(m.role, m.name, m.layer)
    if not m.quantizable:
        return _kept(source, m, "not a matrix" if len(m.shape) != 2 else f"{m.role.value} stays in 16 bit")
    if rule is None or (rule.format and m.role not in PACKABLE):
        return _kept(source, m, f"{m.role.value} stays in 16 bit")
    if rule.format is None:
        return _kept(source, m, "kept by the recipe")
    if m.role is Role.HEAD and text_config(source).get("tie_word_embeddings"):
        return _kept(source, m, "tied to the embedding")
    if unfit and m.role is Role.EXPERT:
        raise ArchitectureError(f"{m.name}: {unfit}")
    if unfit:
        return _kept(source, m, unfit)
    n, k = m.shape
    fmt, note = _fitting(rule.format, n, k, expert=m.role is Role.EXPERT)
    if fmt is None:
        if m.role is Role.EXPERT:
            raise ShapeError(f"{m.name}: {note}; pass --keep expert to keep the experts in 16 bit")
        return _kept(source, m, note)
    tuned = tuned and isinstance(fmt, LatticeFormat)
    n, k = filled_up((n, k), fmt, expert=m.role is Role.EXPERT)
    stored = tuple(
        StoredTensor(name=f"{m.name}_{suffix}", dtype="U8", shape=shape)
        for suffix, shape in stored_shapes(fmt, n, k, tuned=tuned).items()
    )
    scaled = source.rescaling is not None and m.name in source.rescaling.columns
    return PlanLine(
        matrix=m,
        format=fmt,
        method=rule.method,
        note=note,
        tuned=tuned,
        columns=recipe.columns if scaled else "",
        importance=recipe.importance if _weighs(fmt, rule.method, recipe) else "",
        stored=stored,
    )


def _weighs(fmt: AnyFormat, method: str, recipe: Recipe) -> bool:
    """Whether importance finds other codes. At 8 bits it would change nothing that could be seen."""
    return recipe.importance != "none" and method == "search" and isinstance(fmt, Format) and fmt.bits < 8


def _whole_tensors(source: Source, lines: Sequence[PlanLine]) -> list[PlanLine]:
    """Kept experts of a fused tensor stay the one tensor that they are, because transformers expects it so.

    Raises RecipeError when the recipe keeps only some of them, or keeps experts that are not stored in 16 bit.
    """
    fused = [line for line in lines if line.matrix.view.expert is not None]
    kept = {line.matrix.source for line in fused if line.format is None}
    for line in fused:
        m = line.matrix
        if m.source in kept and (line.format is not None or m.view.scale):
            why = "holds all experts of a layer" if line.format else "is not in 16 bit"
            raise RecipeError(
                f"{m.source}: {why} and cannot be kept in part or as it is; give its experts a format"
            )
    result, seen = [], set()
    for line in lines:
        m = line.matrix
        if m.source not in kept or m.view.expert is None:
            result.append(line)
        elif m.source not in seen:
            seen.add(m.source)
            whole = replace(m, name=m.source, expert=None, shape=source.tensors[m.source].shape, view=View())
            result.append(_kept(source, whole, line.note))
    return result


def _fitting(fmt: AnyFormat, n: int, k: int, *, expert: bool) -> tuple[AnyFormat | None, str]:
    """The format itself, or with the largest smaller group that divides K, or the transform that there is.

    None when there is none. Sides are filled up to whole blocks first.
    """
    if isinstance(fmt, LatticeFormat):
        if k % DIM:
            return None, f"K={k} is not a multiple of {DIM}, the length of a lattice codeword"
        transform = fitting_transform(fmt.transform, n, k)
        note = "" if transform == fmt.transform else f"fourier: no Hadamard matrix fits [{n}, {k}]"
        return replace(fmt, transform=transform), note
    rows, columns = filled_up((n, k), fmt, expert=expert)
    notes = [f"[{n}, {k}] filled up to [{rows}, {columns}]"] if (rows, columns) != (n, k) else []
    if rows != n and fmt.double_quant:
        fmt = replace(fmt, double_quant=False)
        notes.append("scales in fp16")
    if columns % fmt.group_size(columns):
        smaller = next(g for g in GROUPS if g < fmt.group and columns % g == 0)
        notes.append(f"group {smaller}: K={columns} is not a multiple of {fmt.group}")
        fmt = replace(fmt, group=smaller)
    if columns != k and not expert and torch.Size(packed_shape(fmt, rows, columns)).numel() >= 2 * n * k:
        return None, f"K={k} is not a multiple of {BLOCK}; filled up it would be no smaller than in 16 bit"
    return fmt, "; ".join(notes)


def _kept(source: Source, m: Matrix, reason: str) -> PlanLine:
    dtype = source.tensors[m.source].dtype
    wide = dtype in ("F32", "F64") and m.role in (*BODY_ROLES, Role.EMBEDDING, Role.HEAD) and len(m.shape) > 1
    if wide or (DTYPES[dtype].itemsize == 1 and m.quantizable):
        dtype, reason = "BF16", f"{reason}; {dtype} to BF16"
    if m.view.expert is None:  # names of packed matrices may be others
        m = replace(m, name=m.source)
    stored = StoredTensor(name=m.name, dtype=dtype, shape=m.shape)
    return PlanLine(matrix=m, format=None, note=reason, stored=(stored,))


def _ranks(
    source: Source,
    lines: Sequence[PlanLine],
    recipe: Recipe,
    policies: Sequence[tuple[str, int]],
    hidden: int,
    frequency: Mapping[str, Sequence[int]] | None,
    watcher: Watcher,
) -> dict[str, int]:
    """Rank by name for every quantized body matrix: the recipe's policies, then what single rules override."""
    body = [line for line in lines if line.format and line.matrix.role in BODY_ROLES]
    kinds = {kind for kind, _ in policies}
    usage = ranks.relative_usage(frequency or {})
    candidates = []
    for i, line in enumerate(body):
        m = line.matrix
        assert line.format is not None
        skewed = "kurtosis" in kinds and not ("dense" in kinds and m.role is not Role.EXPERT)
        if skewed:
            watcher.progress("kurtosis", i, len(body))
        candidates.append(
            ranks.Candidate(
                name=m.name,
                role=m.role,
                cap=ranks.rank_cap(line.format, recipe.compensator, *line.packed_shape, capped=recipe.cap),
                kurtosis=kurtosis(read_matrix(source, m)) if skewed else 0.0,
                frequency=usage.get((m.layer_key or "", m.expert or 0)),
            )
        )
    wanted = ranks.assign_ranks(candidates, policies)
    for c, line in zip(candidates, body, strict=True):
        rule = recipe.rule_for(line.matrix.role, line.matrix.name, line.matrix.layer)
        if rule and rule.rank is not None:
            wanted[c.name] = min(parse_rank(rule.rank, hidden), c.cap)
    return wanted


def _with_rank(line: PlanLine, rank: int, recipe: Recipe) -> PlanLine:
    if rank == 0:
        return line
    name = line.matrix.name
    dtype = "F16" if COMPENSATORS[recipe.compensator] == 16 else "U8"
    factors = [
        StoredTensor(
            name=f"{name}_{suffix}", dtype=dtype, shape=factor_shape(recipe.compensator, rank, length)
        )
        for suffix, length in zip(("lra", "lrb"), line.packed_shape, strict=True)
    ]
    return replace(line, rank=rank, stored=(*line.stored, *factors))


def plan_json(plan: Plan, planner: Mapping[str, Any] | None = None) -> str:
    """The plan as JSON. planner: the account of how its recipe was found."""
    data = plan.to_dict()
    if planner is not None:
        data["planner"] = planner
    return report_text(data, data.pop("tensors"))
