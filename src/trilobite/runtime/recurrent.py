"""Layers with a state of a fixed size, on the CPU: a step of decoding reads and writes it once, natively.

transformers' models call functions of their own modules: a convolution of one token, a delta rule or a state space of
one or of a prompt. The engine's are put in the place of these, with what they replace behind them for gradients, GPUs
and whatever the engine does not know.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trilobite.kernels.ops import states
from trilobite.runtime.modules.residence import modules_that_run

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
            and states.keeps_inputs(conv_state)
            and states.runs_natively(hidden_states, conv_state, weight, bias)
        )
        if not fits:
            return theirs(hidden_states, conv_state, weight, bias, activation, **kwargs)  # type: ignore[no-any-return]
        x, silu = hidden_states[..., 0], activation is not None
        y: Tensor = operators.convolve_state(x, conv_state, weight.contiguous(), bias, silu)
        return y[..., None]

    return call


def _delta_rule(theirs: Call) -> Call:
    """query, key: [B, T, key heads, K]    value: [B, T, H, V]    g: [B, T, H], or [B, T, H, K]    beta: [B, T, H]
    initial_state: [B, H, K, V] fp32, changed; or None    returns: [B, T, H, V], the state or None
    """

    @functools.wraps(theirs)
    def call(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        state, wanted = kwargs.get("initial_state"), bool(kwargs.get("output_final_state"))
        fits = (
            kwargs.get("cu_seqlens") is None
            and (wanted or state is None)
            and states.runs_natively(query, key, value)
        )
        if fits and state is None:
            (batch, _, heads, columns), width = value.shape, key.shape[3]
            state = torch.zeros(batch, heads, width, columns)
        if not fits or state is None or not states.keeps_sums(state):
            return theirs(query, key, value, g=g, beta=beta, **kwargs)
        normed = bool(kwargs.get("use_qk_l2norm_in_kernel"))
        y = operators.delta_state(query, key, value, g.float(), beta.float(), state, normed)
        return y, state if wanted else None

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
            and states.keeps_sums(state)
            and states.runs_natively(hidden_states, B, C)
        )
        if not fits:
            return theirs(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)  # type: ignore[no-any-return]
        step = _step(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
        skip = None if D is None else D[:, 0].float()
        inputs = (t[:, None] for t in (hidden_states, B, C, step))
        y: Tensor = operators.scan_state(*inputs, A[:, 0, 0].float().contiguous(), skip, state)
        return y[:, 0]

    return call


def _state_space_of_prompt(theirs: Call) -> Call:
    """hidden_states: [B, T, H, P]    dt: [B, T, H]    A, D, dt_bias: [H]    B, C: [B, T, groups, N]
    initial_states: [B, H, P, N] fp32, changed; or None    returns: [B, T, H, P] fp32; and the state, where asked for
    """

    @functools.wraps(theirs)
    def call(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        state = initial_states
        fits = (
            all(kwargs.get(name) is None for name in ("z", "seq_idx"))
            and (return_final_states or state is None)
            and A.dim() == 1
            and (D is None or D.dim() == 1)
            and states.runs_natively(hidden_states, B, C)
        )
        if fits and state is None:
            (batch, _, heads, width), size = hidden_states.shape, B.shape[3]
            state = torch.zeros(batch, heads, width, size)
        if not fits or state is None or not states.keeps_sums(state):
            numbers = {
                "D": D,
                "dt_bias": dt_bias,
                "initial_states": initial_states,
                "dt_softplus": dt_softplus,
            }
            asked = {"dt_limit": dt_limit, "return_final_states": return_final_states}
            return theirs(hidden_states, dt, A, B, C, chunk_size, **numbers, **asked, **kwargs)
        step = _step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        skip = None if D is None else D.float()
        y = operators.scan_state(hidden_states, B, C, step, A.float(), skip, state).float()
        return (y, state) if return_final_states else y

    return call


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """How far a token moves a state, in fp32, rounded as the models do it."""
    step = dt if bias is None else dt + bias.to(dt.dtype)
    return (torch.nn.functional.softplus(step) if softplus else step).float()


FUNCTIONS: dict[str, Callable[[Call], Call]] = {
    "causal_conv1d_update": _convolution,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_selective_state_update": _state_space,
    "mamba2_chunk_scan": _state_space_of_prompt,
}
"""By the names that they have in transformers' modules."""
_ours: set[Call] = set()


def keep_states_natively(model: PreTrainedModel) -> None:
    """Let all models of the modules that a model is made of take steps natively."""
    for name in {type(m).__module__ for m in modules_that_run(model)}:
        module = vars(sys.modules[name])
        for function, natively in FUNCTIONS.items():
            theirs = module.get(function)
            if theirs is not None and theirs not in _ours:
                module[function] = natively(theirs)
                _ours.add(module[function])
