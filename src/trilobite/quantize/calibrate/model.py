"""The original model, run block by block by transformers' own code.

What enters a block besides hidden states (position embeddings, masks) is recorded on a pass through the model in which
every block hands its input on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trilobite.checkpoint.roles import Matrix
from trilobite.checkpoint.source import Source
from trilobite.errors import ArchitectureError, CalibrationError
from trilobite.models.wide_products import wide_products
from trilobite.quantize.calibrate.weights import BlockWeights

Exchange = Callable[[Tensor], Tensor]
"""What is taken for a tensor that a block is called with besides its hidden states."""


def as_it_is(t: Tensor) -> Tensor:
    """The same."""
    return t


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is called with besides its hidden states."""


class Stop(Exception):
    """Ends a forward pass whose rest is of no interest."""


class BlockModel(BlockWeights):
    """A causal language model whose blocks are loaded and run one by one. Forward passes may run in several threads."""

    def __init__(self, source: Source, matrices: Sequence[Matrix], device: torch.device) -> None:
        """Build the model on meta. Raises ArchitectureError when it is not a stack of decoder blocks."""
        super().__init__(source, matrices, device)
        self._arguments: dict[int, dict[str, Arguments]] = {}
        self._rest: tuple[Any, ...] | None = (
            None  # what a block returns beside hidden states, where that is a tuple
        )

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """What enters the first block. Everything outside of the blocks must be loaded.

        ids: [B, T] int64    returns: [B, T, H]
        """
        return self._entered_first(self.blocks[0], lambda: self._forward(ids))

    def _entered_first(self, block: str, forward: Callable[[], None]) -> Tensor:
        """The hidden states that enter a block. forward: runs its stack."""
        entered: list[Tensor] = []

        def first(*args: Any, **kwargs: Any) -> None:
            entered.append(_split(args, kwargs)[0])
            raise Stop

        with self._replaced({block: first}), suppress(Stop):
            forward()
        return entered[0]

    @torch.no_grad()
    def learn_arguments(self, ids: Tensor) -> None:
        """Learn what each block is called with for a batch of this shape. Block 0 must be loaded, and the outside.

        ids: [S, T] int64, at least one window    Raises ArchitectureError where it depends on the tokens.
        """
        size = len(ids)
        if size not in self._arguments:
            self._arguments[size] = self._called_with(ids)

    def _called_with(self, ids: Tensor) -> dict[str, Arguments]:
        return self._called(self.blocks, lambda: self._forward(ids))

    def _called(self, blocks: Sequence[str], forward: Callable[[], None]) -> dict[str, Arguments]:
        """What the blocks of a stack are called with besides hidden states. forward: runs the stack."""
        arguments: dict[str, Arguments] = {}

        def first(*args: Any, **kwargs: Any) -> None:
            hidden, rest, named = _split(args, kwargs)
            arguments[blocks[0]] = rest, named
            with wide_products(self.dtype, self.device):
                out = type(block).forward(block, hidden, *rest, **named)
            self._rest = out[1:] if isinstance(out, tuple) else None
            raise Stop

        def passer(name: str) -> Callable[..., Any]:
            def hand_on(*args: Any, **kwargs: Any) -> Any:
                hidden, rest, named = _split(args, kwargs)
                arguments[name] = rest, named
                return self._output(hidden)

            return hand_on

        block = self._modules[blocks[0]]
        # Twice: what a block returns (a tuple or not) shows only on a block that runs, and `passer` has to return it.
        for functions in ({blocks[0]: first}, {name: passer(name) for name in blocks}):
            with self._replaced(functions), suppress(Stop):
                forward()
        if missing := [name for name in blocks if name not in arguments]:
            raise ArchitectureError(f"{missing[0]}: is never run by its model, which cannot be calibrated")
        return arguments

    def check_arguments(self, ids: Tensor) -> None:
        """Raise ArchitectureError when two windows call a block with different things besides hidden states.

        ids: [S, T] int64
        """
        one, other = self._called_with(ids[:1]), self._called_with(ids[-1:])
        for name in self.blocks:
            if not _same(one[name], other[name]):
                raise ArchitectureError(
                    f"{name}: is called with more than hidden states that depends on the text; such a model cannot be "
                    "run block by block: choose a recipe without calibration"
                )

    @torch.no_grad()
    def run(self, block: str, hidden: Tensor, first: int = 0) -> Tensor:
        """One block on a batch. Raises CalibrationError when the outcome is not finite.

        hidden: [B, T, H]    first: number of its first window    returns: [B, T, H]
        """
        args, kwargs = self._arguments[self._batch(hidden, first)][block]
        with wide_products(self.dtype, self.device):
            result = _states(self._modules[block](hidden, *args, **kwargs))
        if not bool(torch.isfinite(result.sum(dtype=torch.float32))) and not bool(
            torch.isfinite(result).all()
        ):
            raise CalibrationError(
                f"{block}: its output holds NaN or infinity on the calibration text; the checkpoint is damaged, or "
                f"overflows in {self.dtype}"
            )
        return result

    def _batch(self, hidden: Tensor, first: int) -> int:
        """By what the arguments for a batch are remembered: those of as many windows are the same."""
        return len(hidden)

    def apply(
        self,
        block: str,
        hidden: Tensor,
        parameters: Mapping[str, Tensor],
        first: int = 0,
        exchange: Exchange = as_it_is,
    ) -> Tensor:
        """One block in fp32 with other parameters than its own, differentiable. Not for several threads.

        hidden: [B, T, H] any float dtype    parameters: fp32, all of the block's by name    first: as `run` has it
        exchange: of the tensors that it is called with besides    returns: [B, T, H] fp32
        """
        args, kwargs = _in_fp32(self._arguments[self._batch(hidden, first)][block], exchange)
        own = {name.removeprefix(f"{block}."): p for name, p in parameters.items()}
        return _states(
            functional_call(self._modules[block], own, (hidden.float(), *args), kwargs, tie_weights=False)
        )

    def logits(self, ids: Tensor, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """What the model makes of what left the last block, in fp32, differentiable. Not for several threads.

        ids: [B, T] int64    hidden: [B, T, H]    parameters: those of `parameters("")`    returns: [B, T, vocabulary]
        """
        with self._giving(hidden):
            out = functional_call(
                self.model,
                dict(parameters),
                kwargs={"input_ids": ids.to(self.device), "use_cache": False},
                tie_weights=False,
            )
        result: Tensor = out.logits
        return result

    @torch.no_grad()
    def head_input(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What enters the output head, given what left the last block.

        ids: [B, T] int64    hidden: [B, T, H]    returns: [B, T, H]
        """
        entered: list[Tensor] = []
        with self._giving(hidden):
            self._forward(ids, entered)
        return entered[0]

    def _forward(self, ids: Tensor, head_inputs: list[Tensor] | None = None) -> None:
        self._to_head({"input_ids": ids.to(self.device)}, head_inputs)

    def _to_head(self, inputs: Mapping[str, Any], head_inputs: list[Tensor] | None = None) -> None:
        """The whole model up to its head."""

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if head_inputs is not None:
                head_inputs.append(args[0])
            raise Stop

        head = self.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(stop)
        try:
            self.model(**inputs, use_cache=False)
        except Stop:
            pass
        finally:
            handle.remove()

    @contextmanager
    def _replaced(self, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Blocks do something else for a while."""
        for name, function in functions.items():
            self._modules[name].forward = function  # type: ignore[method-assign]
        try:
            yield
        finally:
            for name in functions:
                del self._modules[name].forward

    def _giving(self, hidden: Tensor, blocks: Sequence[str] | None = None) -> AbstractContextManager[None]:
        """The blocks, or some of them, give these hidden states, whatever enters them."""
        return self._replaced(dict.fromkeys(blocks or self.blocks, lambda *_, **__: self._output(hidden)))

    def _output(self, hidden: Tensor) -> Any:
        """Hidden states as a block of this model returns them."""
        return hidden if self._rest is None else (hidden, *self._rest)


def _states(out: Any) -> Tensor:
    """The hidden states in what a block returned."""
    states: Tensor = out[0] if isinstance(out, tuple) else out
    return states


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Hidden states, other positional arguments, keyword arguments."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), (), rest


def _in_fp32(value: Any, exchange: Exchange) -> Any:
    """The same, with all floating-point tensors exchanged, and in fp32."""
    if isinstance(value, Tensor):
        return exchange(value).float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_in_fp32(v, exchange) for v in value)
    if isinstance(value, dict):
        return {k: _in_fp32(v, exchange) for k, v in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())
    return True
