"""A model's forward that runs a step of decoding from a list, once it has seen two of them and compared two.

Beside the products, a token's time goes to Python: modules, wrappers, checks, small operators. Here it is found out what
is a step, and of how many texts; `step_list.py` has the lists. Whatever is none goes to the model's own forward, and so
does everything where a step cannot be a list; one line of the log says why.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from trilobite.kernels import ops
from trilobite.runtime.cache_name import CACHE, OLD
from trilobite.runtime.step.batch_pages import BatchPages
from trilobite.runtime.step.conditions import (
    TextCache,
    check_model,
    layers_of,
    new_cache,
    texts_in_pages,
    texts_of_step,
    undisturbed,
)
from trilobite.runtime.step.index import chosen_rows
from trilobite.runtime.step.step_list import COMPARED, RECORDED, StepList
from trilobite.runtime.step.texts import Others
from trilobite.runtime.step.unsuited import Unsuited

log = logging.getLogger(__name__)


class Step(StepList):
    """What a model calls as its `forward`: the list for steps of one text, and others for those of more."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Nothing is known yet."""
        super().__init__(model)
        self.others = Others()
        self.lock = threading.Lock()
        self.looked = self.was_long = False
        self.most: float | None = None
        self.pages: BatchPages | None = None
        self.__doc__ = type(model).forward.__doc__

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
        if not self.looked and named.get(CACHE) is not None and undisturbed():
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
        """Record and compare now, on tokens of nobody, and say why where that cannot be."""
        asked = self._of_nobody()
        for _ in range(1 + RECORDED + COMPARED):
            if self.why is None:
                self(**asked)

    def replay_in_pages(self, pages: BatchPages) -> None:
        """From now on, replay steps in a server's pages, where its attention does what the recorded one does."""
        self.pages = pages
        for step in (self, *self.others.steps.values()):
            step.compared_in_pages = False
            step.look_at_configs()

    def _way(self, kwargs: dict[str, Any]) -> Callable[[dict[str, Any]], Any] | None:
        """What runs a step of this kind; None where it is none."""
        encodes = kwargs.get("encoder_outputs") is not None
        if self.why is not None and not self.wait and not encodes:
            return None
        if texts := texts_of_step(kwargs, self.model.config):
            return functools.partial(self._step_of, texts)
        if self.pages is None or not (texts := texts_in_pages(kwargs)):
            return None
        return functools.partial(self._step_in_pages, texts, self.pages)

    def _step_of(self, texts: int, kwargs: dict[str, Any]) -> Any:
        """A step of so many texts: by their list, once there were enough of them."""
        step = self._list_of(texts)
        if step is None or not self._chooses_all(kwargs[CACHE]):
            return self._forward(**kwargs)
        return step.step(kwargs)

    def _list_of(self, texts: int) -> StepList | None:
        """What has the list for so many texts, or makes it now."""
        step = self if texts == 1 else self.others.of(texts, functools.partial(StepList, self.model))
        if step is None or not step.may_go():
            return None
        self.others.turn_to(texts, self)
        if texts > 1:
            step.recorded = 1 if self.others.know_one(self, step) else RECORDED
        return step

    def _step_in_pages(self, texts: int, pages: BatchPages, kwargs: dict[str, Any]) -> Any:
        """A step of texts whose rows lie in a server's pages."""
        step = self._list_of(texts)
        if step is None or None in (self.compared_in_pages, step.compared_in_pages):
            return self._forward(**kwargs)
        if texts > 1 and step.ready is None:
            if self.ready is None or any(pages.of(kwargs, i) is None for i in self.ready.rows):
                return self._forward(**kwargs)  # a list would not run here
            with pages.aside():
                step.prepare()
            step.look_at_configs()
            step.compared_in_pages = False if step.right else None
        try:
            made = step.run_in_pages(pages, kwargs)
        except Unsuited as e:
            step.compared_in_pages = made = None
            log.warning(
                "%s: a server's steps run as transformers runs them: %s", type(self.model).__name__, e
            )
        return self._forward(**kwargs) if made is None else made

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
        """Before the first tokens of texts, say what there is to say of the model, or of a cache of another kind."""
        self.looked = True
        try:
            check_model(self.model)
            if type(cache) is not type(new_cache(self.model.config)):
                self._say(logging.WARNING, f"its cache is a {type(cache).__name__}")
        except Unsuited as e:
            self._fall_back(e)


def replay_steps(model: PreTrainedModel) -> None:
    """Let a model on the CPU replay steps of decoding where it can."""
    if ops.attends(torch.zeros(1, 16)):
        model.forward = Step(model)
