"""The native attention of one token against the same sums in fp64, on every instruction set at hand."""

import os
from collections.abc import Iterator

import pytest
import torch
from support.tiers import tiers
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.cpu.attention import attend, attends

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest error as a share of the largest result: that of rounding the result."""
PROMPT = 8
"""So many tokens in a row are worked on together."""


@pytest.fixture(params=tiers())
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield cpu.set_tier(request.param)
    cpu.set_tier(os.environ.get("TRILOBITE_ISA"))


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    texts: list[Tensor],
    softcap: float,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Text by text, head by head, in fp64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    query, key, value = query.double(), key.double(), value.double()
    for t, rows in enumerate(texts):
        for h in range(query.shape[1]):
            kept = h * key.shape[1] // query.shape[1]
            scores = key[rows, kept] @ query[t, h] * query.shape[2] ** -0.5
            if bias is not None:
                distances = torch.arange(len(rows)).flip(0).clamp(max=bias.shape[1] - 1)
                scores = scores + bias[h, distances].double()
            scores = torch.tanh(scores / softcap) * softcap if softcap else scores
            nothing = scores.new_tensor([]) if sinks is None else sinks[h : h + 1].double()
            out[t, h] = torch.cat((scores, nothing)).softmax(0)[: len(rows)] @ value[rows, kept]
    return out


def some(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, lengths: list[int]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Queries, keys and values of a cache with twice the rows needed, and which of them each text has."""
    torch.manual_seed(sum(lengths) + width)
    size = 2 * sum(lengths)
    query = torch.randn(len(lengths), heads, width).to(dtype)
    key, value = (torch.randn(size, kv_heads, width).to(dtype) for _ in range(2))
    return query, key, value, list(torch.randperm(size)[: sum(lengths)].split(lengths))


def indices(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(texts), torch.tensor([0, *map(len, texts)]).cumsum(0)


def distance(made: Tensor, expected: Tensor) -> float:
    return float((made.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "lengths"),
    [(1, 1, 16, [1]), (6, 3, 48, [5, 1, 130]), (16, 16, 128, [67]), (14, 2, 64, [9, 300, 4, 33, 1, 2, 7, 8])],
)
def test_against_fp64(
    tier: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int, lengths: list[int]
) -> None:
    query, key, value, texts = some(dtype, heads, kv_heads, width, lengths)
    made = attend(query, key, value, *indices(texts))
    assert distance(made, naive(query, key, value, texts, 0, None)) < CLOSE[dtype]


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_bounded_scores_and_sinks(softcap: float, sinks: bool) -> None:
    query, key, value, texts = some(torch.float32, 8, 2, 32, [40, 3])
    sink = torch.linspace(-2, 3, 8) if sinks else None
    made = attend(query, key, value, *indices(texts), softcap=softcap, sinks=sink)
    assert distance(made, naive(query, key, value, texts, softcap, sink)) < 2e-6


@pytest.mark.parametrize("distances", [1, 7, 300])
@pytest.mark.parametrize("dtype", CLOSE)
def test_bias_by_distance(tier: str, dtype: torch.dtype, distances: int) -> None:
    query, key, value, texts = some(dtype, 6, 2, 48, [270, 1, 33])
    bias = torch.randn(6, distances) * 3
    made = attend(query, key, value, *indices(texts), softcap=4.0, bias=bias)
    assert distance(made, naive(query, key, value, texts, 4.0, None, bias)) < CLOSE[dtype]


def test_one_row_lies_where_it_lies() -> None:
    """Of a dimension of one, torch may hold any stride: keys and values of the first token of a text."""
    query, value = torch.randn(1, 4, 32), torch.randn(1, 2, 32)
    key = torch.randn(1, 2, 32).as_strided((1, 2, 32), (7, 32, 1))
    assert key.is_contiguous()
    made = attend(query, key, value, torch.tensor([0]), torch.tensor([0, 1]))
    assert torch.equal(made, value.repeat_interleave(2, 1))


def test_heads_that_lie_apart_and_every_number_of_threads() -> None:
    query, key, value, texts = some(torch.bfloat16, 8, 8, 64, [500, 700])
    expected = attend(query, key, value, *indices(texts))
    apart = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (key, value)]
    assert apart[0].stride(1) > apart[0].stride(0)
    assert torch.equal(attend(query, *apart, *indices(texts)), expected)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(attend(query, key, value, *indices(texts)), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "before", "new"),
    [
        (4, 1, 16, 0, 1),
        (6, 2, 48, 250, 17),
        (3, 3, 128, 0, 130),
        (70, 1, 16, 5, 16),  # more heads share keys than a block has queries
        (5, 1, 32, 71, 75),
        (2, 1, 80, 143, 7),  # too few tokens
    ],
)
def test_tokens_of_a_prompt_share_rows(
    tier: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int, before: int, new: int
) -> None:
    length = before + new
    query = torch.randn(new, heads, width).to(dtype)
    key, value = (torch.randn(2 * length, kv_heads, width).to(dtype) for _ in range(2))
    rows = torch.randperm(2 * length)[:length]
    starts, ends = torch.zeros(new, dtype=torch.int64), torch.arange(before, length) + 1
    starts[new // 2 :] = min(3, before)  # some look back less far
    made = attend(query, key, value, rows, starts, ends)
    texts = [rows[start:end] for start, end in zip(starts, ends, strict=True)]
    assert distance(made, naive(query, key, value, texts, 0, None)) < CLOSE[dtype]
    if new < PROMPT:
        assert torch.equal(made, attend(query, key, value, *indices(texts)))
    for first in range(
        0, new - PROMPT + 1, 4
    ):  # the bits of a token are the same in other prompts from that row on
        for part in (slice(first, new), slice(0, first + PROMPT)):
            if starts[part][0] == starts[0]:
                again = attend(query[part], key, value, rows, starts[part], ends[part])
                assert torch.equal(again, made[part])


@pytest.mark.parametrize("window", [1, 30, 100])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("dtype", CLOSE)
def test_a_prompt_with_a_window_and_sinks(tier: str, dtype: torch.dtype, window: int, softcap: float) -> None:
    query, key, value, (rows,) = some(dtype, 12, 4, 32, [160])
    query, ends = torch.randn(90, 12, 32).to(dtype), torch.arange(70, 160) + 1
    starts, sinks = (ends - window).clamp(min=0), torch.linspace(-2, 3, 12)
    made = attend(query, key, value, rows, starts, ends, softcap=softcap, sinks=sinks)
    texts = [rows[start:end] for start, end in zip(starts, ends, strict=True)]
    assert distance(made, naive(query, key, value, texts, softcap, sinks)) < CLOSE[dtype]


def test_prompts_beside_steps() -> None:
    """Two prompts and single tokens, in one call as each by itself."""
    query, key, value, rows = some(torch.float32, 8, 2, 32, [40, 3, 70, 90])
    query = torch.randn(1 + 20 + 1 + 1 + 70, 8, 32)
    begin = torch.tensor([0, *map(len, rows)]).cumsum(0)
    counts = (1, 0), (20, 0), (1, 1), (1, 2), (70, 3)
    ends = torch.cat([torch.arange(begin[t + 1] - n, begin[t + 1]) + 1 for n, t in counts])
    starts = torch.cat([begin[t].expand(n) for n, t in counts])
    made = attend(query, key, value, torch.cat(rows), starts, ends)
    for part in torch.arange(len(query)).split([n for n, _ in counts]):
        alone = attend(query[part], key, value, torch.cat(rows), starts[part], ends[part])
        assert torch.equal(made[part], alone)


def test_scores_that_grow_and_what_is_no_number() -> None:
    """Weights are relative to the largest score so far, which later rows exceed; NaN stays with who looks at it."""
    query, key = torch.ones(100, 1, 16), torch.arange(100.0)[:, None, None].expand(100, 1, 16).contiguous()
    value, rows, starts = torch.randn(100, 1, 16), torch.arange(100), torch.zeros(100, dtype=torch.int64)
    made = attend(query, key, value, rows, starts, rows + 1, scale=10.0)
    torch.testing.assert_close(made, value)
    key[80] = torch.nan
    made = attend(query, key, value, rows, starts, rows + 1, scale=10.0)
    assert torch.equal(made.isnan().flatten(1).any(1), rows >= 80)


def test_texts_in_several_passes() -> None:
    """Results that wait for each other are bounded: 4,096 values of each of 1,500 tokens do not wait at once."""
    query, key, value = torch.randn(1500, 64, 64), *(torch.randn(1500, 1, 64) for _ in range(2))
    rows, starts = torch.arange(1500), torch.zeros(1500, dtype=torch.int64)
    made = attend(query.flip(0), key, value, rows, starts, rows.flip(0) + 1).flip(0)  # this is no prompt
    for t in (0, 255, 256, 1023, 1024, 1025, 1499):
        one = attend(query[t : t + 1], key, value, rows, torch.tensor([0, t + 1]))
        assert torch.equal(made[t : t + 1], one)


def test_large_scores_and_what_is_not_finite() -> None:
    query, key, value, texts = some(torch.float32, 2, 1, 16, [20])
    made = attend(100 * query, key, value, *indices(texts))
    assert distance(made, naive(100 * query, key, value, texts, 0, None)) < 1e-5
    value[texts[0][3], 0, 5] = torch.nan
    made = attend(query, key, value, *indices(texts))
    assert made[0, :, 5].isnan().all()
    assert made[0, :, :5].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    query, key, value, texts = some(torch.float32, 4, 2, 16, [3, 2])
    rows, starts = indices(texts)
    for wrong in (
        (query, key[:, :, :8], value, rows, starts),
        (query, key.bfloat16(), value, rows, starts),
        (query, key, value.flip(0)[:-1], rows, starts),
        (query, key, value, rows.int(), starts),
        (query, key, value, rows, starts + 1),
        (query, key, value, rows - 100, starts),
        (query, key, value, rows + len(key), starts),
        (query, key, value, rows, torch.tensor([0, 0, 5])),
        (query[:, :3], key, value, rows, starts),
        (query, key, value, rows, starts, starts[1:]),
        (query, key, value, rows, starts[:-1], starts[:-1]),
        (query, key, value, rows, starts[:-1], starts[1:] + 1),
        (query, key, value, rows, starts[:-1], starts[1:].int()),
        (query, key, value, rows, starts[:-1] - 1, starts[1:]),
        (query[:, :, :8].contiguous(), key[:, :, :8], value[:, :, :8], rows, starts),
    ):
        with pytest.raises(ShapeError, match="attention"):
            attend(*wrong)
    assert not attends(query[:, :, :8])
    assert not attends(query.double())
