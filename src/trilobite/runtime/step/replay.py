"""A model's forward that runs a step of decoding from a list, once it has seen two of them and compared one.

Beside the products, a token's time goes to Python: modules, wrappers, checks, small operators. The first two steps are
recorded (`trace.py`), made runnable (`lower.py`), and the next ones run both ways: only where all bits are the same does
the list run alone. Whatever is not such a step goes to the model's own forward, and so does everything where a step
cannot be a list; one line of the log says why.
"""

import functools
import logging
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from trilobite.errors import one_line
from trilobite.kernels import ops
from trilobite.runtime.attention import ATTENTION
from trilobite.runtime.modules.residence import AsStored, PackedModule
from trilobite.runtime.step.lower import Lowered, lower
from trilobite.runtime.step.trace import Trace, Unsuited, differ, record
from trilobite.runtime.step.watch import Watch

log = logging.getLogger(__name__)
COMPARED = 2
"""Steps that run both ways."""
KNOWN = frozenset(
    (
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "return_dict",
    )
)
ASKED = ("output_attentions", "output_hidden_states", "output_router_logits")
LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class Step:
    """What a model calls as its `forward`. `why`: the reason why steps are not replayed, None where there is none."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Nothing is known yet."""
        self._model = weakref.ref(model)
        self.lock = threading.Lock()
        self.traces: list[Trace] = []
        self.ready: Lowered | None = None
        self.compared = 0
        self.why: str | None = None
        self.__doc__ = type(model).forward.__doc__

    @property
    def model(self) -> PreTrainedModel:
        """Whose forward it is; that keeps it, not the other way round."""
        model = self._model()
        assert model is not None
        return model

    @property
    def __wrapped__(self) -> Any:
        """For those who ask for its signature."""
        return functools.partial(type(self.model).forward, self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Step":
        """Of the copy, and without what belongs to this model's tensors."""
        return Step(memo[id(self.model)])

    def __reduce__(self) -> tuple[type, tuple[PreTrainedModel]]:
        """As `copy` does it."""
        return Step, (self.model,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        named = {"input_ids": args[0], **kwargs} if len(args) == 1 and "input_ids" not in kwargs else kwargs
        if self.why is None and len(args) < 2 and self._is_step(named) and self.lock.acquire(blocking=False):
            try:
                return self._step(named)
            finally:
                self.lock.release()
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)

    def _is_step(self, kwargs: dict[str, Any]) -> bool:
        """Whether this is one new token of one text whose cache is transformers' own, and nothing else is asked for."""
        ids: Any = kwargs.get("input_ids")
        cache: Any = kwargs.get("past_key_values")
        if type(ids) is not Tensor or ids.shape != (1, 1) or type(cache) is not DynamicCache:
            return False
        keep = kwargs.get("logits_to_keep", 0)
        return (
            ids.is_cpu
            and ids.dtype == torch.int64
            and _undisturbed()
            and all(v is None for k, v in kwargs.items() if k not in KNOWN)
            and self._caches(kwargs.get("use_cache"))
            and kwargs.get("return_dict") is not False
            and type(keep) is int
            and keep >= 0
            and _grows(cache)
            and _follows(cache.get_seq_length(), kwargs.get("attention_mask"), kwargs.get("position_ids"))
        )

    def _caches(self, asked: bool | None) -> bool:
        return bool(self.model.config.use_cache if asked is None else asked)

    def _step(self, kwargs: dict[str, Any]) -> Any:
        try:
            if self.ready is not None and not self.watch.holds():
                self._forget()
            if self.ready is None:
                return self._record(kwargs)
            if self.compared < COMPARED:
                return self._compare(kwargs)
            return self._replay(kwargs)
        except Unsuited as e:
            self.why = str(e)
            self._forget()
            log.info("%s: steps run as transformers runs them: %s", type(self.model).__name__, e)
            return self._forward(**kwargs)

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those of a step that is recorded: with its position, and without a mask of ones."""
        length = kwargs["past_key_values"].get_seq_length()
        position = torch.full((1, 1), length, dtype=torch.int64)
        ids, cache = kwargs["input_ids"], kwargs["past_key_values"]
        return {"input_ids": ids, "position_ids": position, "past_key_values": cache, "use_cache": True}

    def _record(self, kwargs: dict[str, Any]) -> Any:
        self._check_model(kwargs["past_key_values"])
        kept = _Kept(kwargs["past_key_values"])
        try:
            trace = record(self.model, self._forward, self._arguments(kwargs))
            self.traces.append(trace)
            if len(self.traces) == 2:
                self._prepare(*self.traces)
                self.traces = []
        except Exception as e:
            kept.restore()
            raise _unsuited(e) from e
        return trace.result

    def _check_model(self, cache: DynamicCache) -> None:
        config = self.model.config
        if config.is_encoder_decoder:
            raise Unsuited("it is an encoder and a decoder")
        if config.get_text_config()._attn_implementation != ATTENTION:
            raise Unsuited(
                f"its attention is {config.get_text_config()._attn_implementation!r}, not the engine's"
            )
        packed = (m for m in self.model.modules() if isinstance(m, PackedModule))
        if not all(isinstance(m.residence, AsStored) for m in packed):
            raise Unsuited("its experts stream, or lie elsewhere")
        if any(m._forward_hooks or m._forward_pre_hooks for m in self.model.modules()):
            raise Unsuited("there are hooks on its modules")
        if any("forward" in m.__dict__ for m in self.model.modules() if m is not self.model):
            raise Unsuited("modules of it got another forward")
        if self.model.training:
            raise Unsuited("it is in training mode")
        expected = DynamicCache(config=config).layers
        windows = [
            [getattr(x, "sliding_window", None) for x in layers] for layers in (expected, cache.layers)
        ]
        types = [[type(x) for x in layers] for layers in (expected, cache.layers)]
        if windows[0] != windows[1] or types[0] != types[1]:
            raise Unsuited("its cache is of another kind than its configuration's")
        if getattr(config.get_text_config(), "attention_chunk_size", None):
            raise Unsuited("it attends in chunks")

    def _prepare(self, first: Trace, second: Trace) -> None:
        result = second.result
        if not isinstance(result, ModelOutput) or not isinstance(result.get("logits"), Tensor):
            raise Unsuited(f"it returns a {type(result).__name__}")
        why = differ(first, second)
        if why:
            raise Unsuited(why)
        extra = [k for k, v in result.items() if v is not None and k not in ("logits", "past_key_values")]
        if extra or result.logits.shape[:2] != (1, 1):
            raise Unsuited(f"it returns {', '.join(extra) or list(result.logits.shape)}")
        self.ready = lower(second, result.logits)
        self.kind = type(result)
        self.compared = 0
        self.watch = Watch(self.model, second.called, self.ready.fixed)

    def _forget(self) -> None:
        self.ready, self.traces = None, []

    def _run(self, cache: DynamicCache, ids: Tensor) -> Tensor:
        """The logits, and one more row in every layer of the cache."""
        ready = self.ready
        assert ready is not None
        layers = cache.layers
        ready.words[0].value, ready.words[1].value = int(ids), cache.get_seq_length()
        for i, rows in ready.rows.items():
            rows.follow(layers[i])
        try:
            for call, args, kwargs in ready.steps:
                call(*args, **kwargs)
        except BaseException:
            for rows in ready.rows.values():
                rows.forget()
            raise
        for i, rows in ready.rows.items():
            rows.advance(layers[i])
        return ready.logits.clone()

    def _replay(self, kwargs: dict[str, Any]) -> Any:
        cache = kwargs["past_key_values"]
        return self.kind(logits=self._run(cache, kwargs["input_ids"]), past_key_values=cache)

    def _compare(self, kwargs: dict[str, Any]) -> Any:
        cache = kwargs["past_key_values"]
        kept = _Kept(cache)
        expected = self._forward(**kwargs)
        after = _Kept(cache)
        kept.restore()
        try:
            logits = self._run(cache, kwargs["input_ids"])
        except Exception as e:
            kept.restore()
            raise _unsuited(e) from e
        same_rows = all(
            _same_bits(keys, x.keys) and _same_bits(values, x.values) for x, keys, values, _ in after.layers
        )
        if not _same_bits(expected.logits, logits):
            kept.restore()
            raise Unsuited("its logits are other ones")
        if not same_rows:
            kept.restore()
            raise Unsuited("its keys and values are other ones")
        self.compared += 1
        return self.kind(logits=logits, past_key_values=cache)


def _unsuited(e: Exception) -> Unsuited:
    """What went wrong with a list; where the model itself is to blame, its own forward says so again."""
    return e if isinstance(e, Unsuited) else Unsuited(f"{type(e).__name__}: {one_line(e)}")


def _undisturbed() -> bool:
    """Whether nobody records, compiles, converts or differentiates what torch does."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def _grows(cache: DynamicCache) -> bool:
    """Whether every layer of a cache holds keys and values of some tokens, and of nothing else."""
    layers = cache.layers
    return (
        bool(layers) and not cache.offloading and all(type(x) in LAYERS and x.is_initialized for x in layers)
    )


def _follows(length: int, mask: Tensor | None, position: Tensor | None) -> bool:
    """Whether a token stands behind so many others, and sees them all."""
    if mask is not None and not (type(mask) is Tensor and mask.shape == (1, length + 1) and bool(mask.all())):
        return False
    return position is None or (position.shape == (1, 1) and int(position) == length)


class _Kept:
    """What a cache holds, to go back to."""

    def __init__(self, cache: DynamicCache) -> None:
        self.layers = [(x, x.keys, x.values, getattr(x, "cumulative_length", None)) for x in cache.layers]

    def restore(self) -> None:
        for layer, keys, values, length in self.layers:
            layer.keys, layer.values = keys, values
            if length is not None:
                layer.cumulative_length = length


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def replay_steps(model: PreTrainedModel) -> None:
    """Let a model on the CPU replay steps of decoding where it can."""
    if ops.attends(torch.zeros(1, 16)):
        model.forward = Step(model)
