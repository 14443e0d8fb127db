"""The MoE layers of any transformers model, and the routing code of a layer run alone, with its experts left out.

No table of architectures: the block that calls a layer's experts is run as it is, and its experts throw what they are
asked for instead of computing it.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

INDEX_NAMES = ("top_k_index", "router_indices")
"""What `transformers` calls the second argument of an experts module (the latter: gpt-oss)."""
WEIGHT_NAMES = ("top_k_weights", "routing_weights")
_WIDTH = re.compile(r"(^|_)top_?k$|experts_per_tok$")
"""Attributes by which routers know how many experts a token gets."""
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Normed(NamedTuple):
    """A residual stream that a child of a decoder layer, its norm, turned into the input of the block."""

    norm: str
    stream: Tensor


def routes_by_index(module: nn.Module) -> bool:
    """Whether a module is the routed experts of a layer: called with hidden states, indices and weights."""
    if not type(module).__name__.endswith("Experts") or not hasattr(module, "num_experts"):
        return False
    parameters = list(inspect.signature(module.forward).parameters)
    return len(parameters) > 1 and parameters[1] in INDEX_NAMES


def index_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The expert indices [T, A] among the arguments of an experts module."""
    return _argument(1, INDEX_NAMES, args, kwargs)


def _argument(place: int, names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = (
        args[place] if len(args) > place else next(kwargs[name] for name in names if name in kwargs)
    )
    return found


class _Routed(Exception):
    """Thrown out of a layer's code by its experts: what it would have asked them for."""

    def __init__(self, index: Tensor, weights: Tensor) -> None:
        super().__init__("routed")
        self.index, self.weights = index, weights

    def equals(self, other: "_Routed | None") -> bool:
        """Whether the other says the same to the last bit."""
        return (
            other is not None
            and torch.equal(self.index, other.index)
            and torch.equal(self.weights, other.weights)
        )


class MoeLayer:
    """One layer with routed experts.

    name: of the experts module    block: calls router and experts    whole: the decoder layer around it
    """

    def __init__(self, name: str, experts: nn.Module, block: nn.Module, whole: nn.Module) -> None:
        """Finds out nothing yet."""
        self.name, self.experts, self.block, self.whole = name, experts, block, whole
        self.num_experts = int(experts.num_experts)  # type: ignore[arg-type]
        inside = set(experts.modules())
        self._widths = [
            (module, key, value)
            for module in block.modules()
            if module not in inside
            for key, value in vars(module).items()
            if type(value) is int and _WIDTH.search(key)
        ]
        self._idle: list[nn.Module] | None = None

    @property
    def active(self) -> int | None:
        """A, where the block's code says it."""
        return self._widths[0][2] if self._widths else None

    def route(self, arguments: Arguments, width: int) -> Tensor | None:
        """The experts that the block's own code would choose for these arguments of the block, likeliest first.

        width: how many for a token, where the router can be told    returns: [T, width or A] int64; None where the code
        does not get as far as to its experts
        """
        args, kwargs = arguments

        def run() -> object:
            return self.block.forward(*args, **kwargs)

        if self._idle is None:
            self._idle = self._find_idle(run)
        with ExitStack() as stack:
            for module in self._idle:
                stack.enter_context(_silenced(module, torch.zeros_like))
            return self._order(self._ask(run, width))

    def route_normed(self, normed: Normed, arguments: Arguments, width: int) -> Tensor | None:
        """As `route`, for another layer's residual stream, through this layer's own norm, in place of the block's input.

        arguments: of the other layer's block; the first is replaced. None where this layer has no such norm.
        """
        norm = dict(self.whole.named_children()).get(normed.norm)
        if norm is None:
            return None
        args, kwargs = arguments
        return self.route(((norm(normed.stream), *args[1:]), kwargs), width)

    def route_without_attention(self, arguments: Arguments, width: int) -> Tensor | None:
        """As `route`, for the arguments of the decoder layer, whose attention adds nothing.

        None where the decoder layer has no attention.
        """
        args, kwargs = arguments
        attention = [m for m in self.whole.children() if type(m).__name__.endswith("Attention")]
        if not attention:
            return None
        with _silenced(attention[0], lambda x: (torch.zeros_like(x), None)):
            return self._order(self._ask(lambda: self.whole.forward(*args, **kwargs), width))

    def _find_idle(self, run: Callable[[], object]) -> list[nn.Module]:
        """Parts of the block that its routing does not depend on, such as shared experts that run first."""
        expected, idle = self._ask(run, self.active or 1), list[nn.Module]()
        for child in self.block.children():
            if child is self.experts or expected is None:
                continue
            with _silenced(child, torch.zeros_like):
                try:
                    same = expected.equals(self._ask(run, self.active or 1))
                except Exception:
                    same = False  # what the routing depends on cannot return zeros of any shape
            if same:
                idle.append(child)
        return idle

    def _ask(self, run: Callable[[], object], width: int) -> _Routed | None:
        handle = self.experts.register_forward_pre_hook(_throw, with_kwargs=True, prepend=True)
        for module, key, _ in self._widths:
            setattr(module, key, width)
        try:
            run()
        except _Routed as routed:
            return routed
        finally:
            handle.remove()
            for module, key, value in self._widths:
                setattr(module, key, value)
        return None

    @staticmethod
    def _order(routed: _Routed | None) -> Tensor | None:
        if routed is None:
            return None
        return routed.index.gather(-1, routed.weights.float().argsort(dim=-1, descending=True, stable=True))


class Hook:
    """A forward hook of one model: in copies and pickles of it nobody listens."""

    def __init__(self, run: Callable[..., None] | None = None) -> None:
        """run: takes what hooks are given."""
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        """Run, where somebody listens."""
        if self._run is not None:
            self._run(*arguments)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Without what it does."""
        return Hook, ()


class NormListener:
    """Hears, just before a block runs, which residual stream the norm in front of it was given."""

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        """Hooks into all direct children of the decoder layers that return one tensor; only the latest call is kept."""
        self._latest: tuple[str, Tensor, Tensor] | None = None
        self._handles = [
            child.register_forward_hook(Hook(self._hook(name)))
            for layer in layers
            for name, child in layer.whole.named_children()
            if child is not layer.block and layer.whole is not layer.block
        ]

    def heard(self, arguments: Arguments) -> Normed | None:
        """What became the first argument of a block, if it is the result of the call just before; then forgotten."""
        latest, self._latest = self._latest, None
        args, _ = arguments
        if latest is None or not args or latest[2] is not args[0]:
            return None
        return Normed(latest[0], latest[1])

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            whole = isinstance(output, Tensor) and len(args) == 1 and isinstance(args[0], Tensor)
            self._latest = (name, args[0], output) if whole else None  # type: ignore[assignment]

        return hook


def _throw(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Routed(index_of(args, kwargs), _argument(2, WEIGHT_NAMES, args, kwargs))


@contextmanager
def _silenced(module: nn.Module, answer: Callable[[Tensor], object]) -> Iterator[None]:
    """Let a module answer without computing."""
    module.__dict__["forward"] = lambda *args, **kwargs: answer(args[0] if args else kwargs["hidden_states"])
    try:
        yield
    finally:
        del module.__dict__["forward"]


def moe_layers(model: nn.Module) -> Sequence[MoeLayer]:
    """The layers with routed experts, in the order of the model."""
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        if routes_by_index(module):
            number = re.match(r".*?\.\d+(?=\.)", name)
            block = modules[name.rpartition(".")[0]]
            found.append(MoeLayer(name, module, block, modules[number[0]] if number else block))
    return found
