"""The two operators as `torch.library` operators, and the choice of backend: the only importer of the backends.

`torch.ops.trilobite.linear` and `torch.ops.trilobite.experts` have fake implementations, so `torch.compile`
traces through them, and are inference only (no autograd).
"""

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.formats.weight import PackedWeight, check
from trilobite.kernels import cpu, reference
from trilobite.kernels.expert_table import has_lattice
from trilobite.recipe import LatticeFormat

_lib = torch.library.Library("trilobite", "DEF")
_lib.define(
    "linear(Tensor x, Tensor packed, Tensor? scale, Tensor? lra, Tensor? lrb, Tensor? bias, int rows) "
    "-> Tensor"
)
_lib.define(
    "lattice_linear(Tensor x, Tensor packed, Tensor lattice, Tensor signs_in, Tensor signs_out, Tensor? lra, "
    "Tensor? lrb, Tensor? bias, int rows) -> Tensor"
)
_lib.define(
    "experts(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor slab, Tensor table, "
    "Tensor? gate_up_bias, Tensor? down_bias, int intermediate, str activation) -> Tensor"
)


def _linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor | None,
    lra: Tensor | None,
    lrb: Tensor | None,
    bias: Tensor | None,
    rows: int,
) -> Tensor:
    w = PackedWeight(shape=(rows, x.shape[-1]), packed=packed, scale=scale, lra=lra, lrb=lrb)
    check(w)
    return reference.linear(x, w, bias)


def _linear_fake(
    x: Tensor,
    packed: Tensor,
    scale: Tensor | None,
    lra: Tensor | None,
    lrb: Tensor | None,
    bias: Tensor | None,
    rows: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _lattice_linear(
    x: Tensor,
    packed: Tensor,
    lattice: Tensor,
    signs_in: Tensor,
    signs_out: Tensor,
    lra: Tensor | None,
    lrb: Tensor | None,
    bias: Tensor | None,
    rows: int,
) -> Tensor:
    w = PackedWeight(
        shape=(rows, x.shape[-1]),
        packed=packed,
        lattice=lattice,
        signs_in=signs_in,
        signs_out=signs_out,
        lra=lra,
        lrb=lrb,
    )
    check(w)
    fmt = w.format
    assert isinstance(fmt, LatticeFormat)
    if x.is_cpu and cpu.runs(fmt, *w.shape):
        return cpu.lattice_linear(x, w, bias)
    return reference.linear(x, w, bias)


def _lattice_linear_fake(
    x: Tensor,
    packed: Tensor,
    lattice: Tensor,
    signs_in: Tensor,
    signs_out: Tensor,
    lra: Tensor | None,
    lrb: Tensor | None,
    bias: Tensor | None,
    rows: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    slab: Tensor,
    table: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    intermediate: int,
    activation: str,
) -> Tensor:
    if x.dim() != 2 or top_k_index.shape != top_k_weights.shape or top_k_index.shape[:1] != x.shape[:1]:
        raise ShapeError(
            f"experts: x is {list(x.shape)}, top_k_index {list(top_k_index.shape)}, top_k_weights "
            f"{list(top_k_weights.shape)}; expected [T, H], [T, A], [T, A]"
        )
    return reference.experts(
        x, top_k_index, top_k_weights, slab, table, gate_up_bias, down_bias, intermediate, activation
    )


def _experts_fake(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    slab: Tensor,
    table: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    intermediate: int,
    activation: str,
) -> Tensor:
    return torch.empty_like(x)


def _experts_cpu(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    slab: Tensor,
    table: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    intermediate: int,
    activation: str,
) -> Tensor:
    native = activation in cpu.ACTIVATIONS and (
        not has_lattice(table) or cpu.runs_experts(table, x.shape[-1], intermediate)
    )
    run = cpu.experts if native else _experts
    return run(x, top_k_index, top_k_weights, slab, table, gate_up_bias, down_bias, intermediate, activation)


_lib.impl("linear", _linear, "CompositeExplicitAutograd")
_lib.impl("lattice_linear", _lattice_linear, "CompositeExplicitAutograd")
_lib.impl("experts", _experts, "CompositeExplicitAutograd")
if cpu.available():
    _lib.impl("linear", cpu.linear, "CPU")
    _lib.impl("experts", _experts_cpu, "CPU")
torch.library.register_fake("trilobite::linear", _linear_fake, lib=_lib)
torch.library.register_fake("trilobite::lattice_linear", _lattice_linear_fake, lib=_lib)
torch.library.register_fake("trilobite::experts", _experts_fake, lib=_lib)


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """y = x (dequant(W) + U V)^T + bias.

    x: [..., K] bf16 | fp16 | fp32    w: [N, K]    bias: [N] or None    returns: [..., N] in x.dtype
    Raises ShapeError when shapes do not fit.
    """
    if x.shape[-1] != w.shape[1]:
        raise ShapeError(f"linear: x has K={x.shape[-1]}, the weight has K={w.shape[1]}")
    if w.lattice is not None:
        return torch.ops.trilobite.lattice_linear(  # type: ignore[no-any-return]
            x, w.packed, w.lattice, w.signs_in, w.signs_out, w.lra, w.lrb, bias, w.shape[0]
        )
    return torch.ops.trilobite.linear(x, w.packed, w.scale, w.lra, w.lrb, bias, w.shape[0])  # type: ignore[no-any-return]


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    slab: Tensor,
    table: Tensor,
    *,
    intermediate: int,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """All routed experts of one MoE layer; arguments as in `reference.experts`.

    returns: [T, H] in x.dtype. Raises ShapeError when shapes do not fit.
    """
    return torch.ops.trilobite.experts(  # type: ignore[no-any-return]
        x, top_k_index, top_k_weights, slab, table, gate_up_bias, down_bias, intermediate, activation
    )
