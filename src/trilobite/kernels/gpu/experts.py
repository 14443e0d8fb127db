"""`experts` in the GPU layout: routing, gate and up with the activation, down, weighted sum; nothing waits for the host.

Launches for one token: gate and up, down, `combine`; with compensators two more. For more tokens `route` comes first.
Lattice formats take eight where gate and up are coded alike: activations into rotated coordinates, product, and back,
for gate with up and for down, the activation between them, and `combine`; with compensators five more.
Experts of different formats form classes, and each class has launches of its own over the same tiles, in which the
programs of other classes leave at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels.activation import gate_fn, plain_fn
from trilobite.kernels.expert_table import DOWN, GATE, UP, check_routing
from trilobite.kernels.gpu.calls import (
    Inputs,
    Job,
    Low,
    Matrices,
    Rows,
    blocks_of,
    low_rank,
    row_arguments,
    run_product,
    split_count,
    step_of,
)
from trilobite.kernels.gpu.device.gate_up import activate, gate_up
from trilobite.kernels.gpu.device.routing import combine, route
from trilobite.kernels.gpu.device.tile import SLOTS, SORTED
from trilobite.kernels.gpu.launch import (
    aligned,
    check_device,
    check_dtype,
    check_together,
    launch,
    scratch,
)
from trilobite.kernels.gpu.rotated import run_rotated
from trilobite.kernels.gpu.tuning import Tile, fitted, suited, tile_for
from trilobite.kernels.layer import Coding, ExpertsLayer, PackColumn

ACTIVATIONS = (
    "silu",
    "swish",
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_fast",
    "relu",
    "relu2",
    "sigmoid",
    "quick_gelu",
    "tanh",
    "linear",
    "gpt_oss",
)
"""Gate activations of the kernels; torch computes others between two launches."""
MOST_SLOTS = 32768
"""Slots of one pass: bounds intermediate results, and the quadratic part of `route`."""
ROUTE_BLOCK = 128
MOST_UNSPILT = 256
"""Experts up to which `route` compares a whole block of slots with all of them in registers."""
COMBINE_BLOCK = 256


def make_rows(index: Tensor, experts: int, block_m: int) -> Rows:
    """Sort the slots by expert, or leave them where few of them could share one.

    index: [T, A] contiguous    One token's experts are distinct; of few slots on many experts, nearly all are.
    """
    slots = index.numel()
    if index.shape[0] == 1 or 4 * slots <= experts:
        return Rows(mode=SLOTS.value, slots=slots, experts=experts, tiles=slots, block_m=block_m, index=index)
    order, ends, tile_ends = (
        torch.empty(size, dtype=torch.int32, device=index.device) for size in (slots, experts, experts)
    )
    arguments = {
        "p_index": index,
        "p_order": order,
        "p_ends": ends,
        "p_tiles": tile_ends,
        "S": slots,
        "E": experts,
    }
    padded = max(2, 1 << (experts - 1).bit_length())
    block = min(ROUTE_BLOCK, max(16, ROUTE_BLOCK * MOST_UNSPILT // padded))
    launch(route, (-(-slots // block),), arguments, {"EP": padded, "BLOCK": block, "BLOCK_M": block_m})
    return Rows(
        mode=SORTED.value,
        slots=slots,
        experts=experts,
        tiles=(slots + min(experts, slots) * (block_m - 1)) // block_m,
        block_m=block_m,
        index=index,
        order=order,
        ends=ends,
        tile_ends=tile_ends,
    )


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: ExpertsLayer) -> Tensor:
    """Sum over a token's experts of weight * down(act(gate(x)) * up(x)) in the GPU layout.

    Arguments as in `reference.experts`, but for the layer's slab, table and codings, which are those of a `Pack`.
    returns: [T, H] in x.dtype. Raises ShapeError, ArchitectureError or DeviceError.
    """
    check(x, top_k_index, top_k_weights, layer)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0 or top_k_index.shape[1] == 0:
        return y.zero_()
    launches = Launches(layer)
    for part in passes(top_k_index):
        index = top_k_index[part].contiguous()
        launches.add_up(launches.products(aligned(x[part]), index), index, top_k_weights[part], y[part])
    return y


def passes(index: Tensor) -> list[slice]:
    """The tokens of one pass after the other. index: [T, A]."""
    each = max(1, MOST_SLOTS // index.shape[1])
    return [slice(start, start + each) for start in range(0, index.shape[0], each)]


def check(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: ExpertsLayer) -> None:
    """Raise ShapeError or DeviceError for what does not fit together, or lies where no kernel runs."""
    tensors = layer.slab, layer.table, layer.gate_up_bias, layer.down_bias
    check_together("experts", x, top_k_index, top_k_weights, *tensors)
    check_device(x.device)
    check_dtype(x, "experts: x")
    check_routing(x, top_k_index, top_k_weights)
    _check_layer(layer)


def _check_layer(layer: ExpertsLayer) -> None:
    """Raise ShapeError for a table or biases that do not belong to such a layer."""
    table = layer.table
    if table.dim() != 3 or table.shape[1:] != (3, len(PackColumn)):
        raise ShapeError(
            f"experts: table is {list(table.shape)}, expected [E, 3, {len(PackColumn)}] of the GPU layout"
        )
    gated = has_gates(layer.codings)
    for name, bias, width in (
        ("gate_up_bias", layer.gate_up_bias, (1 + gated) * layer.intermediate),
        ("down_bias", layer.down_bias, layer.hidden),
    ):
        if bias is not None and bias.shape != (table.shape[0], width):
            raise ShapeError(
                f"experts: {name} is {list(bias.shape)}, expected {[int(table.shape[0]), width]}"
            )


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The slots of one class of experts: their activations, codings (gate, up, down), and V x of gate and up."""

    rows: Rows
    inputs: Inputs
    codings: tuple[Coding, ...]
    class_id: int
    low: Low

    @property
    def gated(self) -> bool:
        """Whether these experts have a gate."""
        return self.codings[GATE].bits > 0


class Launches:
    """The launches of a call: one layer, some tokens after others."""

    def __init__(self, layer: ExpertsLayer) -> None:
        """layer: in the GPU layout. Raises ArchitectureError for an activation that nobody knows."""
        self.matrices = Matrices(slab=layer.slab, table=layer.table, projections=3)
        self.gate_up_bias = None if layer.gate_up_bias is None else layer.gate_up_bias.contiguous()
        self.down_bias = None if layer.down_bias is None else layer.down_bias.contiguous()
        self.intermediate, self.activation = layer.intermediate, layer.activation
        codings = layer.codings
        self.classes = dict(enumerate(codings)) if len(codings) > 1 else {-1: codings[0]}
        if self.activation not in ACTIVATIONS:
            gate_fn(self.activation)

    def products(self, x: Tensor, index: Tensor) -> Tensor:
        """What the experts make of x [T, H], in partial sums [1, splits, T A, H] fp32; both arguments contiguous.

        Those of slots without an expert are anything.
        """
        tokens, experts = x.shape[0], self.matrices.table.shape[0]
        each = -(-index.numel() // experts)
        tile = tile_for("gate_up", each, x)
        if any(c.e8p for codings in self.classes.values() for c in codings):
            tile = fitted(tile, tile_for("lattice", each, x).block_m)
        rows = make_rows(index, experts, tile.block_m)
        h = scratch((rows.slots, self.intermediate), x.dtype, x, tokens)
        inputs = Inputs(x=x, divisor=index.shape[1], tokens=tokens)
        for class_id, codings in self.classes.items():
            low = low_rank(rows, self.matrices, inputs, codings[GATE : UP + 1], GATE, class_id)
            group = _Group(rows=rows, inputs=inputs, codings=codings, class_id=class_id, low=low)
            lattice = codings[GATE].e8p or codings[UP].e8p
            if self.activation in ACTIVATIONS and not lattice:
                self._gate_up(group, tile, h)
            else:
                self._gate_up_in_steps(group, tile, h)
        return self._down(rows, Inputs(x=h, divisor=1, tokens=tokens), x.shape[1])

    def add_up(self, parts: Tensor, index: Tensor, weights: Tensor, y: Tensor) -> None:
        """Write y [T, H], a contiguous tensor of any type: the weighted sums of `products`. index: contiguous."""
        tokens, active = index.shape
        arguments = {
            "p_parts": parts,
            "p_index": index,
            "p_weights": weights.contiguous(),
            "p_bias": index if self.down_bias is None else self.down_bias,
            "p_y": y,
            "S": index.numel(),
            "E": self.matrices.table.shape[0],
            "A": active,
            "N": y.shape[1],
        }
        constants = {
            "SPLITS": parts.shape[1],
            "BIAS": self.down_bias is not None,
            "BLOCK": COMBINE_BLOCK,
        }
        launch(combine, (tokens, -(-y.shape[1] // COMBINE_BLOCK)), arguments, constants, behind=True)

    def _gate_up(self, g: _Group, tile: Tile, h: Tensor) -> None:
        gate, up, _ = g.codings
        step = step_of(gate, up)
        tile = suited(tile, max(gate.bits, up.bits), step, max(gate.rank_bits, up.rank_bits))
        arguments, constants = row_arguments(g.rows, self.matrices, g.inputs, tile)
        bias = self.gate_up_bias
        arguments |= {
            "p_bias": self.matrices.table if bias is None else bias,
            "p_z": self.matrices.table if g.low.z is None else g.low.z,
            "p_h": h,
            "N": self.intermediate,
            "R_MAX": g.low.rank,
        }
        constants |= {
            "CLASS_ID": g.class_id,
            "GATED": g.gated,
            "ACTIVATION": self.activation,
            "BIAS": bias is not None,
            "GATE_BITS": gate.bits,
            "GATE_GROUP": gate.group,
            "GATE_SCALES": gate.scales,
            "GATE_RANK_BITS": gate.rank_bits,
            "BITS": up.bits,
            "GROUP": up.group,
            "SCALES": up.scales,
            "RANK_BITS": up.rank_bits,
            "STEP": step,
            "Z_SPLITS": g.low.splits,
        }
        grid = (g.rows.tiles, -(-self.intermediate // tile.block_n))
        behind = g.low.z is not None  # else sorted slots are what the launch before it makes
        launch(gate_up, grid, arguments, constants, warps=tile.warps, registers=tile.registers, behind=behind)

    def _gate_up_in_steps(self, g: _Group, tile: Tile, h: Tensor) -> None:
        """Both products to memory, then the activation: for lattice formats, and for activations that no kernel has."""
        size = (2, g.rows.slots, self.intermediate)
        both = scratch(size, torch.float32, g.inputs.x, g.inputs.tokens)
        if self.activation not in ACTIVATIONS:
            both.zero_()  # slots of other classes are computed too, and thrown away
        for first, count in _together(g.codings[: UP + 1]):
            part = slice(first, first + count)
            low = g.low if g.low.z is None else replace(g.low, z=g.low.z[part])
            job = Job(
                coding=g.codings[first],
                n=self.intermediate,
                projection=first,
                count=count,
                class_id=g.class_id,
            )
            multiply(g.rows, self.matrices, g.inputs, job, tile, low, both[part], behind=False)
        if self.activation in ACTIVATIONS:
            self._activate(g, both, h)
        else:
            self._activate_by_torch(g, both, h)

    def _activate(self, g: _Group, both: Tensor, h: Tensor) -> None:
        bias = self.gate_up_bias
        arguments = {
            "p_both": both,
            "p_table": self.matrices.table,
            "p_bias": both if bias is None else bias,
            "p_index": g.rows.index,
            "p_h": h,
            "S": g.rows.slots,
            "E": g.rows.experts,
            "N": self.intermediate,
        }
        constants = {
            "CLASS_ID": g.class_id,
            "GATED": g.gated,
            "ACTIVATION": self.activation,
            "BIAS": bias is not None,
            "BLOCK": COMBINE_BLOCK,
        }
        launch(activate, (g.rows.slots, -(-self.intermediate // COMBINE_BLOCK)), arguments, constants)

    def _activate_by_torch(self, g: _Group, both: Tensor, h: Tensor) -> None:
        gate, up = both
        assert g.rows.index is not None
        known = g.rows.index.flatten().clamp(0, g.rows.experts - 1)
        if self.gate_up_bias is not None:
            bias = self.gate_up_bias[known].float()
            gate, up = gate + bias[:, : self.intermediate], up + bias[:, -self.intermediate :]
        made = gate_fn(self.activation)(gate, up) if g.gated else plain_fn(self.activation)(up)
        if g.class_id >= 0:
            made = torch.where(
                (self.matrices.table[known, UP, PackColumn.CLASS] == g.class_id)[:, None], made, h
            )
        h.copy_(made)

    def _down(self, rows: Rows, inputs: Inputs, n: int) -> Tensor:
        """Partial sums of down(h) [1, splits, S, n] fp32."""
        each = -(-rows.slots // rows.experts)
        device = inputs.x.device
        tile = fitted(tile_for("down", each, inputs.x), rows.block_m)
        k = inputs.x.shape[1]
        lows = [
            low_rank(rows, self.matrices, inputs, codings[DOWN:], DOWN, class_id, behind=True)
            for class_id, codings in self.classes.items()
        ]
        blocks = min(blocks_of(codings[DOWN], k, tile) for codings in self.classes.values())
        splits = split_count(tile, rows.tiles * -(-n // tile.block_n), blocks, device)
        if any(codings[DOWN].e8p for codings in self.classes.values()):
            splits = 1  # sums are rotated back whole
        parts = scratch((1, splits, rows.slots, n), torch.float32, inputs.x, inputs.tokens)
        for low, (class_id, codings) in zip(lows, self.classes.items(), strict=True):
            job = Job(coding=codings[DOWN], n=n, projection=DOWN, class_id=class_id)
            if splits == 1:
                multiply(rows, self.matrices, inputs, job, tile, low, parts[:, 0], behind=True)
            else:
                run_product(rows, self.matrices, inputs, job, tile, low, parts, None, behind=True)
        return parts


def has_gates(classes: Sequence[Sequence[Coding]]) -> bool:
    """Whether the experts of a layer have gates. classes: (gate, up, down)    Raises ShapeError where only some do."""
    gated = {codings[GATE].bits > 0 for codings in classes}
    if len(gated) > 1:
        raise ShapeError("experts: some have a gate and some have none; expected all or none")
    return True in gated


def _together(codings: Sequence[Coding]) -> list[tuple[int, int]]:
    """(first, count) of neighbouring projections that one launch can multiply by; absent ones are left out."""
    if all(c.e8p for c in codings) and len({replace(c, rank=0) for c in codings}) == 1:
        return [(0, len(codings))]
    return [(p, 1) for p, c in enumerate(codings) if c.bits]


def multiply(
    rows: Rows, m: Matrices, inputs: Inputs, job: Job, tile: Tile, low: Low, out: Tensor, *, behind: bool
) -> None:
    """W x whole, in any format. out: [job.count, S, N] fp32    behind: as `run_product` takes it."""
    if job.coding.e8p:
        run_rotated(rows, m, inputs, job, low, out, None)
    else:
        run_product(rows, m, inputs, job, tile, low, out[:, None], None, behind=behind)
