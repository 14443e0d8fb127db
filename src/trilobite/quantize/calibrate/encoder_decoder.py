"""Encoder-decoders as stacks of blocks: what enters and leaves the encoder, and the decoder under forced targets."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers.modeling_outputs import MoEModelOutput

from trilobite.models.pairs import Forced
from trilobite.quantize.calibrate.model import BlockModel


class EncoderDecoder(BlockModel):
    """Both stacks of a model. Arguments of blocks are remembered by a batch's first pair."""

    def load(self, block: str) -> None:
        """The same; both stacks embed with the one embedding that is on disk."""
        super().load(block)
        if not block:
            self.model.tie_weights()

    @torch.no_grad()
    def enter(self, stack: int, first: int, batch: Forced, encoded: Tensor | None) -> Tensor:
        """What enters a stack (0: the encoder), [B, T, H]; remembers what its blocks are called with for this batch.

        first: number of the batch's first pair    encoded: [B, S, H], what the encoder made of it, for the decoder
        """
        run = partial(self._run_stack, batch, encoded)
        self._arguments[first] = self._arguments.get(first, {}) | self._called(self.stacks[stack], run)
        return self.entering(stack, batch, encoded)

    @torch.no_grad()
    def entering(self, stack: int, batch: Forced, encoded: Tensor | None) -> Tensor:
        """The same, and nothing is remembered; no block has to be loaded."""
        return self._entered_first(self.stacks[stack][0], partial(self._run_stack, batch, encoded))

    def _run_stack(self, batch: Forced, encoded: Tensor | None) -> None:
        """The encoder, or the decoder behind what it made."""
        if encoded is None:
            self._encode(batch)
        else:
            self._to_head(self._behind(batch, encoded))

    @torch.no_grad()
    def encoded(self, batch: Forced, hidden: Tensor) -> Tensor:
        """What the encoder makes of what left its last block: [B, S, H] both."""
        with self._giving(hidden, self.stacks[0]):
            return self._encode(batch)

    @torch.no_grad()
    def decoded(self, batch: Forced, encoded: Tensor, hidden: Tensor) -> Tensor:
        """What enters the output head, given what left the decoder's last block: [B, T, H] both."""
        entered: list[Tensor] = []
        with self._giving(hidden, self.stacks[1]):
            self._to_head(self._behind(batch, encoded), entered)
        return entered[0]

    def encode(self, batch: Forced, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The same as `encoded`, with other parameters, those of `parameters("")`, in fp32, differentiable."""
        encoder: Any = self.model.get_encoder()
        name = next(name for name, module in self.model.named_modules() if module is encoder)
        own = {n.removeprefix(f"{name}."): p for n, p in parameters.items() if n.startswith(f"{name}.")}
        inputs = batch.arguments(self.device)
        with self._giving(hidden, self.stacks[0]):
            out = functional_call(
                encoder,
                own,
                kwargs={name: inputs[name] for name in ("input_ids", "attention_mask")},
                tie_weights=False,
            )
        states: Tensor = out[0]
        return states

    def decode(
        self, batch: Forced, encoded: Tensor, hidden: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        """Logits [B, T, V] of what left the decoder's last block, as `logits` has them of a decoder."""
        inputs = {**self._behind(batch, encoded), "use_cache": False}
        with self._giving(hidden, self.stacks[1]):
            out = functional_call(self.model, dict(parameters), kwargs=inputs, tie_weights=False)
        result: Tensor = out.logits
        return result

    def _encode(self, batch: Forced) -> Tensor:
        inputs = batch.arguments(self.device)
        out = self.model.get_encoder()(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        states: Tensor = out[0]
        return states

    def _behind(self, batch: Forced, encoded: Tensor) -> dict[str, Any]:
        """What the model is called with when its encoder is done."""
        inputs: dict[str, Any] = batch.arguments(self.device)
        del inputs["input_ids"]
        return inputs | {"encoder_outputs": MoEModelOutput(last_hidden_state=encoded)}

    def _batch(self, hidden: Tensor, first: int) -> int:
        return first
