"""Layers with a state of a fixed size, on the CPU: a step of decoding reads and writes it once, natively.

transformers' models call functions of their own modules for one token: a convolution, a delta rule, a state space. The
engine's are put in the place of these, with what they replace behind them for all that is no such step.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trilobite.kernels.ops import states

operators = torch.ops.trilobite
Call = Callable[..., Any]


def _convolution(theirs: Call) -> Call:
    """hidden_states: [B, C, 1]    conv_state: [B, C, K], changed    weight: [C, K]    returns: [B, C, 1]."""

    @functools.wraps(theirs)
    def call(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        fits = (
            hidden_states.shape == (*conv_state.shape[:2], 1)
            and weight.shape == conv_state.shape[1:]
            and activation in (None, "silu", "swish")
            and states.convolves(conv_state)
            and states.runs_natively(hidden_states.dtype, conv_state, hidden_states, conv_state, weight, bias)
        )
        if not fits:
            return theirs(hidden_states, conv_state, weight, bias, activation, **kwargs)  # type: ignore[no-any-return]
        x, silu = hidden_states[..., 0], activation is not None
        y: Tensor = operators.convolve_state(x, conv_state, weight.contiguous(), bias, silu)
        return y[..., None]

    return call


def _delta_rule(theirs: Call) -> Call:
    """query, key: [B, 1, key heads, K]    value: [B, 1, H, V]    g: [B, 1, H], or [B, 1, H, K]    beta: [B, 1, H]
    initial_state: [B, H, K, V] fp32, changed    returns: [B, 1, H, V], the state
    """

    @functools.wraps(theirs)
    def call(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        state = kwargs.get("initial_state")
        fits = (
            isinstance(state, Tensor)
            and query.shape[1] == 1
            and bool(kwargs.get("output_final_state"))
            and kwargs.get("cu_seqlens") is None
            and states.reads_in_vectors(state)
            and states.runs_natively(query.dtype, state, query, key, value)
        )
        if not fits:
            return theirs(query, key, value, g=g, beta=beta, **kwargs)
        normed = bool(kwargs.get("use_qk_l2norm_in_kernel"))
        inputs = (t[:, 0] for t in (query, key, value, g.float(), beta.float()))
        return operators.delta_state(*inputs, state, normed)[:, None], state

    return call


def _state_space(theirs: Call) -> Call:
    """state: [B, H, P, N] fp32, changed    hidden_states: [B, H, P]    B, C: [B, groups, N]    of each head one number,
    expanded: dt [B, H, P], A [H, P, N], D and dt_bias [H, P]    returns: [B, H, P]
    """

    @functools.wraps(theirs)
    def call(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        numbers = dt, D, dt_bias, A, A[..., 0]
        fits = (
            z is None
            and all(t is None or t.stride(-1) == 0 for t in numbers)
            and states.reads_in_vectors(state)
            and states.runs_natively(hidden_states.dtype, state, hidden_states, B, C)
        )
        if not fits:
            return theirs(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)  # type: ignore[no-any-return]
        step = dt[..., 0]
        if dt_bias is not None:
            step = step + dt_bias[:, 0].to(step.dtype)
        if dt_softplus:
            step = torch.nn.functional.softplus(step)
        skip = None if D is None else D[:, 0].float()
        y: Tensor = operators.scan_state(
            hidden_states, B, C, step.float(), A[:, 0, 0].float().contiguous(), skip, state
        )
        return y

    return call


FUNCTIONS: dict[str, Callable[[Call], Call]] = {
    "causal_conv1d_update": _convolution,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_selective_state_update": _state_space,
}
"""By the names that they have in transformers' modules."""
_ours: set[Call] = set()


def keep_states_natively(model: PreTrainedModel) -> None:
    """Let all models of the modules that a model is made of take steps natively."""
    for name in {type(m).__module__ for m in model.modules()}:
        module = vars(sys.modules[name])
        for function, natively in FUNCTIONS.items():
            theirs = module.get(function)
            if theirs is not None and theirs not in _ours:
                module[function] = natively(theirs)
                _ours.add(module[function])
