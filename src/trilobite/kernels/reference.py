"""The oracle: both operators in plain PyTorch and float32. Slow, short, and what every fast kernel is tested against.

Weights in a lattice format are multiplied in rotated coordinates (QuIP# Algorithm 2): rotate x, multiply by what the
codes stand for, rotate back. `dequantize` gives the same matrix in plain coordinates.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from trilobite.formats.incoherence import Spin
from trilobite.formats.weight import PackedWeight, decode_factor, dequantize, rotated, spins
from trilobite.kernels.activation import gate_fn, plain_fn
from trilobite.kernels.expert_table import DOWN, GATE, UP, expert_weight
from trilobite.kernels.layer import ExpertsLayer


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """y = x (dequant(W) + U V)^T + bias, in float32 (MiLo eq. 3 plus the compensator).

    x: [..., K] bf16 | fp16 | fp32    w: [N, K]    bias: [N] or None    returns: [..., N] in x.dtype
    """
    xf = x.float()
    if w.lattice is None or w.exponent:
        y = dense_linear(xf, dequantize(w))
    else:
        spin_in, spin_out = spins(w)
        y = spin_out.adjoint(dense_linear(spin_in.forward(xf), rotated(w))) + _low_rank(xf, w)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _low_rank(x: Tensor, w: PackedWeight) -> Tensor | float:
    """x (U V)^T. x: [..., K] fp32    returns: [..., N] fp32, or 0 without a compensator."""
    if w.lra is None or w.lrb is None:
        return 0.0
    n, k = w.shape
    return dense_linear(x, decode_factor(w.lrb, k)) @ decode_factor(w.lra, n)


class _Inputs:
    """x [T, H] fp32, and x rotated: once for all the weights that rotate it alike."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._rotated: dict[tuple[str, bytes], Tensor] = {}

    def times(self, w: PackedWeight, token: Tensor) -> Tensor:
        """The rows `token` of x W^T."""
        if w.lattice is None:
            return linear(self.x[token], w)
        spin_in, spin_out = spins(w)
        key = _key(spin_in, w.signs_in)
        if key not in self._rotated:
            self._rotated[key] = spin_in.forward(self.x)
        y = spin_out.adjoint(dense_linear(self._rotated[key][token], rotated(w)))
        return y + _low_rank(self.x[token], w)


class _Outputs:
    """A sum of y [T, H] fp32; terms that are rotated back alike are rotated back once, in `total`."""

    def __init__(self, like: Tensor) -> None:
        self._plain = torch.zeros_like(like)
        self._rotated: dict[tuple[str, bytes], tuple[Spin, Tensor]] = {}

    def add(self, h: Tensor, w: PackedWeight, token: Tensor, weight: Tensor) -> None:
        """Add weight * h W^T to the rows `token`. h: [M, I] fp32    weight: [M, 1]."""
        if w.lattice is None:
            self._plain.index_add_(0, token, linear(h, w) * weight)
            return
        spin_in, spin_out = spins(w)
        _, total = self._rotated.setdefault(
            _key(spin_out, w.signs_out), (spin_out, torch.zeros_like(self._plain))
        )
        total.index_add_(0, token, dense_linear(spin_in.forward(h), rotated(w)) * weight)
        if w.rank:
            self._plain.index_add_(0, token, _low_rank(h, w) * weight)

    def add_bias(self, bias: Tensor, token: Tensor, weight: Tensor) -> None:
        """Add weight * bias to the rows `token`. bias: [H]."""
        self._plain.index_add_(0, token, bias.float() * weight)

    def total(self) -> Tensor:
        """[T, H] fp32."""
        return self._plain + sum(spin.adjoint(y) for spin, y in self._rotated.values())


def _key(spin: Spin, signs: Tensor | None) -> tuple[str, bytes]:
    """Equal where two transforms are."""
    assert signs is not None
    return spin.transform, signs.cpu().numpy().tobytes()


def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: ExpertsLayer) -> Tensor:
    """Sum over a token's experts of weight * down(act(gate(x)) * up(x)), in float32.

    x: [T, H]    top_k_index: [T, A] int64, E and above = no expert    top_k_weights: [T, A]
    layer: as stored    returns: [T, H] in x.dtype
    """
    shape = layer.intermediate, layer.hidden
    inputs = _Inputs(x.float())
    outputs = _Outputs(inputs.x)
    for e in range(layer.table.shape[0]):
        token, slot = torch.where(top_k_index == e)
        if token.numel() == 0:
            continue
        up = expert_weight(layer.slab, layer.table[e, UP], shape)
        gate = expert_weight(layer.slab, layer.table[e, GATE], shape)
        down = expert_weight(layer.slab, layer.table[e, DOWN], shape[::-1])
        assert up is not None
        assert down is not None
        weight = top_k_weights[token, slot, None].float()
        bias = inputs.x.new_zeros(1) if layer.gate_up_bias is None else layer.gate_up_bias[e].float()
        gate_bias, up_bias = bias[: layer.intermediate], bias[-layer.intermediate :]
        if gate is None:
            h = plain_fn(layer.activation)(inputs.times(up, token) + up_bias)
        else:
            gates, ups = inputs.times(gate, token) + gate_bias, inputs.times(up, token) + up_bias
            h = gate_fn(layer.activation)(gates, ups)
        outputs.add(h, down, token, weight)
        if layer.down_bias is not None:
            outputs.add_bias(layer.down_bias[e], token, weight)
    return outputs.total().to(x.dtype).contiguous()
