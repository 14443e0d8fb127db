"""Layers of packed weights as vLLM's methods keep and run them, and the operators that they are called by.

One operator a layer, by the layer's name: whatever runs below is opaque to `torch.compile`, and the bound calls of the
CPU engine, which know their weights, are used in compiled graphs too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from trilobite.errors import CheckpointError, ShapeError
from trilobite.formats.slicing import Range, columns, covering_columns, covering_rows, even_split, rows
from trilobite.formats.weight import PackedWeight, check
from trilobite.kernels import ops
from trilobite.kernels.expert_table import build
from trilobite.kernels.layer import Codings, ExpertsLayer

Parts = Mapping[str, Tensor]


def whole_weight(parts: Parts, shape: tuple[int, int], name: str) -> PackedWeight:
    """A packed matrix [N, K] of the tensors that came. Raises CheckpointError or ShapeError."""
    if "packed" not in parts:
        raise CheckpointError(f"{name}.weight_packed is missing from the checkpoint; copy it again")
    given: dict[str, Any] = dict(parts)
    w = PackedWeight(shape=shape, **given)
    check(w, name)
    return w


class LinearPiece:
    """Some rows and columns of one packed matrix: x [..., columns] -> [..., rows]."""

    def __init__(self, w: PackedWeight, row: Range, column: Range, device: torch.device) -> None:
        """w: the whole matrix, K filled up    row, column: what is wanted, at first without what fills up."""
        first, last = min(row[0], w.shape[0]), min(row[1], w.shape[0])
        self.rows, self.columns = row[1] - row[0], column[1] - column[0]
        self.call: Callable[[Tensor], Tensor] | None = None
        if first == last:  # of the head's rows a rank may have none but what fills up
            return
        top, bottom = covering_rows(w, first, last)
        left, right = covering_columns(w, *column)
        if (top, bottom) != (0, w.shape[0]):
            w = rows(w, top, bottom)
        if (left, right) != (0, w.shape[1]):
            w = columns(w, left, right)
        self.cut = slice(first - top, last - top)
        self.before, self.after = column[0] - left, right - column[1]
        self.call = _linear_call(w.to(device))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., columns]    returns: [..., rows], zeros for rows that the matrix does not have."""
        if self.call is None:
            return x.new_zeros((*x.shape[:-1], self.rows))
        if self.before or self.after:
            x = pad(x, (self.before, self.after))
        y = self.call(x)[..., self.cut]
        missing = self.rows - y.shape[-1]
        return pad(y, (0, missing)) if missing else y


class Linear:
    """The matrices that one linear layer of vLLM runs together."""

    def __init__(self, pieces: Sequence[LinearPiece]) -> None:
        """pieces: in the order of their rows."""
        self.pieces = pieces

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., columns]    returns: [..., rows]."""
        results = [piece(x) for piece in self.pieces]
        return results[0].contiguous() if len(results) == 1 else torch.cat(results, -1)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a layer that one of several ranks has.

    experts: number of each expert of the model on this rank, -1 for those of others, or None where it has all
    """

    rank: int
    ranks: int
    experts: Tensor | None = None


Experts = Sequence[tuple[PackedWeight | None, PackedWeight, PackedWeight]]
"""(gate, up, down) of every expert."""


class RoutedExperts:
    """The experts of one layer that this rank has, of each its part of the intermediate columns."""

    def __init__(
        self, experts: Experts, hidden: int, activation: str, share: Share, device: torch.device, name: str
    ) -> None:
        """experts: whole matrices    hidden: H without what fills up    Raises ShapeError where they cannot be split."""
        if share.ranks > 1:
            experts = _part(experts, share, name)
        self.hidden, self.packed_hidden = hidden, experts[0][2].shape[0]
        self.map = None
        if share.experts is not None:  # an expert that is elsewhere is none
            local = share.experts.to(device)
            self.map = torch.where(local < 0, len(experts), local)
        ready = [tuple(None if w is None else w.to(device) for w in row) for row in experts]
        self.call = _experts_call(ready, activation)  # type: ignore[arg-type]

    def __call__(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """x: [T, H]    weights, index: [T, A], by numbers of the whole model    returns: [T, H]."""
        if self.map is not None:
            index = self.map[index.long()]
        fill = self.packed_hidden - self.hidden
        y = self.call(pad(x, (0, fill)) if fill else x, index, weights)
        return y[..., : self.hidden].contiguous() if fill else y


def _part(experts: Experts, share: Share, name: str) -> Experts:
    into = [w for row in experts for w in row[:2] if w is not None]
    ranges = even_split(into, [row[2] for row in experts], share.ranks)
    if ranges is None:
        raise ShapeError(
            f"{name}: {experts[0][2].shape[1]} columns of down cannot be split over {share.ranks} ranks between groups: "
            "use --enable-expert-parallel, fewer ranks, or --recipe search3, whose groups are small"
        )
    at = ranges[share.rank]
    return [
        (None if gate is None else rows(gate, *at), rows(up, *at), columns(down, *at))
        for gate, up, down in experts
    ]


def _linear_call(w: PackedWeight) -> Callable[[Tensor], Tensor]:
    if ops.gpu_layout([w]):
        return partial(ops.linear_gpu, w=ops.repack([[w]]))
    return ops.bind_linear(w, None) or partial(ops.linear, w=w)


def _experts_call(experts: Experts, activation: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    hidden, intermediate = experts[0][2].shape
    codings: Codings = ()
    if ops.gpu_layout(w for row in experts for w in row if w is not None):
        pack = ops.repack(experts)
        slab, table, codings = pack.slab, pack.table, pack.codings
    else:
        slab, table = build(experts)
    layer = ExpertsLayer(
        slab=slab,
        table=table,
        hidden=hidden,
        intermediate=intermediate,
        activation=activation,
        codings=codings,
    )
    return (None if codings else ops.bind_experts(layer)) or partial(ops.experts, layer=layer)


_lib = torch.library.Library("trilobite", "FRAGMENT")
_lib.define("vllm_linear(Tensor x, str layer, int rows) -> Tensor")
_lib.define("vllm_experts(Tensor x, Tensor weights, Tensor index, str layer) -> Tensor")
_linears: WeakValueDictionary[str, Linear] = WeakValueDictionary()
_experts: WeakValueDictionary[str, RoutedExperts] = WeakValueDictionary()


def keep(name: str, layer: Linear | RoutedExperts) -> str:
    """Let the operators find a layer for as long as it lives; returns the name to call them by."""
    kept: WeakValueDictionary[str, Any] = _linears if isinstance(layer, Linear) else _experts
    while name in kept:  # another model in this process, as the one that drafts for a larger one
        name += "'"
    kept[name] = layer
    return name


def _run_linear(x: Tensor, layer: str, rows: int) -> Tensor:
    return _linears[layer](x)


def _run_experts(x: Tensor, weights: Tensor, index: Tensor, layer: str) -> Tensor:
    return _experts[layer](x, weights, index)


def _fake_linear(x: Tensor, layer: str, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _fake_experts(x: Tensor, weights: Tensor, index: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _name, _run, _fake in (
    ("vllm_linear", _run_linear, _fake_linear),
    ("vllm_experts", _run_experts, _fake_experts),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"trilobite::{_name}", _fake, lib=_lib)
