"""Tokens of layers that keep a state, against float64, on every instruction set."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiers import tiers
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.cpu import states

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of results, relative to the largest."""


@pytest.fixture(params=tiers())
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield cpu.set_tier(request.param)
    cpu.set_tier(None)


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    error = (found.double() - expected).abs().max()
    return bool(error <= TOLERANCE[dtype] * expected.abs().max().clamp_min(1e-6))


def convolved(x: Tensor, state: Tensor, w: Tensor, bias: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """In float64: the result, and the newest inputs."""
    newest = torch.cat((state[..., 1:], x[..., None]), -1)
    y = (newest.double() * w.double()).sum(-1) + (0 if bias is None else bias.double())
    return (y * y.sigmoid() if silu else y), newest


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(1, 1), (7, 8), (64, 4), (200, 3), (5000, 4)])
def test_convolution(tier: str, dtype: torch.dtype, channels: int, taps: int) -> None:
    """Of two texts, with and without a bias and silu."""
    x, w, bias = (
        some(2, channels, dtype=dtype),
        some(channels, taps, dtype=dtype),
        some(channels, dtype=dtype),
    )
    for shift, silu in ((None, False), (bias, True)):
        state = some(2, channels, taps, dtype=dtype)
        expected, newest = convolved(x, state, w, shift, silu)
        found = states.convolve_state(x, state, w, shift, silu)
        assert found.dtype == dtype
        assert close(found, expected, dtype)
        assert torch.equal(state, newest)
        assert not close(found, convolved(x, newest, w, shift, silu)[0], dtype) or channels == 1


def ruled(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in float64, of one text: the result and the state."""
    q, k, v, decay, beta, state = (t.double() for t in (q, k, v, decay, beta, state))
    shared = len(v) // len(q)
    if normed:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(shared, 0) for t in (q, k))
    state = state * decay.exp().view(len(v), -1, 1)
    change = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
    state = state + torch.einsum("hk,hv->hkv", k, change)
    return torch.einsum("hk,hkv->hv", q, state) / q.shape[1] ** 0.5, state


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 3, 7, 48), (4, 2, 128, 128), (16, 1, 40, 144)], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_delta_rule(tier: str, dtype: torch.dtype, shape: tuple[int, int, int, int], wide: bool) -> None:
    """Of two texts; key heads, heads for each of them, and the sides of a state."""
    keys, shared, width, columns = shape
    heads = keys * shared
    q, k = (some(2, keys, width, dtype=dtype, seed=i) for i in range(2))
    v, beta = some(2, heads, columns, dtype=dtype), some(2, heads).sigmoid()
    decay = -some(2, heads, *((width,) if wide else ())).abs()
    for normed in (True, False):
        state = some(2, heads, width, columns)
        before = state.clone()
        found = states.delta_state(q, k, v, decay, beta, state, normed)
        assert found.dtype == dtype
        for i in range(2):
            expected, after = ruled(q[i], k[i], v[i], decay[i], beta[i], before[i], normed)
            assert close(found[i], expected, dtype)
            assert close(state[i], after)
            dropped, _ = ruled(q[i], k[i], v[i], decay[i], beta[i].roll(1) + 0.5, before[i], normed)
            assert not close(found[i], dropped, dtype)


def scanned(
    x: Tensor, b: Tensor, c: Tensor, step: Tensor, decay: Tensor, skip: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A state space in float64, of one text: the result and the state."""
    x, b, c, step, decay, state = (t.double() for t in (x, b, c, step, decay, state))
    b, c = (t.repeat_interleave(len(x) // len(t), 0) for t in (b, c))
    state = state * (step * decay).exp()[:, None, None] + torch.einsum("h,hp,hn->hpn", step, x, b)
    y = torch.einsum("hpn,hn->hp", state, c)
    return (y if skip is None else y + skip.double()[:, None] * x), state


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 3, 5, 48), (1, 8, 64, 128)], ids=str)
def test_state_space(tier: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Of two texts; groups, heads for each of them, and the sides of a state."""
    groups, shared, width, size = shape
    heads = groups * shared
    x, b = some(2, heads, width, dtype=dtype), some(2, groups, size, dtype=dtype)
    c, step = some(2, groups, size, dtype=dtype, seed=1), some(2, heads).exp()
    decay, ones = -some(heads).abs(), some(heads)
    for skip in (None, ones):
        state = some(2, heads, width, size)
        before = state.clone()
        found = states.scan_state(x, b, c, step, decay, skip, state)
        assert found.dtype == dtype
        for i in range(2):
            expected, after = scanned(x[i], b[i], c[i], step[i], decay, skip, before[i])
            assert close(found[i], expected, dtype)
            assert close(state[i], after)
            assert not close(
                found[i], scanned(x[i], b[i], c[i], step[i] * 1.1, decay, skip, before[i])[0], dtype
            )


def test_threads_and_nodes_change_no_bit(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by one thread, by three, and as nodes of a step."""
    x, w, bias = some(1, 70_000), some(70_000, 4), some(70_000)
    inputs = [some(1, 8, 64), some(1, 8, 64, seed=1), some(1, 16, 64), -some(1, 16).abs(), some(1, 16)]
    scan = [
        some(1, 16, 64),
        some(1, 2, 64),
        some(1, 2, 64, seed=1),
        some(1, 16).abs(),
        -some(16).abs(),
        some(16),
    ]
    found = []
    for way in (1, 3, None):
        monkeypatch.setattr(states, "team", lambda _, way=way: way or 2)
        kept = [some(1, 70_000, 4), some(1, 16, 64, 64), some(1, 16, 64, 64, seed=1)]
        if way is None:
            made = [torch.empty(70_000), torch.empty(16, 64), torch.empty(16, 64)]
            of_text = [t[0] for t in inputs]
            calls = (
                states.convolution(made[0], x[0], kept[0][0], w, bias, True),
                states.delta(made[1], *of_text, kept[1][0], True),  # type: ignore[call-arg, arg-type]
                states.scan(made[2], *(t[0] for t in scan[:4]), *scan[4:], kept[2][0]),  # type: ignore[call-arg, arg-type]
            )
            ops.step.run_nodes(ops.step.program([ops.step.with_state(call) for call in calls]), 3)
        else:
            made = [
                states.convolve_state(x, kept[0], w, bias, True),
                states.delta_state(*inputs, kept[1], True),  # type: ignore[call-arg, arg-type]
                states.scan_state(*scan, kept[2]),  # type: ignore[call-arg]
            ]
        found.append([t.flatten() for t in (*made, *kept)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


KEYS = [some(1, 2, 16) for _ in "qkv"]
NARROW = [some(1, 2, 8) for _ in "qkv"]
GROUPS = [some(1, 2, 16) for _ in "bc"]


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("convolve_state", (some(1, 4), some(1, 4, 9), some(4, 9), None, False), "9 inputs"),
        ("convolve_state", (some(1, 4), some(1, 4, 3), some(4, 4), None, False), "state"),
        ("convolve_state", (some(1, 4).double(), some(1, 4, 4), some(4, 4), None, False), "float64"),
        ("delta_state", (*KEYS, some(1, 3), some(1, 2), some(1, 2, 16, 16), True), "decay"),
        ("delta_state", (*NARROW, some(1, 2), some(1, 2), some(1, 2, 8, 8), True), "8"),
        ("scan_state", (some(1, 3, 4), *GROUPS, some(1, 3), some(3), None, some(1, 3, 4, 16)), "3 heads"),
    ],
)
def test_what_does_not_fit(function: str, arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ShapeError, match=name):
        getattr(states, function)(*arguments)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("qwen3_next", "causal_conv1d_update"),
        ("qwen3_next", "torch_recurrent_gated_delta_rule"),
        ("kimi_linear", "recurrent_kimi_delta_attention"),
        ("nemotron_h", "mamba2_selective_state_update"),
    ],
)
@torch.no_grad()
def test_in_the_place_of_transformers_functions(module: str, function: str) -> None:
    """Each as a model calls it, against what it replaces, of two texts."""
    from trilobite.runtime.recurrent import FUNCTIONS

    whole = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    theirs = getattr(whole, function)
    theirs = (
        getattr(theirs, "__wrapped__", theirs)
        if theirs.__module__ == "trilobite.runtime.recurrent"
        else theirs
    )
    seen = []

    def behind(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return theirs(*args, **kwargs)

    ours = FUNCTIONS[function](behind)
    heads, width, size = 6, 16, 32
    if function == "causal_conv1d_update":
        arguments = [some(2, 40, 1), some(2, 40, 4), some(40, 4), some(40), "silu"]
        named: dict[str, Any] = {}
        state = 1
    elif function == "mamba2_selective_state_update":
        of_heads = [some(heads), some(heads, seed=1), some(heads, seed=2)]
        arguments = [
            some(2, heads, width, size),
            some(2, heads, width),
            some(2, heads)[..., None].expand(-1, -1, width),
            (-of_heads[0].abs())[:, None, None].expand(-1, width, size),
            some(2, 2, size),
            some(2, 2, size, seed=1),
            of_heads[1][:, None].expand(-1, width),
        ]
        named, state = {"dt_bias": of_heads[2][:, None].expand(-1, width), "dt_softplus": True}, 0
    else:
        wide = (width,) if module == "kimi_linear" else ()
        keys = heads if wide else 3
        arguments = [some(2, 1, keys, width), some(2, 1, keys, width, seed=1), some(2, 1, heads, size)]
        arguments += [-some(2, 1, heads, *wide).abs(), some(2, 1, heads).sigmoid()]
        initial = some(2, heads, width, size)
        named = {"initial_state": initial, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        state = None
    found, expected = [], []
    for call, results in ((ours, found), (theirs, expected)):
        positional = [
            t.clone() if isinstance(t, Tensor) and i == state else t for i, t in enumerate(arguments)
        ]
        own = {k: v.clone() if k == "initial_state" else v for k, v in named.items()}
        if "initial_state" in own:
            made = call(*positional[:3], g=positional[3], beta=positional[4], **own)
        else:
            made = call(*positional, **own), positional[state]
        results += made
    assert not seen
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.enable_grad():
        if state is not None:
            ours(
                *[t.clone() if isinstance(t, Tensor) and i == state else t for i, t in enumerate(arguments)],
                **named,
            )
            assert seen
