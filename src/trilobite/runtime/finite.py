"""Logits that are NaN or infinite: an error that says where they begin, instead of text or scores made of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from trilobite.errors import EvaluationError


def finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. values: any shape, any float dtype."""
    low, high = values.aminmax()  # one pass without a mask; a NaN anywhere becomes both
    return bool(low.isfinite() and high.isfinite())


def not_finite(model: PreTrainedModel, inputs: Mapping[str, Tensor], name: str = "") -> EvaluationError:
    """The error that says where NaN or infinite values begin.

    inputs: token ids [B, T] int64 as the model's forward takes them; they are run once more    name: of the model
    """
    where = _first_module(model, inputs)
    return EvaluationError(
        f"{name or model.name_or_path or type(model).__name__}: logits are NaN or infinite, "
        + (f"which begins in {where}" if where else "which comes and goes")
        + f"; damaged checkpoint, or {str(model.dtype).removeprefix('torch.')} overflow: copy or compress it again"
    )


@torch.inference_mode()
def _first_module(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> str | None:
    """The first module to end with an output that is not finite: parts end before the wholes they belong to."""
    found: list[str] = []

    def look(name: str, module: nn.Module, args: object, output: object) -> None:
        if not found and not all(finite(t) for t in _floats(output)):
            found.append(name)

    hooks = [m.register_forward_hook(partial(look, name)) for name, m in model.named_modules() if name]
    try:
        model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _floats(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping):
        yield from _floats(tuple(output.values()))
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _floats(part)


class FiniteLogits(LogitsProcessor):  # type: ignore[misc]
    """Raises EvaluationError instead of choosing a token by logits that are NaN or infinite."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor) -> None:
        """prompt: [1, T] int64."""
        self.model, self.prompt = model, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [1, T] int64    scores: [1, V], where other processors may have forbidden tokens by -inf."""
        if bool(scores.amax(-1).isfinite().all()):
            return scores
        if self.model.config.is_encoder_decoder:
            raise not_finite(self.model, {"input_ids": self.prompt, "decoder_input_ids": input_ids})
        raise not_finite(self.model, {"input_ids": input_ids})


@contextmanager
def checked_logits(model: PreTrainedModel) -> Iterator[None]:
    """Raise EvaluationError as soon as a forward pass of the model makes logits that are not finite."""

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not finite(output.logits):
            hook.remove()
            ids = args[0] if args else kwargs["input_ids"]
            raise not_finite(model, {"input_ids": ids})

    hook = model.register_forward_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
