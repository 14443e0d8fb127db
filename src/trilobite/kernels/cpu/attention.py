"""Attention of the newest token of each text, or of those of a prompt, over keys and values anywhere in a cache."""

import ctypes

import torch
from torch import Tensor

from trilobite.errors import ShapeError
from trilobite.kernels.cpu import native
from trilobite.kernels.cpu.engine import team
from trilobite.kernels.cpu.matrix import DTYPES, dtype_code

LANES = 16
"""Heads are a multiple of so many values wide."""
PROMPTS = frozenset(("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_gfni", "avx512_bf16"))
"""Tiers that read a prompt faster than torch's product, which has AMX; ARM is not measured."""

_lib, _ = native.load()


def attends(query: Tensor) -> bool:
    """Whether the native library attends with such queries [.., D]."""
    return (
        _lib is not None
        and query.device.type == "cpu"
        and query.dtype in DTYPES
        and query.shape[-1] % LANES == 0
        and not (torch.is_grad_enabled() and query.requires_grad)
    )


def reads_prompts() -> bool:
    """Whether `attend` is faster than torch where texts are the tokens of a prompt."""
    return _lib is not None and _lib.trilobite_tier().decode() in PROMPTS


def _strides(t: Tensor) -> list[int]:
    """Those that say where elements lie: of a dimension of one, torch may hold any number."""
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Raise ShapeError for what `attend` does not take. starts, ends: [texts]."""
    texts, heads, width = query.shape
    if (
        key.shape != value.shape
        or _strides(key) != _strides(value)
        or key.shape[2:] != (width,)
        or key.stride(2) != 1
        or not query.dtype == key.dtype == value.dtype
        or not starts.shape == ends.shape == (texts,)
        or not rows.dtype == starts.dtype == ends.dtype == torch.int64
        or (sinks is not None and sinks.shape != (heads,))
        or (bias is not None and (bias.dim() != 2 or len(bias) != heads or not bias.numel()))
    ):
        raise ShapeError(
            f"attention: queries {list(query.shape)} {query.dtype}, keys {list(key.shape)} {key.dtype} of strides "
            f"{key.stride()}, values {list(value.shape)} {value.dtype} of strides {value.stride()}"
        )
    if texts and (int(starts.min()) < 0 or int(ends.max()) > len(rows)):
        raise ShapeError(
            f"attention: texts from {int(starts.min())} to {int(ends.max())} of {len(rows)} rows"
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q K^T) V for one query of each text; K and V are some rows of a cache, in any order.

    query: [texts, heads, D] fp32, fp16 or bf16    key, value: [cache rows, kv heads, D], of that dtype and of the same
    strides, D contiguous    rows: [S] int64, those of the first text, then those of the second ..
    starts: [texts + 1] int64: where in `rows` each text begins, the last one its end
    ends: [texts] int64, where texts share rows: where in `rows` those of each end; `starts` is [texts], too, then
    scale: of the scores, default D^-1/2    softcap: bound of the scores    sinks: [heads], scores of nothing
    bias: [heads, distances], added to scores: the first to that of a text's last row, the second to that of the row
    before it, and the last of all to those beyond
    returns: [texts, heads, D]; scores and sums are fp32
    Raises ShapeError for shapes that do not fit, a text without rows, a row that the cache does not have.
    """
    assert _lib is not None
    texts, heads, width = query.shape
    if ends is None:
        starts, ends = starts[:-1], starts[1:]
    _check(query, key, value, rows, starts, ends, sinks, bias)
    query, rows, starts, ends = (t.contiguous() for t in (query, rows, starts, ends))
    sinks, bias = (None if t is None else t.float().contiguous() for t in (sinks, bias))
    out = torch.empty_like(query)
    pointers = [
        None if t is None else t.data_ptr() for t in (query, key, value, out, rows, starts, ends, sinks, bias)
    ]
    sizes = (
        dtype_code(query, "query"),
        texts,
        heads,
        key.shape[1],
        width,
        len(key),
        key.stride(0),
        key.stride(1),
        0 if bias is None else bias.shape[1],
    )
    numbers = (width**-0.5 if scale is None else scale, softcap or 0.0)
    _lib.trilobite_attention(ctypes.byref(native.AttentionArgs(*pointers, *sizes, team(None), *numbers)))
    return out
