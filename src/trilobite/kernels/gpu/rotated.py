"""Lattice formats in the GPU layout: rotate the activations, multiply by codewords, rotate the sums back."""

from collections.abc import Iterable
from functools import cache, reduce

import torch
from torch import Tensor

from trilobite.formats.incoherence import factors, hadamard_matrix
from trilobite.formats.weight import PackedWeight
from trilobite.kernels.gpu.calls import (
    Arguments,
    Inputs,
    Job,
    Low,
    Matrices,
    Rows,
    rounds_of,
    slot_arguments,
    split_count,
)
from trilobite.kernels.gpu.device.hadamard import spin, spin_back
from trilobite.kernels.gpu.device.lattice import compensate, lattice_product
from trilobite.kernels.gpu.launch import launch, scratch
from trilobite.kernels.gpu.layout import codewords
from trilobite.kernels.gpu.layout.words import CHUNK
from trilobite.kernels.gpu.tuning import fitted, tile_for

LARGEST_POWER = 64
"""Largest order R of the power of two in H_L x H_R."""
COMPENSATE_BLOCK = 64
FEW_SLOTS = 64
"""Up to so many slots, a transform is cut finely, to fill the GPU."""


@cache
def _orders(n: int) -> tuple[tuple[int, ...], int]:
    """H of order n as H_L x H_R: the orders that make up L, and R, a power of two."""
    orders = factors(n)
    assert orders is not None, "check_format lets no other pass"
    cores = [order for order in orders if order & (order - 1)]
    power = n // torch.Size(cores).numel()
    r = min(power, LARGEST_POWER)
    return (*cores, power // r), r


@cache
def _core(n: int, device: torch.device) -> Tensor:
    """H_L: [L, L] int8 of +-1. Kept for good, as CUDA graphs hold its address."""
    made: Tensor = reduce(torch.kron, [hadamard_matrix(order) for order in _orders(n)[0]])
    return made.to(device)


def upload(weights: Iterable[PackedWeight]) -> None:
    """Put the tables of lattice formats on their GPU, beforehand: within a CUDA graph they would lie in its memory."""
    for w in weights:
        if w.lattice is not None:
            codewords.tables(w.packed.device)
            for side in w.shape:
                _core(side, w.packed.device)


def run_rotated(
    rows: Rows, m: Matrices, inputs: Inputs, job: Job, low: Low, out: Tensor, bias: Tensor | None
) -> None:
    """W x for `job.count` neighbouring projections in a lattice format, compensators included.

    out: [job.count, S, N], fp32 or the result's type; slots of other classes are left as they are
    """
    parts = _products(rows, m, _rotated(rows, m, inputs, job), inputs.tokens, job)
    share = _compensators(rows, m, inputs, job, low)
    grid, arguments, constants = _transform(rows, m, job, job.n)
    arguments |= {"p_parts": parts, "p_out": out}
    arguments |= {"p_low": m.table if share is None else share, "p_bias": m.table if bias is None else bias}
    constants |= {"SPLITS": parts.shape[1], "LOW": share is not None, "BIAS": bias is not None}
    launch(spin_back, grid, arguments, constants, warps=_warps(constants))


def _rotated(rows: Rows, m: Matrices, inputs: Inputs, job: Job) -> Tensor:
    """The activations of every slot in the coordinates of every projection: [job.count, S, K padded to chunks]."""
    k = inputs.x.shape[1]
    width = -(-k // CHUNK) * CHUNK
    x = scratch((job.count, rows.slots, width), inputs.x.dtype, inputs.x, inputs.tokens)
    if width > k:
        x.zero_()
    grid, arguments, constants = _transform(rows, m, job, k)
    arguments |= {"p_x": inputs.x, "p_out": x, "DIVISOR": inputs.divisor, "WIDTH": width}
    launch(spin, grid, arguments, constants, warps=_warps(constants))
    return x


def _products(rows: Rows, m: Matrices, x: Tensor, tokens: int, job: Job) -> Tensor:
    """C x in rotated coordinates, in sums over ranges of columns: [job.count, splits, S, N] fp32."""
    tile = fitted(tile_for("lattice", -(-rows.slots // rows.experts), x), rows.block_m)
    width, blocks = x.shape[2], -(-job.n // tile.block_n)
    splits = split_count(tile, rows.tiles * blocks * job.count, rounds_of(width, tile), x.device)
    parts = scratch((job.count, splits, rows.slots, job.n), torch.float32, x, tokens)
    arguments, constants = slot_arguments(rows, m)
    arguments |= {
        "p_x": x,
        "p_codes": codewords.tables(x.device),
        "p_out": parts,
        "N": job.n,
        "K": width,
        "PROJECTIONS": m.projections,
        "PROJECTION": job.projection,
    }
    constants |= {
        "CLASS_ID": job.class_id,
        "BITS": job.coding.bits,
        "KS": tile.chunks,
        "EVEN_K": width % (CHUNK * tile.chunks) == 0,
        "BLOCK_N": tile.block_n,
        "SPLITS": splits,
        "STAGES": tile.stages,
    }
    grid = (rows.tiles, blocks, splits * job.count)
    launch(lattice_product, grid, arguments, constants, warps=tile.warps, registers=tile.registers)
    return parts


def _compensators(rows: Rows, m: Matrices, inputs: Inputs, job: Job, low: Low) -> Tensor | None:
    """U z of every projection, in plain coordinates: [job.count, S, N] fp32, or None without compensators."""
    if low.z is None or not job.coding.rank_bits:
        return None
    made = scratch((job.count, rows.slots, job.n), torch.float32, inputs.x, inputs.tokens)
    for p in range(job.count):
        arguments, constants = slot_arguments(rows, m)
        arguments |= {
            "p_x": inputs.x,
            "p_z": low.z[p],
            "p_out": made[p],
            "N": job.n,
            "R_MAX": low.rank,
            "PROJECTIONS": m.projections,
            "PROJECTION": job.projection + p,
        }
        constants |= {
            "CLASS_ID": job.class_id,
            "RANK_BITS": job.coding.rank_bits,
            "BLOCK_N": COMPENSATE_BLOCK,
            "Z_SPLITS": low.splits,
        }
        launch(compensate, (rows.tiles, -(-job.n // COMPENSATE_BLOCK)), arguments, constants)
    return made


def _transform(rows: Rows, m: Matrices, job: Job, n: int) -> tuple[tuple[int, ...], Arguments, Arguments]:
    """Grid, arguments and constants that both directions of a transform of order n share."""
    core, r = _core(n, m.slab.device), _orders(n)[1]
    length = core.shape[0]
    block = min(64, max(16, 1 << (length - 1).bit_length()))
    rows_each = 16 if rows.slots <= FEW_SLOTS else block
    constants: Arguments = {
        "CLASS_ID": job.class_id,
        "INDEXED": rows.index is not None,
        "TUNED": job.coding.tuned,
        "R": r,
        "PADDED_R": max(16, r),
        "BLOCK_L": rows_each,
        "BLOCK_J": min(block, 32),
    }
    arguments: Arguments = {
        "p_slab": m.slab,
        "p_table": m.table,
        "p_core": core,
        "p_index": m.table if rows.index is None else rows.index,
        "S": rows.slots,
        "E": rows.experts,
        "N": n,
        "L": length,
        "SCALE": n**-0.5,
        "PROJECTIONS": m.projections,
        "PROJECTION": job.projection,
    }
    return (rows.slots, -(-length // rows_each), job.count), arguments, constants


def _warps(constants: Arguments) -> int:
    """64 x 64 sums in full precision would spill in four warps."""
    return 8 if constants["BLOCK_L"] == 64 else 4
