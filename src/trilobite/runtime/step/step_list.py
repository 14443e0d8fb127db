"""A step of so many texts as a list: recorded, compared with the model's own, and run in its place.

The first two steps are recorded (`trace.py`), made runnable (`lower.py`), and the next two run both ways: only where all
bits are the same is the list right.
"""

import dataclasses
import logging
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from trilobite.errors import one_line
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.modules.residence import PackedModule, modules_that_run
from trilobite.runtime.step.batch_pages import BatchPages
from trilobite.runtime.step.conditions import (
    Kept,
    check_model,
    check_state,
    layers_of,
    lengths_of_sources,
    new_cache,
    padding,
    same_bits,
    sources_of,
    token_name,
)
from trilobite.runtime.step.differ import differ
from trilobite.runtime.step.lower import lower
from trilobite.runtime.step.lowered import Lowered
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


class StepList:
    """The list for steps of so many texts, or what shall become it.

    why: the reason why steps are not replayed, None where there is none    wait: steps until that is looked at again
    compared_in_pages: None where it is not for pages
    """

    def __init__(self, model: PreTrainedModel, texts: int = 1) -> None:
        """Nothing is known yet."""
        self._model, self.texts = weakref.ref(model), texts
        self.traces: list[Trace] = []
        self.ready: Lowered | None = None
        self.compared, self.recorded = 0, RECORDED
        self.why: str | None = None
        self.wait = self.failures = 0
        self.compared_in_pages: bool | None = False
        self.compared_padded = False

    @property
    def model(self) -> PreTrainedModel:
        """Whose forward it is; that keeps it, not the other way round."""
        model = self._model()
        assert model is not None
        return model

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record and compare now, on tokens of nobody."""
        asked = self._of_nobody()
        self._forward(**asked)
        for _ in range(RECORDED + COMPARED):
            if self.why is None:
                self.step(dict(asked))

    def _of_nobody(self) -> dict[str, Any]:
        ids = torch.zeros(self.texts, 1, dtype=torch.int64)
        return {"input_ids": ids, "use_cache": True, CACHE: new_cache(self.model.config)}

    def look_at_configs(self) -> None:
        """Take settings of the model as they are now for those of the recorded step."""
        if self.ready is not None:
            self.watch.look_at_configs()

    def may_go(self) -> bool:
        """Whether there is a list, or may be one."""
        return self.why is None or self.wait > 0

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

    def _say(self, level: int, why: str) -> None:
        log.log(level, "%s: steps run as transformers runs them: %s", type(self.model).__name__, why)

    def _fall_back(self, e: Unsuited) -> None:
        """Leave steps to the model: for some of them, or, where it is the model's nature or goes on, for good."""
        self._forget()
        waits = WAITS[self.failures : self.failures + 1] if isinstance(e, NotNow) else ()
        self.failures += 1
        self.why, self.wait = str(e), sum(waits)
        # Nobody expects it of an original, whose experts torch computes.
        packed = any(isinstance(m, PackedModule) for m in modules_that_run(self.model))
        quietly = waits or self.texts > 1 or not packed
        self._say(logging.INFO if quietly else logging.WARNING, str(e))

    def step(self, kwargs: dict[str, Any]) -> Any:
        """What the model returns of a step: recorded, run both ways, or from the list."""
        before = padding(kwargs)
        if before is not None and not self.compared_padded:
            self.compared_padded = True
            self.compared = min(self.compared, COMPARED - 1)  # once more, beside what skips rows
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
                return self._compare(kwargs, before)
            return self._run(kwargs, before)
        except Unsuited as e:
            self._fall_back(e)
            return self._forward(**kwargs)

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those of a step that is recorded: with its positions, and without a mask of ones."""
        position = self._positions(kwargs)
        names = [token_name(kwargs), CACHE, "encoder_outputs"]
        if lengths_of_sources(kwargs) or padding(kwargs):
            names.append("attention_mask")
        given = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        return {**given, "position_ids": position, "use_cache": True}

    def _positions(self, kwargs: dict[str, Any]) -> Tensor:
        """Of the tokens of texts: [texts, 1]; of texts with sources, which have one: [1, 1]."""
        given = kwargs.get("position_ids")
        shape = 1 if kwargs.get("encoder_outputs") is not None else self.texts, 1
        if given is not None:
            return given.expand(shape)  # type: ignore[no-any-return]
        return torch.full(shape, kwargs[CACHE].get_seq_length(), dtype=torch.int64)

    def _record(self, kwargs: dict[str, Any]) -> Any:
        check_model(self.model)
        check_state(self.model, kwargs[CACHE])
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

    def _run(self, kwargs: dict[str, Any], before: list[int] | None) -> Any:
        """What the model returns, and one more row in every layer of the cache that takes them.

        before: tokens that only fill texts up, in front of each
        """
        ready, cache = self.ready, kwargs[CACHE]
        assert ready is not None
        layers, at = layers_of(cache), cache.get_seq_length()
        ready.follow(layers, sources_of(cache), lengths_of_sources(kwargs), before)
        position = at if self.texts == 1 else self._positions(kwargs)
        try:
            logits = self._run_list(ready, kwargs[token_name(kwargs)], position, at)
        except Exception as e:
            if ready.states:  # some are changed already
                raise
            raise _unsuited(e) from e  # a table that its own forward makes longer, or it says what is wrong
        ready.advance(layers)
        encoded = kwargs.get("encoder_outputs")
        beside = {} if encoded is None else {ENCODED: encoded[0]}
        return self._output(logits=logits, **{CACHE: cache}, **beside)

    def _run_list(self, ready: Lowered, ids: Tensor, position: Tensor | int, length: int) -> Tensor:
        if isinstance(position, int):
            ready.words[0].value, ready.words[1].value = int(ids), position
        else:
            ready.inputs[0].copy_(ids)
            ready.inputs[1].copy_(position)
        ready.words[2].value = length
        try:
            return ready.run()
        except BaseException:
            ready.forget()
            raise

    def run_in_pages(self, pages: BatchPages, kwargs: dict[str, Any]) -> Any:
        """What the model returns, or None where there is no list for it; the first step runs both ways."""
        ready = self.ready
        if ready is None or not self.right or not self.watch.holds():
            return None
        if ready.states or ready.indices or ready.sources:
            raise Unsuited("its cache holds more than keys and values")
        if ready.counts and self.texts > 1:
            raise Unsuited("it counts the tokens of its cache, where each text of a batch has its own number")
        found = [pages.of(kwargs, i) for i in ready.rows]
        for rows, where in zip(ready.rows.values(), found, strict=True):
            if where is None:
                return None
            rows.lie_in(*where)
        ids, positions = (kwargs[name].T for name in ("input_ids", "position_ids"))
        at = int(positions[0])
        logits = self._run_list(ready, ids, at if self.texts == 1 else positions, at).transpose(0, 1)
        if not self.compared_in_pages:
            expected = self._forward(**kwargs)  # writes the same rows again
            if not same_bits(expected.logits, logits):
                raise Unsuited("in pages its logits are other ones")
            self.compared_in_pages = True
        return self._output(logits=logits)

    def _compare(self, kwargs: dict[str, Any], before: list[int] | None) -> Any:
        cache = kwargs[CACHE]
        kept = Kept(cache)
        expected = self._forward(**kwargs)
        after = Kept(cache)
        kept.restore()
        try:
            made = self._run(kwargs, before)
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


def _unsuited(e: BaseException) -> BaseException:
    """What went wrong with a list; where the model itself is to blame, its own forward says so again."""
    if isinstance(e, Unsuited) or not isinstance(e, Exception):
        return e
    return NotNow(f"{type(e).__name__}: {one_line(e)}")
