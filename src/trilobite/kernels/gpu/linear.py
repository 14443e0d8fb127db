"""`linear` in the GPU layout: checks, splits, and the launches."""

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels.gpu.calls import (
    Inputs,
    Job,
    Matrices,
    Rows,
    blocks_of,
    low_rank,
    run_product,
    split_count,
)
from trilobite.kernels.gpu.device.product import reduce
from trilobite.kernels.gpu.device.tile import DENSE
from trilobite.kernels.gpu.launch import (
    aligned,
    check_device,
    check_dtype,
    check_together,
    launch,
    scratch,
)
from trilobite.kernels.gpu.rotated import run_rotated
from trilobite.kernels.gpu.tuning import tile_for
from trilobite.kernels.layer import Pack


def linear(x: Tensor, w: Pack, bias: Tensor | None) -> Tensor:
    """y = x (dequant(W) + U V)^T + bias in the GPU layout.

    x: [..., K] fp16 | bf16 | fp32    w: one matrix [N, K]    bias: [N] or None
    returns: [..., N] in x.dtype. Raises ShapeError or DeviceError.
    """
    ((n, k),), ((coding,),) = w.shapes, w.codings
    check_together("linear", x, w.slab, w.table, bias)
    check_device(x.device)
    check_dtype(x, "linear: x")
    if bias is not None and bias.shape != (n,):
        raise ShapeError(f"linear: bias is {list(bias.shape)}, expected [{n}]")
    bias = None if bias is None else bias.contiguous()
    s = x.numel() // k if k else 0
    y = x.new_empty((*x.shape[:-1], n))
    if s == 0:
        return y
    tile = tile_for("lattice" if coding.e8p else "linear", s, x)
    inputs = Inputs(x=aligned(x.reshape(s, k)), divisor=1, tokens=s)
    rows = Rows(mode=DENSE.value, slots=s, experts=1, tiles=-(-s // tile.block_m), block_m=tile.block_m)
    m = Matrices(slab=w.slab, table=w.table, projections=1)
    low = low_rank(rows, m, inputs, [coding], 0, -1)
    job = Job(coding=coding, n=n)
    if coding.e8p:
        run_rotated(rows, m, inputs, job, low, y.view(1, s, n), bias)
        return y
    splits = split_count(tile, rows.tiles * -(-n // tile.block_n), blocks_of(coding, k, tile), x.device)
    if splits == 1:
        run_product(rows, m, inputs, job, tile, low, y.view(1, 1, s, n), bias, behind=True)
        return y
    parts = scratch((1, splits, s, n), torch.float32, x, s)
    run_product(rows, m, inputs, job, tile, low, parts, None, behind=True)
    arguments = {"p_parts": parts, "p_bias": w.table if bias is None else bias, "p_y": y, "S": s, "N": n}
    block = 256
    constants = {"SPLITS": splits, "BIAS": bias is not None, "BLOCK": block}
    launch(reduce, (s, -(-n // block)), arguments, constants, behind=True)
    return y
