"""What a step of decoding is, and what its cache held before it."""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers import cache_utils as theirs

from trilobite.runtime.attention import ATTENTION, BESIDE_OWN
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.modules.residence import AsStored, PackedModule, modules_that_run
from trilobite.runtime.step.index import INDICES, index_of
from trilobite.runtime.step.states import states_of
from trilobite.runtime.step.unsuited import NotNow, Unsuited

ROWS = (theirs.DynamicLayer, theirs.DynamicSlidingWindowLayer)
BOTH = (
    theirs.LinearAttentionAndFullAttentionLayer,
    theirs.LinearAttentionAndSlidingWindowAttentionLayer,
)
STATES = (theirs.LinearAttentionLayer, *BOTH)
LAYERS = (*ROWS, *STATES, getattr(theirs, "DummyLayer", None))
"""Of caches: keys and values of each token, states of a fixed size, both, and nothing, which the oldest do not know."""
TextCache: TypeAlias = "DynamicCache | EncoderDecoderCache"
CACHES = (DynamicCache, EncoderDecoderCache)
"""Of models without an encoder, and with one."""
ASKED = CACHE, "attention_mask", "use_cache", "return_dict"
KNOWN = (
    frozenset((*ASKED, "input_ids", "position_ids", "logits_to_keep")),
    frozenset((*ASKED, "decoder_input_ids", "encoder_outputs", "decoder_attention_mask")),
)
"""Arguments of a step of theirs."""


def layers_of(cache: TextCache) -> list[Any]:
    """Layers that take a step's keys and values."""
    own = cache if isinstance(cache, DynamicCache) else cache.self_attention_cache
    return own.layers  # type: ignore[no-any-return]


def sources_of(cache: TextCache) -> list[Any]:
    """Layers that hold keys and values of a source."""
    return [] if isinstance(cache, DynamicCache) else cache.cross_attention_cache.layers


def new_cache(config: PreTrainedConfig) -> TextCache:
    """As `generate` makes it for a model."""
    if not config.is_encoder_decoder:
        return DynamicCache(config=config)
    decoder = config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=decoder), DynamicCache(config=decoder))


def is_as_made(cache: TextCache, config: PreTrainedConfig) -> bool:
    """Whether a cache has layers of the kinds that it has for a model's configuration.

    Those of models with an encoder may get layers as these are needed: a configuration counts the encoder's.
    """
    expected, found = (
        [(type(x), getattr(x, "sliding_window", None)) for x in layers_of(each)]
        for each in (new_cache(config), cache)
    )
    if config.is_encoder_decoder:
        expected = [*expected, *[(theirs.DynamicLayer, None)] * len(found)][: len(found)]
    return expected == found


def _holds_rows(layer: Any) -> bool:
    return type(layer) in (*ROWS, *BOTH) or index_of(layer) is not None


def _is_known(layer: Any) -> bool:
    return type(layer) in LAYERS or index_of(layer) is not None


def token_name(kwargs: dict[str, Any]) -> str:
    """By what name a model's forward takes the token of a step."""
    return "input_ids" if kwargs.get("encoder_outputs") is None else "decoder_input_ids"


def texts_of_step(kwargs: dict[str, Any], config: PreTrainedConfig) -> int:
    """Of how many texts this is one new token each, in a cache that is transformers' own, and nothing else is asked for.

    0: of none
    """
    encoded = kwargs.get("encoder_outputs") is not None
    ids: Any = kwargs.get(token_name(kwargs))
    cache: Any = kwargs.get(CACHE)
    if type(ids) is not Tensor or ids.dim() != 2 or type(cache) is not (CACHES[encoded]):
        return 0
    texts, new = ids.shape
    keep, caches = kwargs.get("logits_to_keep", 0), kwargs.get("use_cache")
    is_step = (
        new == 1
        and ids.is_cpu
        and ids.dtype == torch.int64
        and undisturbed()
        and all(v is None for k, v in kwargs.items() if k not in KNOWN[encoded])
        and bool(config.use_cache if caches is None else caches)
        and kwargs.get("return_dict") is not False
        and type(keep) is int
        and keep >= 0
        and grows(cache)
        and (_read_sources(cache, kwargs) if encoded else _follows(cache, kwargs))
    )
    return texts if is_step else 0


def _follows(cache: DynamicCache, kwargs: dict[str, Any]) -> bool:
    """Whether tokens stand behind all others, and see them but for what fills the texts of a batch up in front."""
    texts, length = len(kwargs["input_ids"]), cache.get_seq_length()
    mask, position = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if _see_all(mask, (texts, length + 1)):
        shapes = (1, 1), (texts, 1)
        return position is None or (position.shape in shapes and bool((position == length).all()))
    return (
        texts > 1
        and type(mask) is Tensor
        and mask.shape == (texts, length + 1)
        and bool(mask[:, -1].all() and (mask[:, 1:] >= mask[:, :-1]).all())
        and type(position) is Tensor
        and position.shape == (texts, 1)
    )


def padding(kwargs: dict[str, Any]) -> list[int] | None:
    """How many tokens fill up the texts of a batch in front of each, or None where none does."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("encoder_outputs") is not None or mask is None or len(mask) == 1 or bool(mask.all()):
        return None
    return (mask == 0).sum(1).tolist()  # type: ignore[no-any-return]


def _read_sources(cache: EncoderDecoderCache, kwargs: dict[str, Any]) -> bool:
    """Whether tokens see all of their translations so far, and of their sources, which may end earlier than others."""
    texts = len(kwargs["decoder_input_ids"])
    length, source = cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()
    mask = kwargs.get("attention_mask")
    return _see_all(kwargs.get("decoder_attention_mask"), (texts, length + 1)) and (
        mask is None
        or (
            type(mask) is Tensor
            and mask.shape == (texts, source)
            and (bool(mask.all()) or bool((mask[:, 0] > 0).all() and (mask[:, 1:] <= mask[:, :-1]).all()))
        )
    )


def _see_all(mask: Tensor | None, shape: tuple[int, int]) -> bool:
    return mask is None or (type(mask) is Tensor and mask.shape == shape and bool(mask.all()))


def lengths_of_sources(kwargs: dict[str, Any]) -> list[int] | None:
    """Of all texts, or None where none is longer than another."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("encoder_outputs") is None or mask is None or bool(mask.all()):
        return None
    return mask.sum(1).tolist()  # type: ignore[no-any-return]


def texts_in_pages(kwargs: dict[str, Any]) -> int:
    """Of how many texts this is one token each, in a server's batch; 0: of none."""
    ids: Any = kwargs.get("input_ids")
    is_step = (
        type(ids) is Tensor
        and ids.dim() == 2
        and len(ids) == 1
        and kwargs.get("read_index") is not None
        and len(kwargs["cu_seq_lens_q"]) == ids.shape[1] + 1  # all of them have tokens in a batch
        and kwargs.get("attention_mask") is None
        and undisturbed()
    )
    return ids.shape[1] if is_step else 0


def undisturbed() -> bool:
    """Whether nobody records, compiles, converts or differentiates what torch does."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def grows(cache: TextCache) -> bool:
    """Whether every layer of a cache holds keys and values of some tokens, or states, and nothing else."""
    if isinstance(cache, DynamicCache):
        return not cache.offloading and _grow(cache.layers)
    own, source = cache.self_attention_cache, cache.cross_attention_cache
    plain = type(own) is type(source) is DynamicCache and not (own.offloading or source.offloading)
    if not plain or len(own.layers) != len(source.layers):
        return False
    # They have as many layers as the encoder, where it has more than the decoder.
    pairs = zip(own.layers, source.layers, strict=True)
    used = [(i, a, b) for i, (a, b) in enumerate(pairs) if a.is_initialized or b.is_initialized]
    read = all(type(b) is theirs.DynamicLayer and cache.is_updated.get(i) for i, _, b in used)
    return read and _grow([a for _, a, _ in used])


def _grow(layers: list[Any]) -> bool:
    return any(_holds_rows(x) for x in layers) and all(_is_known(x) and _begun(x) for x in layers)


def _begun(layer: Any) -> bool:
    """Whether a layer of the cache has met the text, and keeps no more of it than a step needs."""
    kind = type(layer)
    states = kind not in STATES or (not layer.record_past and all(layer.has_previous_state.values()))
    return states and (kind is theirs.LinearAttentionLayer or bool(layer.is_initialized))


def check_model(model: PreTrainedModel) -> None:
    """Raises Unsuited for what a model is."""
    strange = sorted({type(x).__name__ for x in layers_of(new_cache(model.config)) if not _is_known(x)})
    if strange:
        raise Unsuited(f"its cache has layers that are {', '.join(strange)}")
    implementation = model.config.get_text_config()._attn_implementation
    if implementation not in (ATTENTION, BESIDE_OWN):
        raise Unsuited(f"its attention is {implementation!r}, not the engine's")
    residences = (m.residence for m in modules_that_run(model) if isinstance(m, PackedModule))
    if not all(
        r is None or isinstance(r, AsStored) for r in residences
    ):  # a copy has none before its first call
        raise Unsuited("its experts stream, or lie elsewhere")


def check_state(model: PreTrainedModel, cache: TextCache) -> None:
    """Raises NotNow for what a model is at this moment, and for caches that are not its own."""
    modules = list(modules_that_run(model))
    if any(m._forward_hooks or m._forward_pre_hooks for m in modules):
        raise NotNow("there are hooks on its modules")
    if any("forward" in m.__dict__ for m in modules if m is not model):
        raise NotNow("modules of it got another forward")
    if model.training:
        raise NotNow("it is in training mode")
    if not is_as_made(cache, model.config):
        raise NotNow("its cache is of another kind than its configuration's")


class Kept:
    """What a cache holds, to go back to."""

    def __init__(self, cache: TextCache) -> None:
        """Tensors of rows, which are never changed in place, and copies of states, which are."""
        indices = (field for _, field in INDICES.values())
        rows = ("keys", "values", "cumulative_length", *indices, "is_indexer_initialized")
        layers = [*layers_of(cache), *sources_of(cache)]
        self.layers = [(x, {name: getattr(x, name) for name in rows if hasattr(x, name)}) for x in layers]
        self.states = [{key: (t, t.clone()) for key, t in states_of(x).items()} for x in layers]

    def restore(self) -> None:
        """Go back."""
        for (layer, held), states in zip(self.layers, self.states, strict=True):
            vars(layer).update(held)
            for (kind, i), (t, copy) in states.items():
                getattr(layer, kind)[i] = t.copy_(copy)

    def same_as(self, cache: TextCache) -> bool:
        """Whether a cache holds the same bits now."""
        layers = zip(self.layers, self.states, [*layers_of(cache), *sources_of(cache)], strict=True)
        for (_, held), states, layer in layers:
            now = states_of(layer)
            pairs = [(t, getattr(layer, name)) for name, t in held.items() if isinstance(t, Tensor)]
            pairs += [(copy, now[key]) for key, (_, copy) in states.items()]
            if not all(same_bits(a, b) for a, b in pairs):
                return False
        return True


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, signs of zeros and NaNs included."""
    ours, theirs = (t.contiguous().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(ours, theirs)
