"""Continuous batching of transformers as this server uses it: pages of a given size, each request by its own wishes."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

from trilobite.errors import EvaluationError
from trilobite.runtime.finite import not_finite
from trilobite.runtime.step.batch_pages import BatchPages
from trilobite.runtime.step.replay import Step
from trilobite.serve.answer import Answer, Wish
from trilobite.serve.attention import ATTENTION, Deferred, pages_of
from trilobite.serve.call import CALL
from trilobite.serve.pages import PAGE, Pages, page_width
from trilobite.serve.sampler import Sampler

BATCH_TOKENS = 256
"""Most tokens of a step: longer prompts are read in parts, between which the others' answers go on.

Prompts that come together are read one after the other, so their first tokens come earlier the fewer a step reads; the
CPU engine's products are at their full rate from 128 tokens on.
"""


class Manager(ContinuousBatchingManager):  # type: ignore[misc]
    """Continuous batching with our attention, in pages as wide as the keys really are."""

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
        """Ours, on every device."""
        self._original_attn_impl = model.config._attn_implementation
        step = model.__dict__.get("forward")
        if isinstance(step, Step):
            step.prepare()
        model.set_attn_implementation(ATTENTION)
        if isinstance(step, Step):
            step.replay_in_pages(BatchPages(of=pages_of, aside=self._aside))

    def not_finite(self, tokens: list[int]) -> EvaluationError:
        """Where NaN or infinite values begin in a text, which is run once more, with attention as it was."""
        with self._aside():
            ids = torch.tensor([tokens], device=self.model.device)
            return not_finite(self.model, {"input_ids": ids}, Path(self.model.name_or_path).name)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """For the while, attention as it was."""
        self.model.set_attn_implementation(self._original_attn_impl)
        try:
            yield
        finally:
            self.model.set_attn_implementation(ATTENTION)

    def _create_batch_processor(self) -> Any:
        with _page_shape(self.model.config.get_text_config()):
            processor = super()._create_batch_processor()
        Deferred(processor.cache)
        return processor


@contextlib.contextmanager
def _page_shape(config: PreTrainedConfig) -> Iterator[None]:
    """For the while, let a configuration say how wide keys and values are once attention has them (MLA)."""
    kept = {name: getattr(config, name, None) for name in ("head_dim", "num_key_value_heads")}
    config.num_key_value_heads, config.head_dim = page_width(config)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)


class Batching(CBGenerateManager):  # type: ignore[misc]
    """Runs requests side by side. Started once, for one model."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pages: Pages, seconds: float
    ) -> None:
        """pages: of the cache    seconds: longest time of a request."""
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages.count,
            max_batch_tokens=max(BATCH_TOKENS, pages.slots),
            max_requests_per_batch=pages.slots,
            max_blocks_per_request=0,
            max_memory_percent=0.95,
            safety_margin=0.0,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        super().__init__(config)
        self.tokenizer, self.seconds = tokenizer, seconds
        ends = model.generation_config.eos_token_id
        self._cb = Manager(model, GenerationConfig(do_sample=False, eos_token_id=ends), config)
        self._cb.logit_processor = Sampler(self._cb.not_finite)

    def start(self) -> None:
        """Run requests from now on, in a thread."""
        self._cb.start()

    def revive(self) -> None:
        """Begin anew after an error in a step, which ended all requests of its batch, and the thread."""
        if self._cb.background_thread_status.fatal_error is not None and not self._cb.is_running():
            self._cb.start()

    def is_alive(self) -> bool:
        """Whether requests are run."""
        self.revive()
        return self._cb.is_running()  # type: ignore[no-any-return]

    @property
    def texts(self) -> int:
        """Texts that hold a slot, or wait for one."""
        processor = self._cb.batch_processor
        if processor is None:
            return 0
        return len(processor.scheduler.active_requests) + len(processor.scheduler.waiting_requests)

    def init_cb(self, model: PreTrainedModel, gen_config: Wish) -> None:
        """Nothing: it is running, and no request decides for the others."""

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: Any,
        inputs: dict[str, list[int]],
        gen_config: Wish,
        request_id: str,
        response_parser: ResponseParser | None = None,
    ) -> tuple[asyncio.Queue[Any], Answer]:
        """Begin an answer. Raises CBWorkerDeadError at the end of the server."""
        self.revive()
        answer = Answer(self._cb, request_id, self.tokenizer, gen_config, response_parser, self.seconds)
        self._cb.register_result_handler(request_id, answer.take)  # first: tokens may come at once
        accepted = self._cb.add_request(
            inputs["input_ids"],
            request_id=request_id,
            streaming=True,
            max_new_tokens=gen_config.max_new_tokens,
            eos_token_id=list(gen_config.ends),
            draw=gen_config.draw,
        )
        if accepted is None:
            raise CBWorkerDeadError("this server is ending")
        CALL.get().begin(answer, len(inputs["input_ids"]))
        return answer.queue, answer

    def stop(self) -> None:
        """End the thread; requests that still run fail."""
        self._cb.stop(block=True, timeout=10, hard_stop=True)
