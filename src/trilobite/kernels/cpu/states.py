"""Layers that keep a state of a fixed size, which is changed in place: a token of short convolutions along the text,
tokens of linear attention by the gated delta rule and of state spaces. Texts of a batch go one after the other, and so
do a text's tokens: a prompt has the bits of its tokens one by one. Sums are fp32.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels.cpu import native
from trilobite.kernels.cpu.engine import team
from trilobite.kernels.cpu.matrix import DTYPES, dtype_code

LANES = 16
"""Sides of states that the library reads in vectors are a multiple of so many values."""
MOST_TAPS = 8
"""Inputs of a channel that a convolution may have."""

_lib, _ = native.load()


def runs_natively(*tensors: Tensor | None) -> bool:
    """Whether these operators take tensors: of one dtype, on the CPU, and nobody asks for gradients."""
    given = [t for t in tensors if t is not None]
    return (
        _lib is not None
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


def convolve_state(x: Tensor, state: Tensor, w: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """y = the newest K inputs of every channel, x the last of them, times w, + bias; then silu, where asked for.

    x: [B, C]    state: [B, C, K], these inputs, the oldest first: before of the token before, then of this
    w: [C, K]    bias: [C] or None    returns: [B, C], rounded before silu and after; all of one dtype, state dense
    Raises ShapeError.
    """
    assert _lib is not None
    y = torch.empty(x.shape, dtype=x.dtype)
    for out, of_x, of_state in zip(y, x.contiguous(), state, strict=True):
        args = convolution(out, of_x, of_state, w, bias, silu)
        args.threads = team(None)
        _lib.trilobite_convolve(ctypes.byref(args))
    return y


def convolution(
    y: Tensor, x: Tensor, state: Tensor, w: Tensor, bias: Tensor | None, silu: bool
) -> native.ConvolutionArgs:
    """The same for one text, into y [C], as the library takes it; all tensors dense. Raises ShapeError."""
    tensors = {"y": y, "x": x, "state": state, "w": w, "bias": bias}
    channels, taps = _sides(w, 2, "convolution", tensors)
    shapes = {"y": (channels,), "x": (channels,), "state": (channels, taps), "bias": (channels,)}
    _check("convolution", tensors, shapes, x.dtype)
    parts = _addresses(x, w, bias, state, y)
    return native.ConvolutionArgs(*parts, dtype_code(x, "x"), channels, taps, int(silu))


def delta_state(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, normed: bool
) -> Tensor:
    """The gated delta rule (Yang, Kautz, Hatamizadeh 2024, equation 10), token by token: of every head S = exp(decay) S,
    then S += k beta (v - k S), and y = q S / sqrt(K).

    q, k: [B, T, key heads, K], which become of length 1 where normed; heads share them in order    v: [B, T, H, V]
    decay: fp32 [B, T, H], or [B, T, H, K] of each row    beta: fp32 [B, T, H]    state: fp32 [B, H, K, V], dense, V a
    multiple of 16    returns: [B, T, H, V]; q, k, v and it are of one dtype. Raises ShapeError.
    """
    assert _lib is not None
    y = torch.empty(v.shape, dtype=v.dtype)
    inputs = (t.contiguous() for t in (q, k, v, decay, beta))
    for out, of_q, of_k, of_v, of_decay, of_beta, of_state in zip(y, *inputs, state, strict=True):
        args = delta(out, of_q, of_k, of_v, of_decay, of_beta, of_state, normed)
        args.threads = team(None)
        _lib.trilobite_delta(ctypes.byref(args))
    return y


def delta(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, normed: bool
) -> native.DeltaArgs:
    """The same for one text, into y [T, H, V], as the library takes it; all tensors dense. Raises ShapeError."""
    tensors = {"y": y, "q": q, "k": k, "v": v, "decay": decay, "beta": beta, "state": state}
    tokens, heads, columns = _sides(v, 3, "delta rule", tensors)
    _, keys, width = _sides(q, 3, "delta rule", tensors)
    of_keys, of_heads = (tokens, keys, width), (tokens, heads, columns)
    shapes = {
        "y": of_heads,
        "q": of_keys,
        "k": of_keys,
        "beta": (tokens, heads),
        "state": (heads, width, columns),
    }
    shapes["decay"] = (tokens, heads, width)[: decay.dim()]
    _check("delta rule", tensors, shapes, v.dtype, floats=("decay", "beta", "state"))
    parts = _addresses(q, k, v, decay, beta, state, y)
    sizes = tokens, heads, keys, width, columns, int(decay.dim() == 3), int(normed)
    return native.DeltaArgs(*parts, dtype_code(v, "v"), *sizes)


def scan_state(
    x: Tensor, b: Tensor, c: Tensor, step: Tensor, decay: Tensor, skip: Tensor | None, state: Tensor
) -> Tensor:
    """A state space with one decay a head (Mamba-2; Dao, Gu 2024), token by token: of every row of a head
    S = exp(step decay) S + step x b, and y = S c + skip x.

    x: [B, T, H, P]    b, c: [B, T, groups, N], which heads share in order    step: fp32 [B, T, H]    decay, skip: fp32
    [H], or None    state: fp32 [B, H, P, N], dense, N a multiple of 16    returns: [B, T, H, P]; x, b, c and it are of
    one dtype. Raises ShapeError.
    """
    assert _lib is not None
    y = torch.empty(x.shape, dtype=x.dtype)
    inputs = (t.contiguous() for t in (x, b, c, step))
    for out, of_x, of_b, of_c, of_step, of_state in zip(y, *inputs, state, strict=True):
        args = scan(out, of_x, of_b, of_c, of_step, decay, skip, of_state)
        args.threads = team(None)
        _lib.trilobite_scan(ctypes.byref(args))
    return y


def scan(
    y: Tensor,
    x: Tensor,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    decay: Tensor,
    skip: Tensor | None,
    state: Tensor,
) -> native.ScanArgs:
    """The same for one text, into y [T, H, P], as the library takes it; all tensors dense. Raises ShapeError."""
    tensors = {"y": y, "x": x, "b": b, "c": c, "step": step, "decay": decay, "skip": skip, "state": state}
    tokens, heads, width = _sides(x, 3, "state space", tensors)
    _, groups, size = _sides(b, 3, "state space", tensors)
    of_groups = tokens, groups, size
    shapes = {"y": (tokens, heads, width), "b": of_groups, "c": of_groups, "step": (tokens, heads)}
    shapes |= {"decay": (heads,), "skip": (heads,), "state": (heads, width, size)}
    _check("state space", tensors, shapes, x.dtype, floats=("step", "decay", "skip", "state"))
    parts = _addresses(x, b, c, step, decay, skip, state, y)
    return native.ScanArgs(*parts, dtype_code(x, "x"), tokens, heads, groups, width, size)


def _sides(t: Tensor, dimensions: int, name: str, tensors: Mapping[str, Tensor | None]) -> tuple[int, ...]:
    if t.dim() != dimensions or 0 in t.shape:
        raise ShapeError(_found(name, tensors))
    return tuple(t.shape)


def _check(
    name: str,
    tensors: Mapping[str, Tensor | None],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    floats: tuple[str, ...] = (),
) -> None:
    """Raises ShapeError unless all are dense and on the CPU, of these shapes and this dtype, `floats` of fp32."""
    for part, t in tensors.items():
        if t is None:
            continue
        known = torch.float32 if part in floats else dtype
        if t.shape != shapes.get(part, t.shape) or t.dtype != known or not (t.is_cpu and t.is_contiguous()):
            raise ShapeError(_found(name, tensors))
    if dtype not in DTYPES:
        raise ShapeError(_found(name, tensors))


def _found(name: str, tensors: Mapping[str, Tensor | None]) -> str:
    parts = (f"{part} {list(t.shape)} {t.dtype}" for part, t in tensors.items() if t is not None)
    return f"{name}: {', '.join(parts)} do not fit, or are not dense"


def _addresses(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.data_ptr() for t in tensors]
