"""Attention of models on the CPU: a step of decoding reads keys and values, or latents, where they lie, natively.

So does a prompt where that is faster (`reads_prompts`).
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from trilobite.kernels.ops import attend, attends, needs_gradient, reads_prompts
from trilobite.runtime.latent import Latents, attend_to_latents, latents_of

ATTENTION = "trilobite"
"""Its name in transformers' registry."""
BESIDE_OWN = "trilobite_beside_own"
"""That of the same for models that have their own attention and no other: heads may attend to nothing, which torch's
product does not know, or nobody has written that they would do with it."""


class Observer(Protocol):
    """Who writes down the calls of the engine's attention."""

    def silence(self) -> AbstractContextManager[None]:
        """While what torch does belongs to a call that is written down as one."""

    def masked(self, made: Tensor | None) -> None:
        """A mask that calls will have, made of one that the model was given."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: Any, made: Tensor
    ) -> None:
        """One call, its arguments and what it made.

        Of `kwargs["latents"]`, where it is there, key and value are the latents and the rotated keys.
        """


class _Observed(threading.local):
    observer: Observer | None = None


_observed = _Observed()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """For the while, tell of every call in this thread."""
    _observed.observer = observer
    try:
        yield
    finally:
        _observed.observer = None


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' `sdpa`; for texts of one new token each, and for prompts, the CPU engine in its place where it can.

    query: [B, heads, T, D]    key: [B, kv heads, S, D]    value: [B, kv heads, S, D or less (MLA)]
    attention_mask: [B, 1, T, S] bool, or what `sdpa` takes
    returns: [B, T, heads, D]    The keyword arguments are those of transformers' attention functions.
    """
    attention_mask = _with_choice(module, key, attention_mask, kwargs)
    made, key, value = _step(module, query, key, value, _of_a_step(query, attention_mask), kwargs)
    if made is None and not torch.compiler.is_compiling() and reads_prompts():
        made = _prompt(module, query, key, value, attention_mask, kwargs)
    if made is not None:
        return made, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]


def attention_beside_own(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The same where what the engine does not know is the model's own: with sinks, `s_aux` [heads], or without.

    attention_mask: [B, 1, T, S], 0 where a token may look, and the least number elsewhere
    """
    attention_mask = _with_choice(module, key, attention_mask, kwargs)
    mask = None if attention_mask is None else attention_mask == 0
    made, key, value = _step(module, query, key, value, mask, kwargs)
    if made is None and not torch.compiler.is_compiling():
        made = _prompt(module, query, key, value, mask, kwargs)
    if made is not None:
        return made, None
    own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return own(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]


def _with_choice(
    module: nn.Module, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """The mask, and in it of each token's rows those that the model's index of keys has chosen, alone.

    Models make such masks themselves for the implementations that they know by name, `eager` and `sdpa`, and hand the
    choice to all others: rows, `indices` [B, T, k], or blocks of them, `block_indices`.
    """
    indices, blocks = (kwargs.pop(name, None) for name in ("indices", "block_indices"))
    length = key.shape[2]
    if blocks is not None:
        if blocks.shape[3] * module.indexer.block_size >= length:  # type: ignore[operator, union-attr]
            return mask  # of all blocks
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(length - blocks.shape[2], length, device=key.device)[None]
        made = module.indexer.build_block_mask(blocks, mask, length, key.dtype, key.device, positions)  # type: ignore[operator, union-attr]
        return made  # type: ignore[no-any-return]
    if indices is None:
        return mask
    chosen = torch.zeros(*indices.shape[:2], length, dtype=torch.bool, device=key.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if mask is None or mask.dtype == torch.bool:
        return chosen if mask is None else mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(key.dtype).min)


def _step(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor, Tensor]:
    """A step of decoding by the engine, or None; and keys and values, made of latents where others need them."""
    latents = latents_of(module, key)
    if latents is not None:
        made = _to_latents(latents, query, key, value, mask, kwargs)
        if made is not None:
            return made, key, value
        key, value = latents.expanded(key, value)
    return _observed_natively(query, key, value, mask, kwargs), key, value


def _of_a_step(query: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask of one new token a text, as bool where its numbers say no more: 0, or as little as there is."""
    if mask is None or mask.dtype == torch.bool or query.shape[2] != 1 or torch.compiler.is_compiling():
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else mask


def _observed_natively(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """A step of decoding by the engine: [B, 1, heads, D]; None where others have to do it."""
    observer = _observed.observer
    with nullcontext() if observer is None else observer.silence():
        made = _natively(query, key, value, mask, kwargs)
    if made is not None and observer is not None:
        observer.attend(query, key, value, mask, kwargs, made)
    return made


def _to_latents(
    latents: Latents,
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """A step of decoding in the space of latents: [B, 1, heads, v]; None where keys and values are needed."""
    width = latent.shape[3] + rotated.shape[3]
    if (
        query.shape[2] != 1
        or not attends(query.new_empty(0, width))
        or torch.is_grad_enabled()
        or kwargs.get("scaling") is None
        or not latent.dtype == rotated.dtype == query.dtype
    ):
        return None
    observer = _observed.observer
    with nullcontext() if observer is None else observer.silence():
        halves = latents.halves(query.dtype)
    inside = latents.query(query, halves)
    with nullcontext() if observer is None else observer.silence():
        rows = torch.cat((latent, rotated), -1)
        sums = _natively(inside, rows, rows, mask, kwargs)
    if sums is None:
        return None
    if observer is not None:
        observer.attend(inside, latent, rotated, mask, {**kwargs, "latents": latents}, sums)
    return latents.values(sums, halves)


def _natively(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """`_observed_natively`, whoever observes."""
    width = value.shape[3]
    if query.shape[2] == 1 and width < key.shape[3] and attends(query):
        value = pad(value, (0, key.shape[3] - width))
    if not _is_step(query, key, value, kwargs):
        return None
    read = _read(key, mask)
    bias = kwargs.get("position_bias")
    if read is None or (bias is not None and not _tells_distances(bias, query, key, len(read[0]))):
        return None
    if bias is not None:
        bias = bias[0, :, 0].flip(-1) if bool(bias.any()) else None
    (batch, kv_heads, length, wide), (apart, heads, row, _) = key.shape, key.stride()
    shape = (batch - 1) * (apart // row) + length, kv_heads, wide
    keys, values = (t.as_strided(shape, (row, heads, 1)) for t in (key, value))
    scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    made = attend(query[:, :, 0], keys, values, *read, scale=scale, sinks=sinks, bias=bias)
    return made[:, None, :, :width]


def _tells_distances(bias: Tensor, query: Tensor, key: Tensor, rows: int) -> bool:
    """Whether what is added to scores is zero, or says how far before a token each row lies, of which it looks at all.

    bias: [1, heads, 1, S]    rows: those that are looked at, of all texts
    """
    batch, _, length, _ = key.shape
    fits = bias.shape == (1, query.shape[1], 1, length)
    return fits and (rows == batch * length or not bool(bias.any()))


def _is_step(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether these are the newest tokens of some texts, and nothing is asked for that the engine does not know."""
    return (
        query.shape[2] == 1
        and not torch.compiler.is_compiling()
        and attends(query)
        and _is_plain(query, key, value, kwargs)
        and key.stride() == value.stride()
        and key.stride(3) == 1
        and (len(key) == 1 or key.stride(0) % key.stride(2) == 0)
    )


def _prompt(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """Prompts by the engine: [B, T, heads, D]; None where others have to do it."""
    batch, _, new, wide = query.shape
    length, width = value.shape[2:]
    causal = kwargs.get("is_causal")
    if (
        new < 2
        or not attends(query)
        or needs_gradient(query, key, value)
        or kwargs.get("position_bias") is not None
        or not (getattr(module, "is_causal", True) if causal is None else causal)
    ):
        return None
    starts = _looks_back(mask, batch, new, length)
    value = pad(value, (0, wide - width)) if starts is not None and width < wide else value
    if starts is None or not _is_plain(query, key, value, kwargs):
        return None
    if key.stride() != value.stride() or key.stride(3) != 1:
        key, value = key.contiguous(), value.contiguous()
    rows, scale, sinks = torch.arange(length), kwargs.get("scaling"), kwargs.get("s_aux")
    texts = zip(*(t.transpose(1, 2) for t in (query, key, value)), starts, strict=True)
    ends = rows[length - new :] + 1
    made = [attend(q, k, v, rows, begins, ends, scale=scale, sinks=sinks) for q, k, v, begins in texts]
    return (made[0][None] if batch == 1 else torch.stack(made))[..., :width]


def _looks_back(mask: Tensor | None, batch: int, new: int, length: int) -> Tensor | None:
    """The first row that each of the newest tokens of a text looks at, of all to its own: [batch, new]; or None.

    mask: [batch or 1, 1, new, length]
    """
    if mask is None:
        return torch.zeros(batch, new, dtype=torch.int64) if new == length else None
    if mask.dtype != torch.bool or mask.shape not in ((1, 1, new, length), (batch, 1, new, length)):
        return None
    rows, ends = torch.arange(length), torch.arange(length - new, length)[:, None] + 1
    starts = ends - mask[:, 0].sum(-1, keepdim=True)
    if not torch.equal(mask[:, 0], (rows >= starts) & (rows < ends)) or not bool((starts < ends).all()):
        return None
    return starts[..., 0].expand(batch, new)


def _is_plain(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether nothing is asked for that the engine does not know."""
    return (
        query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and not any(kwargs.get(name) for name in ("dropout", "softcap", "output_attentions"))
        and kwargs.get("cache") is None
    )


def _read(key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The rows that each text looks at, and where those of each begin; None for masks that are more than that."""
    batch, _, length, _ = key.shape
    step = key.stride(0) // key.stride(2) if batch > 1 else 0
    rows = torch.arange(batch)[:, None] * step + torch.arange(length)
    if mask is None:
        return rows.flatten(), torch.arange(batch + 1) * length
    if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1) or mask.shape[3] < length:
        return None
    seen = mask[:, 0, 0, :length].expand(batch, length)
    counts = seen.sum(1)
    if not bool(counts.all()):
        return None  # a text that looks at nothing
    return rows[seen], torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _quietly(make: Callable[..., Any]) -> Callable[..., Any]:
    """What makes masks, of which nothing is written down: calls of attention tell who observes what a token sees."""

    @functools.wraps(make)
    def quietly(*args: Any, **kwargs: Any) -> Any:
        observer = _observed.observer
        if observer is None:
            return make(*args, **kwargs)
        with observer.silence():
            made = make(*args, **kwargs)
        if kwargs.get("attention_mask") is not None:
            observer.masked(made)
        return made

    return quietly


def attend_natively(model: PreTrainedModel) -> None:
    """Give a model this attention, unless it has one of its own kind; on a GPU it is `sdpa`'s, or the model's."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
        attend_to_latents(model, ATTENTION)
    elif model.config.model_type in PLAIN:
        model.set_attn_implementation(BESIDE_OWN)
        attend_to_latents(model, BESIDE_OWN)


SINKS = ("flint", "gpt_oss", "granitemoe_swa", "hy_v4", "mimo_v2_flash")
"""Architectures whose attention is torch's but for sinks."""
PLAIN = (*SINKS, "nllb-moe", "switch_transformers")
"""These, and those that have no other than a plain one, without which torch's product would do."""
AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, _quietly(sdpa_mask))
AttentionInterface.register(BESIDE_OWN, attention_beside_own)
AttentionMaskInterface.register(BESIDE_OWN, _quietly(eager_mask))
