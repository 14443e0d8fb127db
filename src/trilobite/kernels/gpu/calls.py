"""What the calls of the kernels share: rows and how they meet experts, matrices, splits, and the launch of `product`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilobite.formats.weight import LR_GROUP
from trilobite.kernels.gpu.device.product import product
from trilobite.kernels.gpu.device.tile import BLOCK_R, DENSE
from trilobite.kernels.gpu.launch import launch, processors, scratch
from trilobite.kernels.gpu.layout.pack import GROUPS
from trilobite.kernels.gpu.layout.words import CHUNK
from trilobite.kernels.gpu.tuning import Tile, fitted, suited, tile_for
from trilobite.kernels.layer import Coding

MOST_SPLITS = 16
WARPS = 16
"""Warps that every processor shall have, while there is something to split."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows of activations meet which expert: the arguments of `tile_slots`.

    mode: DENSE, SLOTS or SORTED    slots: S    experts: E    tiles: programs along the slots, at most    block_m: slots
    a tile    index [T, A] with S = T A slots, order [S], ends [E], tile_ends [E]: as `route` describes them, None where
    the mode has none
    """

    mode: int
    slots: int
    experts: int
    tiles: int
    block_m: int
    index: Tensor | None = None
    order: Tensor | None = None
    ends: Tensor | None = None
    tile_ends: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The packed matrices of a call: slab and table of a `Pack`, `projections` matrices an expert."""

    slab: Tensor
    table: Tensor
    projections: int


@dataclass(frozen=True, kw_only=True)
class Low:
    """z = V x of compensators: [projections, splits, S, rank] fp32; rank 0: there are none."""

    z: Tensor | None = None
    splits: int = 1
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rows of activations [rows, K] contiguous; slot s reads row s // divisor. tokens: for messages."""

    x: Tensor
    divisor: int
    tokens: int


def step_of(*codings: Coding) -> int:
    """Columns of a chunk that share one scale in all of these matrices."""
    return min(c.group if c.group in GROUPS else CHUNK for c in codings if c.bits)


def rounds_of(k: int, tile: Tile) -> int:
    """Steps of the loop over K columns: `tile.chunks` chunks each."""
    return -(-k // (CHUNK * tile.chunks))


def split_count(tile: Tile, programs: int, rounds: int, device: torch.device) -> int:
    """Ranges of K: as the tile says, or the power of two that gives every processor enough warps to hide memory."""
    most = min(MOST_SPLITS, max(1, rounds // 2))
    wanted = tile.splits or -(-WARPS * processors(device) // (programs * tile.warps))
    splits = 1
    while 2 * splits <= most and splits < wanted:
        splits *= 2
    return splits


Arguments = dict[str, object]


def slot_arguments(rows: Rows, m: Matrices) -> tuple[Arguments, Arguments]:
    """Arguments and constants that all kernels over tiles of slots share."""
    arguments: Arguments = {"p_slab": m.slab, "p_table": m.table, "S": rows.slots, "E": rows.experts}
    parts = {"p_index": rows.index, "p_order": rows.order, "p_ends": rows.ends, "p_tiles": rows.tile_ends}
    arguments |= {name: m.table if part is None else part for name, part in parts.items()}
    constants: Arguments = {
        "MODE": rows.mode,
        "BLOCK_M": rows.block_m,
        "EP": max(2, 1 << (rows.experts - 1).bit_length()),
    }
    return arguments, constants


def row_arguments(rows: Rows, m: Matrices, inputs: Inputs, tile: Tile) -> tuple[Arguments, Arguments]:
    """The same, the activations, and how a tile multiplies them."""
    arguments, constants = slot_arguments(rows, m)
    k = inputs.x.shape[1]
    arguments |= {"p_x": inputs.x, "DIVISOR": inputs.divisor, "K": k}
    constants |= {
        "FORM": tile.form,
        "KS": tile.chunks,
        "BLOCK_N": tile.block_n,
        "EVEN_K": k % (CHUNK * tile.chunks) == 0,
        "STAGES": tile.stages,
    }
    return arguments, constants


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `product` shall multiply by: a projection of class `class_id`, N rows, or its compensator factor V.

    class_id: -1 = there is but one class, and nothing to compare
    """

    coding: Coding
    n: int
    projection: int = 0
    count: int = 1
    class_id: int = -1
    ranked: bool = False


def run_product(
    rows: Rows,
    m: Matrices,
    inputs: Inputs,
    job: Job,
    tile: Tile,
    low: Low,
    out: Tensor,
    bias: Tensor | None,
    *,
    behind: bool,
) -> None:
    """Launch `product`. behind: as `launch` takes it: rows are older than the launch before this one.

    out: [job.count, splits, S, N], fp32 or the result's type; its shape says how many splits
    """
    c = job.coding
    step = step_of(c)
    tile = suited(tile, c.bits, step, c.rank_bits)
    arguments, constants = row_arguments(rows, m, inputs, tile)
    arguments |= {
        "p_bias": m.table if bias is None else bias,
        "p_z": m.table if low.z is None else low.z,
        "p_out": out,
        "N": job.n,
        "R_MAX": low.rank,
        "PROJECTIONS": m.projections,
        "PROJECTION": job.projection,
    }
    constants |= {
        "CLASS_ID": job.class_id,
        "RANKED": job.ranked,
        "BITS": c.bits,
        "GROUP": c.group,
        "SCALES": c.scales,
        "RANK_BITS": c.rank_bits if low.rank else 0,
        "STEP": step,
        "SPLITS": out.shape[1],
        "Z_SPLITS": low.splits,
        "BIAS": bias is not None,
    }
    grid = (rows.tiles, -(-job.n // tile.block_n), out.shape[1] * job.count)
    launch(product, grid, arguments, constants, warps=tile.warps, registers=tile.registers, behind=behind)


def factor_coding(rank_bits: int) -> Coding:
    """A compensator factor as a matrix: symmetric in groups of 64, or plain fp16."""
    return Coding(
        bits=rank_bits, group=LR_GROUP if rank_bits < 16 else 0, symmetric=True, rank_bits=0, rank=0
    )


def low_rank(
    rows: Rows,
    m: Matrices,
    inputs: Inputs,
    codings: Sequence[Coding],
    first: int,
    class_id: int,
    *,
    behind: bool = False,
) -> Low:
    """z = V x for the compensators of neighbouring projections `first`, `first` + 1, … of one class.

    behind: as `run_product` takes it
    returns: z [len(codings), splits, S, largest rank]
    """
    rank = max(c.rank for c in codings)
    if rank == 0:
        return Low()
    each = -(-rows.slots // rows.experts)
    tile = tile_for("rank", max(rows.block_m, each), inputs.x)  # of the rows that a tile has to hold
    if rows.mode == DENSE.value and rows.block_m > tile.block_m:  # V x need not be cut as W x is
        rows = replace(rows, block_m=tile.block_m, tiles=-(-rows.slots // tile.block_m))
    tile = fitted(tile, rows.block_m)
    programs = rows.tiles * -(-rank // tile.block_n) * len(codings)
    splits = split_count(tile, programs, rounds_of(inputs.x.shape[1], tile), inputs.x.device)
    z = scratch((len(codings), splits, rows.slots, rank), torch.float32, inputs.x, inputs.tokens)
    kinds = [c.rank_bits for c in codings]
    together = len(set(kinds)) == 1
    for p, bits in enumerate(kinds[:1] if together else kinds):
        if bits:
            job = Job(
                coding=factor_coding(bits),
                n=rank,
                projection=first + p,
                count=len(codings) if together else 1,
                class_id=class_id,
                ranked=True,
            )
            part = z if together else z[p : p + 1]
            run_product(rows, m, inputs, job, tile, Low(), part, None, behind=behind)
    return Low(z=z, splits=splits, rank=rank)


def blocks_of(c: Coding, k: int, tile: Tile) -> int:
    """Units of work along K that split K divides: steps of the loop, and blocks of ranks."""
    return rounds_of(k, tile) + -(-c.rank // int(BLOCK_R.value))
