"""A model's forward that runs a step of decoding from a list, once it has seen two of them and compared two.

Beside the products, a token's time goes to Python: modules, wrappers, checks, small operators. The first two steps are
recorded (`trace.py`), made runnable (`lower.py`), and the next ones run both ways: only where all bits are the same does
the list run alone. Whatever is not such a step goes to the model's own forward, and so does everything where a step
cannot be a list; one line of the log says why.
"""

import dataclasses
import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from trilobite.errors import one_line
from trilobite.kernels import ops
from trilobite.runtime.cache_name import CACHE, OLD
from trilobite.runtime.modules.residence import PackedModule
from trilobite.runtime.step.conditions import (
    Kept,
    TextCache,
    check_model,
    is_as_made,
    is_step_in_pages,
    layers_of,
    lengths_of_sources,
    new_cache,
    same_bits,
    sources_of,
    texts_of_step,
    token_name,
    undisturbed,
)
from trilobite.runtime.step.differ import differ
from trilobite.runtime.step.index import chosen_rows
from trilobite.runtime.step.lower import Lowered, lower
from trilobite.runtime.step.texts import Others
from trilobite.runtime.step.trace import Trace, record
from trilobite.runtime.step.unsuited import NotNow, Unsuited
from trilobite.runtime.step.watch import Watch

log = logging.getLogger(__name__)
RECORDED = 2
"""Steps that are written down, at different positions; of several texts one, where a list of others is right."""
COMPARED = 2
"""Steps that run both ways."""
ENCODED = "encoder_last_hidden_state"
"""What a model with an encoder returns of it."""
WAITS = (4, 16, 64)
"""Steps until the next try after what may pass."""


PagesOf = Callable[[dict[str, Any], int], tuple[Tensor, Tensor, Tensor] | None]
"""Arguments of a server's forward, a layer -> those of `Rows.lie_in`; None where it has none."""


class Step:
    """What a model calls as its `forward`, with a list for steps of so many texts, and others for those of more.

    why: the reason why steps are not replayed, None where there is none    wait: steps until that is looked at again
    """

    def __init__(self, model: PreTrainedModel, texts: int = 1) -> None:
        """Nothing is known yet."""
        self._model, self.texts = weakref.ref(model), texts
        self.others: Others[Step] = Others()
        self.lock = threading.Lock()
        self.traces: list[Trace] = []
        self.ready: Lowered | None = None
        self.compared, self.recorded = 0, RECORDED
        self.why: str | None = None
        self.wait = self.failures = 0
        self.looked = self.was_long = False
        self.most: float | None = None
        self.pages_of: PagesOf | None = None
        self.compared_in_pages = False
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
        if OLD in kwargs and CACHE not in kwargs:
            kwargs[CACHE] = kwargs.pop(OLD)
        named = {"input_ids": args[0], **kwargs} if len(args) == 1 and "input_ids" not in kwargs else kwargs
        if not self.looked and named.get(CACHE) is not None and undisturbed() and _is_one_text(named):
            self._look(named[CACHE])
        run = self._way(named) if len(args) < 2 else None
        if run is not None and self.lock.acquire(blocking=False):
            try:
                return run(named)
            finally:
                self.lock.release()
        return self._forward(*args, **kwargs)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record and compare now, on tokens of nobody."""
        cache, ids = new_cache(self.model.config), torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(1 + RECORDED + COMPARED):
            if self.why is None:
                self(input_ids=ids, use_cache=True, **{CACHE: cache})

    def replay_in_pages(self, pages_of: PagesOf) -> None:
        """From now on, replay steps of one text in a server's pages; its attention does what the recorded one does."""
        self.pages_of, self.compared_in_pages = pages_of, False
        if self.ready is not None:
            self.watch.look_at_configs()

    def _way(self, kwargs: dict[str, Any]) -> Callable[[dict[str, Any]], Any] | None:
        """What runs a step of this kind; None where it is none."""
        encodes = kwargs.get("encoder_outputs") is not None
        if self.why is not None and not self.wait and not encodes:
            return None
        texts = texts_of_step(kwargs, self.model.config)
        if texts > 1:
            return functools.partial(self._step_of, texts)
        if texts == 1:
            return self._step_alone if self._may_go() and self._chooses_all(kwargs[CACHE]) else None
        return self._step_in_pages if self.pages_of is not None and is_step_in_pages(kwargs) else None

    def _may_go(self) -> bool:
        return self.why is None or self.wait > 0

    def _step_alone(self, kwargs: dict[str, Any]) -> Any:
        self.others.turn_to(1, self)
        return self._step(kwargs)

    def _step_of(self, texts: int, kwargs: dict[str, Any]) -> Any:
        """A step of several texts: by their list, once there were enough of them."""
        step = self.others.of(texts, functools.partial(Step, self.model))
        if step is None or not step._may_go():
            return self._forward(**kwargs)
        self.others.turn_to(texts, self)
        step.recorded = 1 if self.others.know_one(self, step) else RECORDED
        return step._step(kwargs)

    @property
    def right(self) -> bool:
        """Whether there is a list that made the bits of the model's own."""
        return self.ready is not None and self.compared == COMPARED

    def rest(self) -> bool:
        """Texts go on elsewhere: keep nothing of them. returns: whether half a list was lost."""
        if self.ready is not None:
            self.ready.forget()
        half = bool(self.traces)
        self.traces = []
        return half

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)

    def _chooses_all(self, cache: TextCache) -> bool:
        """Whether indices of keys, where a step has some, choose all that the cache holds."""
        if self.most is None:
            self.most = chosen_rows(self.model.config, layers_of(cache))
        if cache.get_seq_length() < self.most:
            return True
        if not self.was_long:
            self.was_long = True
            self._say(logging.WARNING, f"from token {self.most + 1:.0f} on its index of keys chooses rows")
        return False

    def _look(self, cache: Any) -> None:
        """Before the first token of a text, say what there is to say of the model, or of a cache of another kind."""
        self.looked = True
        try:
            check_model(self.model)
            if type(cache) is not type(new_cache(self.model.config)):
                self._say(logging.WARNING, f"its cache is a {type(cache).__name__}")
        except Unsuited as e:
            self._fall_back(e)

    def _say(self, level: int, why: str) -> None:
        log.log(level, "%s: steps run as transformers runs them: %s", type(self.model).__name__, why)

    def _fall_back(self, e: Unsuited) -> None:
        """Leave steps to the model: for some of them, or, where it is the model's nature or goes on, for good."""
        self._forget()
        waits = WAITS[self.failures : self.failures + 1] if isinstance(e, NotNow) else ()
        self.failures += 1
        self.why, self.wait = str(e), sum(waits)
        # Nobody expects it of an original, whose experts torch computes.
        packed = any(isinstance(m, PackedModule) for m in self.model.modules())
        quietly = waits or self.texts > 1 or not packed
        self._say(logging.INFO if quietly else logging.WARNING, str(e))

    def _step(self, kwargs: dict[str, Any]) -> Any:
        if self.wait:
            self.wait -= 1
            if self.wait:
                return self._forward(**kwargs)
            self.why = None
        try:
            if self.ready is not None and not self.watch.holds():
                self._forget()
            if self.ready is None:
                return self._record(kwargs)
            if self.compared < COMPARED:
                return self._compare(kwargs)
            return self._run(kwargs)
        except Unsuited as e:
            self._fall_back(e)
            return self._forward(**kwargs)

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those of a step that is recorded: with its position, and without a mask of ones."""
        position = torch.full((1, 1), kwargs[CACHE].get_seq_length(), dtype=torch.int64)
        names = [token_name(kwargs), CACHE, "encoder_outputs"]
        if lengths_of_sources(kwargs):
            names.append("attention_mask")
        given = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        return {**given, "position_ids": position, "use_cache": True}

    def _record(self, kwargs: dict[str, Any]) -> Any:
        check_model(self.model)
        self._check_state(kwargs[CACHE])
        kept = Kept(kwargs[CACHE])
        try:
            trace = record(self.model, self._forward, self._arguments(kwargs))
            self.traces.append(trace)
            if len(self.traces) >= self.recorded:
                self._prepare(self.traces)
                self.traces = []
        except BaseException as e:
            kept.restore()
            self._forget()
            raise _unsuited(e) from e
        return trace.result

    def _check_state(self, cache: TextCache) -> None:
        """Raises NotNow for what a model is at this moment, and for caches that are not its own."""
        if any(m._forward_hooks or m._forward_pre_hooks for m in self.model.modules()):
            raise NotNow("there are hooks on its modules")
        if any("forward" in m.__dict__ for m in self.model.modules() if m is not self.model):
            raise NotNow("modules of it got another forward")
        if self.model.training:
            raise NotNow("it is in training mode")
        if not is_as_made(cache, self.model.config):
            raise NotNow("its cache is of another kind than its configuration's")

    def _prepare(self, traces: list[Trace]) -> None:
        last = traces[-1]
        result = last.result
        if not isinstance(result, ModelOutput) or not isinstance(result.get("logits"), Tensor):
            raise NotNow(f"it returns a {type(result).__name__}")
        for first in traces[:-1]:
            if why := differ(first, last):
                raise NotNow(why)
        known = "logits", CACHE, ENCODED
        extra = [k for k, v in result.items() if v is not None and k not in known]
        if extra or result.logits.shape[:2] != (self.texts, 1):
            raise NotNow(f"it returns {', '.join(extra) or list(result.logits.shape)}")
        self.ready = lower(last, result.logits)
        self.kind = type(result)
        self.fields = [f.name for f in dataclasses.fields(self.kind)]  # type: ignore[arg-type]
        self.compared = 0
        self.watch = Watch(self.model, last.called, self.ready.fixed)

    def _output(self, **values: Any) -> Any:
        """What `self.kind(**values)` makes, without what its constructor looks up: a hundredth of a token's time."""
        made: Any = OrderedDict.__new__(self.kind)
        vars(made).update(dict.fromkeys(self.fields) | values)
        for name, value in values.items():
            OrderedDict.__setitem__(made, name, value)
        return made

    def _forget(self) -> None:
        self.ready, self.traces = None, []

    def _run(self, kwargs: dict[str, Any]) -> Any:
        """What the model returns, and one more row in every layer of the cache that takes them."""
        ready, cache = self.ready, kwargs[CACHE]
        assert ready is not None
        layers, at = layers_of(cache), cache.get_seq_length()
        ready.follow(layers, sources_of(cache), lengths_of_sources(kwargs))
        try:
            logits = self._run_list(ready, kwargs[token_name(kwargs)], at)
        except Exception as e:
            if ready.states:  # some are changed already
                raise
            raise _unsuited(e) from e  # a table that its own forward makes longer, or it says what is wrong
        ready.advance(layers)
        encoded = kwargs.get("encoder_outputs")
        beside = {} if encoded is None else {ENCODED: encoded[0]}
        return self._output(logits=logits, **{CACHE: cache}, **beside)

    def _run_list(self, ready: Lowered, ids: Tensor, position: int) -> Tensor:
        if self.texts == 1:
            ready.words[0].value = int(ids)
        else:
            ready.inputs[0].copy_(ids)
        ready.words[1].value = position
        try:
            for call, args, kwargs in ready.steps:
                call(*args, **kwargs)
        except BaseException:
            ready.forget()
            raise
        return ready.logits.clone()

    def _step_in_pages(self, kwargs: dict[str, Any]) -> Any:
        """A step of one text whose rows lie in a server's pages; the first one runs both ways."""
        ready, pages_of = self.ready, self.pages_of
        if ready is None or pages_of is None or self.compared < COMPARED or not self.watch.holds():
            return self._forward(**kwargs)
        pages = [pages_of(kwargs, i) for i in ready.rows]
        try:
            if ready.states or ready.indices or ready.sources:
                raise Unsuited("its cache holds more than keys and values")
            for rows, found in zip(ready.rows.values(), pages, strict=True):
                if found is None:
                    return self._forward(**kwargs)
                rows.lie_in(*found)
            logits = self._run_list(ready, kwargs["input_ids"], int(kwargs["position_ids"]))
            if not self.compared_in_pages:
                expected = self._forward(**kwargs)  # writes the same row again
                if not same_bits(expected.logits, logits):
                    raise Unsuited("in pages its logits are other ones")
                self.compared_in_pages = True
        except Unsuited as e:
            self.pages_of = None
            log.warning(
                "%s: a server's steps run as transformers runs them: %s", type(self.model).__name__, e
            )
            return self._forward(**kwargs)
        return self._output(logits=logits)

    def _compare(self, kwargs: dict[str, Any]) -> Any:
        cache = kwargs[CACHE]
        kept = Kept(cache)
        expected = self._forward(**kwargs)
        after = Kept(cache)
        kept.restore()
        try:
            made = self._run(kwargs)
        except BaseException as e:
            kept.restore()
            raise _unsuited(e) from e
        if not same_bits(expected.logits, made.logits):
            kept.restore()
            # Written down once, a number may have been taken for the position by chance.
            raise (Unsuited if self.recorded == RECORDED else NotNow)("its logits are other ones")
        if not after.same_as(cache):
            kept.restore()
            raise Unsuited("what it keeps in its cache is something else")
        self.compared += 1
        self.failures = 0
        return made


def _is_one_text(kwargs: dict[str, Any]) -> bool:
    """Whether a model's forward is asked for one text, of which a decoder writes tokens."""
    ids: Any = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
    return isinstance(ids, Tensor) and ids.dim() == 2 and len(ids) == 1


def _unsuited(e: BaseException) -> BaseException:
    """What went wrong with a list; where the model itself is to blame, its own forward says so again."""
    if isinstance(e, Unsuited) or not isinstance(e, Exception):
        return e
    return NotNow(f"{type(e).__name__}: {one_line(e)}")


def replay_steps(model: PreTrainedModel) -> None:
    """Let a model on the CPU replay steps of decoding where it can."""
    if ops.attends(torch.zeros(1, 16)):
        model.forward = Step(model)
