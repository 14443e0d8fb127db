"""What a model does for one token, as a list: torch's operators, and between them calls of packed modules, rows of the
cache, attention."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from trilobite.runtime import attention as attention_of_models
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.modules.residence import PackedModule, modules_that_run
from trilobite.runtime.step.conditions import layers_of, padding, sources_of, token_name
from trilobite.runtime.step.index import index_of
from trilobite.runtime.step.states import plain_states, states_by_layer
from trilobite.runtime.step.unsuited import Unsuited


@dataclass(frozen=True, kw_only=True)
class Node:
    """One thing done. what: torch's operator, the packed module, or the number of the cache's layer.

    kind: "torch", "module", "append" (keys and values of the token), "index" (its key of an index) or "attend" (query)
    """

    kind: str
    what: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]


@dataclass(kw_only=True, eq=False)
class Trace:
    """A step. result: what the model returned

    inputs: tokens of all texts [texts, 1], their positions [texts, 1] or that of all [1, 1], and of how many tokens the
    cache knew [], int64
    states: of layers of the cache, tensors of a fixed size that the step reads and changes
    choices: what was made of the keys of an index, by storage: kept, so that no other tensor gets that
    masks: those that the model was given for its own texts, and what was made of masks, likewise
    called: the modules that ran
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    states: dict[tuple[int, str, int], Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    choices: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)
    called: list[nn.Module] = field(default_factory=list)
    result: Any = None


def storage(t: Tensor) -> int:
    """The memory that a tensor is a view of."""
    return int(t.untyped_storage()._cdata)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


def changed(node: Node) -> list[Tensor]:
    """Tensors that a node writes in place."""
    if node.kind != "torch":
        return []
    arguments = node.what._schema.arguments
    given = [*zip(arguments, node.args, strict=False)]
    given += [(a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs]
    return [t for a, v in given if a.alias_info and a.alias_info.is_write for t in tensors_in(v)]


def is_view(node: Node) -> bool:
    """Whether a node only says how memory that is there already shall be seen."""
    if node.kind != "torch" or changed(node) or not node.outputs:
        return False
    seen = {storage(t) for t in tensors_in(node.args)}
    return all(storage(o) in seen for o in node.outputs)


def arguments(node: Node) -> dict[str, Any]:
    """Named arguments of a node that it reads."""
    return {k: v for k, v in node.kwargs.items() if k != "rows"}


def moving(trace: Trace) -> list[Node]:
    """Those that depend on the step's inputs, on states or on the cache, or have to do with memory that is written to in
    place; all others make the same in every step."""
    made = {storage(t) for t in (*trace.inputs, *trace.states.values())} | trace.masks.keys()
    made |= {storage(t) for node in trace.nodes for t in changed(node)}
    found = []
    for node in trace.nodes:
        touched = {storage(t) for t in (*tensors_in((node.args, node.kwargs)), *node.outputs)}
        if node.kind != "torch" or touched & made:
            found.append(node)
            made |= {storage(t) for t in node.outputs}
    return found


def live(nodes: list[Node], wanted: list[Tensor]) -> list[Node]:
    """Those on which tensors depend, or rows of the cache."""
    needed, found = set(map(storage, wanted)), []
    for node in reversed(nodes):
        if node.kind in ("append", "index") or {storage(t) for t in (*node.outputs, *changed(node))} & needed:
            found.append(node)
            needed |= {storage(t) for t in tensors_in((node.args, arguments(node)))}
    return found[::-1]


READS = frozenset(
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "__array__")
)
REFUSED = (
    (torch.Tag.data_dependent_output, "reads values of tensors"),
    (torch.Tag.dynamic_output_shape, "has shapes that depend on values"),
    (torch.Tag.nondeterministic_seeded, "draws random numbers"),
)


def _picks_by_number(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is an index by numbers of rows, whose result is as large as they are many; masks have other ones."""
    if operator != torch.ops.aten.index.Tensor:
        return False
    return all(t is None or t.dtype == torch.int64 for t in args[1])


class _NoReads(TorchFunctionMode):
    """Refuses what would make Python's way depend on values without torch's operators seeing it."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not self.recorder.quiet and not self.recorder.chooses(args):
            raise Unsuited(f"it reads values of tensors ({func.__name__})")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operator of torch, unless `quiet`: within what is one node."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.quiet, self.owner = trace, 0, threading.get_ident()
        self.at = int(trace.inputs[2])
        self.padding: Tensor | None = None
        """Tokens in front of each text [texts, 1] that only fill it up; None where there are none."""
        self.rows: dict[int, int] = {}
        """Layer of the cache by id of a tensor of all its keys, or of all its values."""
        self.chunks: dict[int, int] = {}
        """Of layers whose tokens look at those of their chunk alone, how many it has."""
        self.biases: dict[int, tuple[Tensor, Any, Callable[..., Tensor]]] = {}
        """By storage: what modules add to scores by distance, whose it is, and what makes it."""
        self.sources: dict[int, int] = {}
        """Likewise of keys and of values of a source."""

    def chooses(self, args: Any) -> bool:
        """Whether something only says what an index of keys chooses: `attend` looks that this was everything."""
        choices = self.trace.choices
        return bool(choices) and any(storage(t) in choices for t in tensors_in(args))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.quiet:
            return result
        if self.chooses((args, kwargs)):
            self.trace.choices |= {storage(t): t for t in tensors_in(result)}
        else:
            for tag, why in REFUSED:
                if tag in func.tags and not _picks_by_number(func, args):
                    raise Unsuited(f"{func} {why}")
            outputs = result if isinstance(result, tuple | list) else (result,)
            if any(o is not None and type(o) is not Tensor for o in outputs):
                raise Unsuited(f"{func} returns a {type(result).__name__}")
            args = self._with_length(func, args)
            self.note("torch", func, args, kwargs, tuple(o for o in outputs if o is not None))
        return result

    def _with_length(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments; of `torch.arange(n) + past`, as models count tokens, the input in the place of its value."""
        if func != torch.ops.aten.add.Tensor or type(args[1]) is not int or args[1] != self.at:
            return args
        whole = args[0].dtype in (torch.int32, torch.int64)
        counts = whole and storage(args[0]) not in map(storage, self.trace.inputs)
        return (args[0], self.trace.inputs[2]) if counts else args

    def note(self, kind: str, what: Any, args: Any, kwargs: Any, outputs: tuple[Tensor, ...]) -> None:
        args = tuple(list(a) if isinstance(a, list) else a for a in args)
        self.trace.nodes.append(Node(kind=kind, what=what, args=args, kwargs=dict(kwargs), outputs=outputs))

    @contextmanager
    def silence(self) -> Iterator[None]:
        """For what one node stands for."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def called(self, module: nn.Module, _: Any) -> None:
        """A hook of all modules, those of other threads too."""
        if threading.get_ident() == self.owner:
            self.trace.called.append(module)

    def module(self, module: PackedModule, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A packed module's forward, as one node."""

        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            if threading.get_ident() != self.owner or self.quiet:
                return forward(*args, **kwargs)
            with self.silence():
                y = forward(*args, **kwargs)
            self.note("module", module, args, kwargs, (y,))
            return y

        return recorded

    def update(self, real: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        """A cache's `update`, as one node."""

        def recorded(key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            with self.silence():
                keys, values = real(key, value, layer, *args, **kwargs)
            self.note("append", layer, (key, value), {}, ())
            self.trace.nodes[-1].kwargs["rows"] = (keys, values)
            self.rows[id(keys)] = self.rows[id(values)] = layer
            return keys, values

        return recorded

    def masked(self, made: Tensor | None) -> None:
        """What was made of a mask that the model was given."""
        if made is not None:
            self.trace.masks[storage(made)] = made

    def bias(self, module: nn.Module, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What makes numbers that are added to scores by distance."""

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            with self.silence():
                made = real(*args, **kwargs)
            self.biases[storage(made)] = made, module, real
            return made

        return recorded

    def _by_distance(self, bias: Tensor) -> tuple[Tensor, Tensor] | None:
        """What was added to scores [1, heads, 1, S], as [heads, distances], and the weight that it is made of."""
        with self.silence():
            if not bool(bias.any()):
                return None
            made = self.biases.get(storage(bias))
            if made is None:
                raise Unsuited("numbers are added to its scores that are not known to be those of distances")
            _, module, real = made
            most = module.relative_attention_max_distance + 1
            table = real(most, most)[0, :, -1].flip(-1).float()
            seen = bias[0, :, 0].flip(-1).float()
            places = torch.arange(seen.shape[1]).clamp(max=table.shape[1] - 1)
            if not torch.equal(table[:, places], seen):
                raise Unsuited(
                    "what is added to its scores is not the same for all distances beyond the largest"
                )
        return table.contiguous(), module.relative_attention_bias.weight

    def index(self, layer: int, field: str, real: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """What takes the keys of a layer's index, as one node."""

        def recorded(keys: Tensor) -> Tensor:
            with self.silence():
                found = real(keys)
            self.note("index", layer, (keys,), {"field": field}, ())
            self.trace.choices[storage(found)] = found
            return found

        return recorded

    def _visible(self, length: int, chunk: int | None) -> Tensor:
        """Which of the newest rows of the cache a list lets texts look at: [1 or texts, 1, 1, length] bool."""
        before = torch.zeros(1, 1, dtype=torch.int64) if self.padding is None else self.padding
        first = before if chunk is None else self.at - (self.at - before) % chunk
        rows = torch.arange(self.at + 1 - length, self.at + 1)
        return (rows >= first)[:, None, None]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: Any, made: Tensor
    ) -> None:
        """A call of the engine's attention, which made what it returns."""
        source = id(key) in self.sources
        known = self.sources if source else self.rows
        layer = known.get(id(key))
        if layer is None or layer != known.get(id(value)):
            raise Unsuited("it attends to more, or less, than what the cache holds")
        chunk, length = None if source else self.chunks.get(layer), key.shape[2]
        with self.silence():
            seen = mask if mask is not None else torch.ones(length, dtype=torch.bool)
            if source:  # a text is seen up to its end
                skips = not bool(seen[..., 0].all() and (seen[..., 1:] <= seen[..., :-1]).all())
            else:
                skips = bool((seen[..., :length] != self._visible(length, chunk)).any())
            if skips:
                raise Unsuited("its attention skips rows of the cache")
        noted = {"scale": kwargs.get("scaling"), "window": kwargs.get("sliding_window"), "chunk": chunk}
        noted["sinks"] = kwargs.get("s_aux")
        noted["source"] = key.shape[1] if source else None
        if (bias := kwargs.get("position_bias")) is not None and (made_of := self._by_distance(bias)):
            noted["bias"], noted["weights"] = made_of
        if "latents" in kwargs:
            noted["weights"] = kwargs["latents"].weights
            self.trace.called.append(kwargs["latents"].module.kv_b_proj)
        self.note("attend", layer, (query,), noted, (made,))


@contextmanager
def _replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """For the while, an attribute of this very object."""
    target.__dict__[name] = value
    try:
        yield
    finally:
        del target.__dict__[name]


@torch.inference_mode(False)
@torch.no_grad()
def record(model: PreTrainedModel, forward: Callable[..., Any], arguments: dict[str, Any]) -> Trace:
    """Run a step of a model, and write it down.

    arguments: the token by the model's name for it, `position_ids`, which one with an encoder does not get, the
    cache, and more; a mask is that of the source, or says what only fills texts up
    Raises Unsuited for what a list cannot say; then the cache may hold rows of this step already.
    """
    token = token_name(arguments)
    ids, positions = (arguments[name].clone() for name in (token, "position_ids"))
    cache = arguments[CACHE]
    length = torch.tensor(cache.get_seq_length())
    trace = Trace(inputs=(ids, positions, length), states=plain_states(layers_of(cache)))
    recorder = _Recorder(trace)
    recorder.chunks = _chunks(model.config.get_text_config())
    modules = list(modules_that_run(model))
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, PackedModule):
                stack.enter_context(_replaced(module, "forward", recorder.module(module, module.forward)))
            if callable(made := getattr(module, "compute_bias", None)):
                stack.enter_context(_replaced(module, "compute_bias", recorder.bias(module, made)))
        sources = sources_of(cache)
        if (before := padding(arguments)) is not None:
            recorder.padding = torch.tensor(before)[:, None]
            mask = arguments["attention_mask"]
            trace.masks[storage(mask)] = mask
        own = cache.self_attention_cache if sources else cache
        stack.enter_context(_replaced(own, "update", recorder.update(own.update)))
        for at, source in enumerate(sources):
            recorder.sources |= {id(t): at for t in (source.keys, source.values) if t is not None}
        for at, layer in enumerate(layers_of(cache)):
            if index := index_of(layer):
                name, field = index
                taken = recorder.index(at, field, getattr(layer, name))
                stack.enter_context(_replaced(layer, name, taken))
        stack.enter_context(attention_of_models.observed(recorder))
        stack.enter_context(
            nn.modules.module.register_module_forward_pre_hook(lambda m, _: trace.called.append(m))
        )
        stack.enter_context(recorder)
        stack.enter_context(_NoReads(recorder))
        given = {**arguments, token: ids, "position_ids": positions}
        if sources:
            del given["position_ids"]
        trace.result = forward(**given)
    now = states_by_layer(layers_of(cache))
    if any(now[key] is not t for key, t in trace.states.items()):
        raise Unsuited("it puts other states in the place of its cache's")
    return trace


def _chunks(config: Any) -> dict[int, int]:
    """Tokens of a chunk, by layer of those that attend in chunks."""
    kinds = getattr(config, "layer_types", None) or ()
    return {at: config.attention_chunk_size for at, kind in enumerate(kinds) if kind == "chunked_attention"}
