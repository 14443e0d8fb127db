"""Layers with a state of a fixed size as `torch.library` operators, which change it in place, on the CPU.

`convolve_state`, `delta_state` and `scan_state` of `torch.ops.trilobite` are what `cpu/states.py` calls so.
"""

import torch
from torch import Tensor

from trilobite.kernels.cpu import states
from trilobite.kernels.cpu.matrix import DTYPES
from trilobite.kernels.cpu.states import LANES, MOST_TAPS
from trilobite.kernels.cpu.states import convolution as convolution
from trilobite.kernels.cpu.states import delta as delta
from trilobite.kernels.cpu.states import scan as scan

_lib = torch.library.Library("trilobite", "FRAGMENT")
_lib.define("convolve_state(Tensor x, Tensor(a!) state, Tensor w, Tensor? bias, bool silu) -> Tensor")
_lib.define(
    "delta_state(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor(a!) state, bool normed) -> Tensor"
)
_lib.define(
    "scan_state(Tensor x, Tensor b, Tensor c, Tensor step, Tensor decay, Tensor? skip, Tensor(a!) state) -> Tensor"
)
if states.available():
    for _name in ("convolve_state", "delta_state", "scan_state"):
        _lib.impl(_name, getattr(states, _name), "CPU")


def runs_natively(*tensors: Tensor | None) -> bool:
    """Whether these operators take tensors: of one dtype, on the CPU, and nobody asks for gradients."""
    given = [t for t in tensors if t is not None]
    return (
        states.available()
        and given[0].dtype in DTYPES
        and all(t.is_cpu and t.dtype == given[0].dtype for t in given)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def keeps_inputs(state: Tensor) -> bool:
    """Whether a state is a convolution's [B, C, K], dense, of few enough inputs."""
    return state.dim() == 3 and 0 < state.shape[2] <= MOST_TAPS and state.is_contiguous()


def keeps_sums(state: Tensor) -> bool:
    """Whether a state is of fp32, dense, on the CPU, and its last side fills vectors."""
    return (
        state.is_cpu
        and state.dtype == torch.float32
        and state.is_contiguous()
        and state.shape[-1] % LANES == 0
    )
