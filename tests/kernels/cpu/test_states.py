"""Tokens of layers that keep a state, against float64, on every instruction set."""

import copy
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
from trilobite.runtime import recurrent

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


def close(
    found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32, before: Tensor | None = None
) -> bool:
    """before: a state that may have gone, but whose size says how exact what is left of it is."""
    largest = max(float(t.abs().max()) for t in (expected, before) if t is not None)
    return bool((found.double() - expected).abs().max() <= TOLERANCE[dtype] * max(largest, 1e-6))


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
    """The gated delta rule in float64, of one text: the results and the state."""
    q, k, v, decay, beta, state = (t.double() for t in (q, k, v, decay, beta, state))
    if normed:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[1] // t.shape[1], 1) for t in (q, k))
    found = []
    for t in range(len(v)):
        state = state * decay[t].exp().view(len(state), -1, 1)
        change = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        found.append(torch.einsum("hk,hkv->hv", q[t], state) / q.shape[2] ** 0.5)
    return torch.stack(found), state


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 16), (35, 2, 3, 7, 48), (1, 4, 2, 128, 128), (2, 16, 1, 40, 144)], ids=str
)
@pytest.mark.parametrize("wide", [False, True])
def test_delta_rule(tier: str, dtype: torch.dtype, shape: tuple[int, ...], wide: bool) -> None:
    """Of two texts; tokens, key heads, heads for each of them, and the sides of a state."""
    tokens, keys, shared, width, columns = shape
    heads = keys * shared
    q, k = (some(2, tokens, keys, width, dtype=dtype, seed=i) for i in range(2))
    v, beta = some(2, tokens, heads, columns, dtype=dtype), some(2, tokens, heads).sigmoid()
    decay = -some(2, tokens, heads, *((width,) if wide else ())).abs()
    for normed in (True, False) if tokens == 1 else (True,):
        state = some(2, heads, width, columns)
        before = state.clone()
        found = states.delta_state(q, k, v, decay, beta, state, normed)
        assert found.dtype == dtype
        for i in range(2):
            expected, after = ruled(q[i], k[i], v[i], decay[i], beta[i], before[i], normed)
            assert close(found[i], expected, dtype, before[i] / 8)
            assert close(state[i], after, before=before[i])
            other, _ = ruled(q[i], k[i], v[i], decay[i], beta[i] + 0.5, before[i], normed)
            assert not close(found[i], other, dtype)


def scanned(
    x: Tensor, b: Tensor, c: Tensor, step: Tensor, decay: Tensor, skip: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A state space in float64, of one text: the results and the state."""
    x, b, c, step, decay, state = (t.double() for t in (x, b, c, step, decay, state))
    b, c = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (b, c))
    found = []
    for t in range(len(x)):
        put = torch.einsum("h,hp,hn->hpn", step[t], x[t], b[t])
        state = state * (step[t] * decay).exp()[:, None, None] + put
        found.append(torch.einsum("hpn,hn->hp", state, c[t]))
    y = torch.stack(found)
    return (y if skip is None else y + skip.double()[:, None] * x), state


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 16), (9, 2, 3, 5, 48), (2, 1, 8, 64, 128)], ids=str)
def test_state_space(tier: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of two texts; tokens, groups, heads for each of them, and the sides of a state."""
    tokens, groups, shared, width, size = shape
    heads = groups * shared
    x, b = some(2, tokens, heads, width, dtype=dtype), some(2, tokens, groups, size, dtype=dtype)
    c, step = some(2, tokens, groups, size, dtype=dtype, seed=1), some(2, tokens, heads).exp()
    decay, ones = -some(heads).abs(), some(heads)
    for skip in (None, ones):
        state = some(2, heads, width, size)
        before = state.clone()
        found = states.scan_state(x, b, c, step, decay, skip, state)
        assert found.dtype == dtype
        for i in range(2):
            expected, after = scanned(x[i], b[i], c[i], step[i], decay, skip, before[i])
            assert close(found[i], expected, dtype, before[i] / 8)
            assert close(state[i], after, before=before[i])
            other, _ = scanned(x[i], b[i], c[i], step[i] * 1.1, decay, skip, before[i])
            assert not close(found[i], other, dtype)


def delta_inputs(tokens: int) -> list[Tensor]:
    keys = [some(1, tokens, 8, 64, seed=i) for i in range(2)]
    return [*keys, some(1, tokens, 16, 160), -some(1, tokens, 16).abs(), some(1, tokens, 16).sigmoid()]


def scan_inputs(tokens: int) -> list[Tensor]:
    groups = [some(1, tokens, 2, 64, seed=i) for i in range(2)]
    return [some(1, tokens, 16, 64), *groups, some(1, tokens, 16).abs()]


def test_a_prompt_has_the_bits_of_its_tokens(tier: str) -> None:
    """One by one, or all of them in a call."""
    decay, inputs, scan = -some(16).abs(), delta_inputs(70), scan_inputs(70)
    kept = [[some(1, 16, 64, 160), some(1, 16, 64, 64)] for _ in range(2)]
    whole = [
        states.delta_state(*inputs, kept[0][0], True),  # type: ignore[call-arg, arg-type]
        states.scan_state(*scan, decay, decay, kept[0][1]),  # type: ignore[call-arg, arg-type]
    ]
    parts: list[list[Tensor]] = [[], []]
    for t in range(70):
        one = [x[:, t : t + 1] for x in inputs]
        parts[0].append(states.delta_state(*one, kept[1][0], True))  # type: ignore[call-arg, arg-type]
        one = [x[:, t : t + 1] for x in scan]
        parts[1].append(states.scan_state(*one, decay, decay, kept[1][1]))  # type: ignore[call-arg, arg-type]
    assert all(torch.equal(y, torch.cat(made, 1)) for y, made in zip(whole, parts, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_threads_and_nodes_change_no_bit(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by one thread, by three, and as nodes of a step."""
    x, w, bias, decay = some(1, 70_000), some(70_000, 4), some(70_000), -some(16).abs()
    inputs, scan = delta_inputs(1), scan_inputs(1)
    found = []
    for way in (1, 3, None):
        monkeypatch.setattr(states, "team", lambda _, way=way: way or 2)
        kept = [some(1, 70_000, 4), some(1, 16, 64, 160), some(1, 16, 64, 64)]
        if way is None:
            made = [torch.empty(70_000), torch.empty(1, 16, 160), torch.empty(1, 16, 64)]
            calls = (
                states.convolution(made[0], x[0], kept[0][0], w, bias, True),
                states.delta(made[1], *(t[0] for t in inputs), kept[1][0], True),  # type: ignore[call-arg, arg-type]
                states.scan(made[2], *(t[0] for t in scan), decay, decay, kept[2][0]),  # type: ignore[call-arg, arg-type]
            )
            ops.step.run_nodes(ops.step.program([ops.step.with_state(call) for call in calls]), 3)
        else:
            made = [
                states.convolve_state(x, kept[0], w, bias, True),
                states.delta_state(*inputs, kept[1], True),  # type: ignore[call-arg, arg-type]
                states.scan_state(*scan, decay, decay, kept[2]),  # type: ignore[call-arg, arg-type]
            ]
        found.append([t.flatten() for t in (*made, *kept)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


KEYS = [some(1, 1, 2, 16) for _ in "qkv"]
NARROW = [some(1, 1, 2, 8) for _ in "qkv"]
GROUPS = [some(1, 1, 2, 16) for _ in "bc"]


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("convolve_state", (some(1, 4), some(1, 4, 9), some(4, 9), None, False), "9 inputs"),
        ("convolve_state", (some(1, 4), some(1, 4, 3), some(4, 4), None, False), "state"),
        ("convolve_state", (some(1, 4).double(), some(1, 4, 4), some(4, 4), None, False), "float64"),
        ("delta_state", (*KEYS, some(1, 1, 3), some(1, 1, 2), some(1, 2, 16, 16), True), "decay"),
        ("delta_state", (*NARROW, some(1, 1, 2), some(1, 1, 2), some(1, 2, 8, 8), True), "8"),
        (
            "scan_state",
            (some(1, 1, 3, 4), *GROUPS, some(1, 1, 3), some(3), None, some(1, 3, 4, 16)),
            "3 heads",
        ),
    ],
)
def test_what_does_not_fit(function: str, arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ShapeError, match=name):
        getattr(states, function)(*arguments)


Called = tuple[list[Any], dict[str, Any]]


def for_convolution() -> Called:
    return [some(2, 40, 1), some(2, 40, 4), some(40, 4), some(40), "silu"], {}


def for_delta(tokens: int, *, wide: bool, begun: bool) -> Called:
    heads, width, keys = 6, 16, 6 if wide else 3
    q, k = (some(2, tokens, keys, width, seed=i) for i in range(2))
    named = {"g": -some(2, tokens, heads, *((width,) if wide else ())).abs()}
    named["beta"] = some(2, tokens, heads).sigmoid()
    state = {"initial_state": some(2, heads, width, 32) if begun else None}
    return [q, k, some(2, tokens, heads, 32)], named | state | DELTA


def for_token_of_state_space() -> Called:
    heads, width, size = 6, 16, 32
    numbers = [some(heads, seed=i) for i in range(3)]
    groups = [some(2, 2, size, seed=i) for i in range(2)]
    of_heads = [
        some(2, heads, width, size),
        some(2, heads, width),
        some(2, heads)[..., None].expand(-1, -1, width),
    ]
    decay = (-numbers[0].abs())[:, None, None].expand(-1, width, size)
    skip, bias = (t[:, None].expand(-1, width) for t in numbers[1:])
    return [*of_heads, decay, *groups, skip], {"dt_bias": bias, "dt_softplus": True}


def for_state_space(*, begun: bool) -> Called:
    heads, width, size, tokens = 6, 16, 32, 21
    numbers = [some(heads, seed=i) for i in range(3)]
    groups = [some(2, tokens, 2, size, seed=i) for i in range(2)]
    inputs = [some(2, tokens, heads, width), some(2, tokens, heads), -numbers[0].abs(), *groups]
    named = {"D": numbers[1], "dt_bias": numbers[2], "dt_softplus": True, "return_final_states": True}
    named["initial_states"] = some(2, heads, width, size) if begun else None
    return inputs, {"chunk_size": 8, "dt_limit": (0.0, 1.5), **named}


DELTA = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize(
    ("module", "function", "called"),
    [
        ("qwen3_next", "causal_conv1d_update", for_convolution()),
        ("qwen3_next", "torch_recurrent_gated_delta_rule", for_delta(1, wide=False, begun=True)),
        ("qwen3_next", "torch_chunk_gated_delta_rule", for_delta(70, wide=False, begun=False)),
        ("qwen3_next", "torch_chunk_gated_delta_rule", for_delta(70, wide=False, begun=True)),
        ("kimi_linear", "recurrent_kimi_delta_attention", for_delta(1, wide=True, begun=True)),
        ("kimi_linear", "chunk_kimi_delta_attention", for_delta(70, wide=True, begun=False)),
        ("nemotron_h", "mamba2_selective_state_update", for_token_of_state_space()),
        ("nemotron_h", "mamba2_chunk_scan", for_state_space(begun=False)),
        ("nemotron_h", "mamba2_chunk_scan", for_state_space(begun=True)),
    ],
)
@torch.no_grad()
def test_in_the_place_of_transformers_functions(module: str, function: str, called: Called) -> None:
    """Each as a model calls it, against what it replaces, of two texts; and that is asked where there are gradients."""
    whole = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    theirs = getattr(whole, function)
    if theirs in recurrent._ours:
        theirs = theirs.__wrapped__
    asked = []

    def behind(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return theirs(*args, **kwargs)

    ours = recurrent.FUNCTIONS[function](behind)
    results = []
    for call in (ours, theirs):
        arguments, named = copy.deepcopy(called)
        made = call(*arguments, **named)
        # What is changed where it lies is the convolution's second argument, and the state space's first.
        kept = arguments[:2] if function in ("causal_conv1d_update", "mamba2_selective_state_update") else []
        results.append([*(made if isinstance(made, tuple) else (made,)), *kept])
    assert not asked
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    with torch.enable_grad():
        arguments, named = copy.deepcopy(called)
        ours(*arguments, **named)
    assert asked


@torch.no_grad()
def test_a_state_that_nobody_wants_back_stays() -> None:
    """As what it replaces, which never changes the state that it begins with."""
    whole = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    function = "torch_chunk_gated_delta_rule"
    theirs = getattr(whole, function)
    arguments, named = for_delta(5, wide=False, begun=True)
    before = named["initial_state"].clone()
    _, made = recurrent.FUNCTIONS[function](theirs)(*arguments, **named | {"output_final_state": False})
    assert made is None
    assert torch.equal(named["initial_state"], before)
