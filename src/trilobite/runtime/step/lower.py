"""A recorded step made runnable: every tensor gets a place that it keeps, every node something that runs on places.

Neighbouring nodes that the engine knows become one call of it; the others stay torch's operators, on the same places.
Views are places, and cost nothing; what depends on weights alone is what it was.
"""

from collections import defaultdict
from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from trilobite.kernels import ops
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.residence import AsStored
from trilobite.runtime.step.calls import Copied, into, one_or_all
from trilobite.runtime.step.index import Index
from trilobite.runtime.step.lowered import Lowered, Run
from trilobite.runtime.step.rows import Rows, Source
from trilobite.runtime.step.small import small_nodes
from trilobite.runtime.step.states import States
from trilobite.runtime.step.trace import (
    Node,
    Trace,
    arguments,
    changed,
    is_view,
    live,
    moving,
    storage,
    tensors_in,
)
from trilobite.runtime.step.unsuited import Unsuited

ALIGNMENT = 64


def side_by_side(nodes: list[Node]) -> list[Node]:
    """The same nodes, packed matrices that read the same tensor next to each other: the engine runs them as one call."""
    groups: list[list[Node]] = []
    readers: dict[tuple[int, int, torch.Size], list[Node]] = {}
    for node in nodes:
        read = _read_by_matrix(node)
        if read in readers:
            readers[read].append(node)
            continue
        groups.append([node])
        for written in map(storage, changed(node)):
            readers = {key: group for key, group in readers.items() if key[0] != written}
        if read is not None:
            readers[read] = groups[-1]
    return [node for group in groups for node in group]


def _read_by_matrix(node: Node) -> tuple[int, int, torch.Size] | None:
    """What a packed matrix reads: memory, where in it, and its shape; None for other nodes."""
    if node.kind != "module" or not isinstance(node.what, PackedLinear) or node.kwargs or len(node.args) != 1:
        return None
    x = node.args[0]
    return storage(x), x.storage_offset(), x.shape


class Lowering:
    """Turns a trace into what runs."""

    def __init__(self, trace: Trace, logits: Tensor) -> None:
        """logits: what the step is for, beside new rows of the cache."""
        self.trace = trace
        self.inputs = tuple(torch.zeros_like(t) for t in trace.inputs)
        self.steps: list[Run] = []
        self.pending: list[Any] = []
        self.keep: list[Any] = []
        self.natives = self.newest = 0
        self.rows: dict[int, Rows] = {}
        self.indices: dict[int, Index] = {}
        self.sources: dict[int, Source] = {}
        self.fixed: dict[int, Tensor] = {}
        self.states = {key: _like(t) for key, t in trace.states.items()}
        pairs = [*zip(trace.inputs, self.inputs, strict=True)]
        pairs += [(t, self.states[key]) for key, t in trace.states.items()]
        self.given = {storage(t): place for t, place in pairs}
        if len(self.given) < len(pairs):
            raise Unsuited("states of its cache share memory")
        if {storage(t) for t in (logits, *trace.states.values())} & trace.choices.keys():
            raise Unsuited("what its index of keys finds goes elsewhere than to the engine's attention")
        attending = [n for n in trace.nodes if n.kind == "attend" and n.kwargs["source"] is None]
        self.widths = {n.what: n.args[0].shape[3] for n in attending}
        self.chunks = {n.what: n.kwargs["chunk"] for n in attending}
        self._fold()
        nodes = side_by_side(live(self.running, [logits, *trace.states.values()]))
        read = {storage(t) for n in nodes for t in tensors_in((n.args, arguments(n)))}
        self.counts = storage(trace.inputs[2]) in read
        self.places = self._arrange(nodes, storage(logits))
        for node in nodes:
            self._emit(node)
        self._flush()
        self.logits = self.place(logits)
        self.last = self._writer(nodes[-1], logits)

    def _fold(self) -> None:
        """Which nodes have to run: not views, nor what depends on weights alone."""
        self.made: set[int] = set()
        self.running: list[Node] = []
        runs = set(map(id, moving(self.trace)))
        for node in self.trace.nodes:
            if is_view(node):
                continue
            if id(node) not in runs:
                self.fixed |= {id(t): t for t in tensors_in((node.args, node.kwargs))}
                continue
            if {storage(t) for t in changed(node)} - self.made - self.given.keys():
                raise Unsuited(f"{node.what} changes a tensor of the model")
            self.made |= {storage(o) for o in node.outputs} - self.given.keys()
            self.running.append(node)

    def _arrange(self, nodes: list[Node], logits: int) -> dict[int, int]:
        """Where in one stretch of memory each storage lies; stretches are used again once nobody reads them any more."""
        cached = {storage(t) for n in self.trace.nodes if n.kind == "append" for t in n.kwargs["rows"]}
        cached |= self.trace.choices.keys() | self.trace.masks.keys()
        sizes: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, node in enumerate(nodes):
            for t in (*tensors_in((node.args, arguments(node))), *node.outputs):
                key = storage(t)
                if key in cached:
                    raise Unsuited(
                        f"{node.what} reads the cache, or a mask, outside of the engine's attention"
                    )
                if key in self.made:
                    sizes[key], last[key] = t.untyped_storage().nbytes(), at
                elif key not in self.given:
                    self.fixed[id(t)] = t
        last[logits] = len(nodes)
        ending = defaultdict(list)
        for key, at in last.items():
            ending[at].append(key)
        free: list[tuple[int, int]] = []
        places: dict[int, int] = {}
        end = 0
        for at, node in enumerate(nodes):
            for t in node.outputs:
                key = storage(t)
                if key in places or key not in self.made:
                    continue
                size = -(-max(sizes[key], 1) // ALIGNMENT) * ALIGNMENT
                fit = next((i for i, (_, room) in enumerate(free) if room == size), None)
                if fit is None:
                    places[key], end = end, end + size
                else:
                    places[key] = free.pop(fit)[0]
            for key in ending[at]:
                if key in places:
                    free.append((places[key], -(-max(sizes[key], 1) // ALIGNMENT) * ALIGNMENT))
        memory = torch.zeros(end + ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
        self.memory = memory[start : start + end]
        return places

    def place(self, t: Tensor) -> Tensor:
        """Where a recorded tensor lies when the step runs again."""
        key = storage(t)
        if key in self.given:
            return _seen_as(self.given[key], t)
        if key not in self.made:
            return t
        start = (self.places[key] + self.memory.storage_offset()) // t.element_size()
        return _seen_as(self.memory, t, start)

    def placed(self, value: Any) -> Any:
        """Arguments on the places of their tensors."""
        if isinstance(value, Tensor):
            return self.place(value)
        if isinstance(value, list | tuple):
            return type(value)(self.placed(v) for v in value)
        if isinstance(value, dict):
            return {k: self.placed(v) for k, v in value.items()}
        return value

    def states_by_layer(self) -> dict[int, dict[tuple[str, int], Tensor]]:
        """The places of states, by layer of the cache, and by kind and number there."""
        found: dict[int, dict[tuple[str, int], Tensor]] = {}
        for (layer, kind, i), place in self.states.items():
            found.setdefault(layer, {})[kind, i] = place
        return found

    def _emit(self, node: Node) -> None:
        nodes = getattr(self, f"_{node.kind}")(node)
        self.newest = len(nodes or ())
        if nodes is not None:
            self.pending += nodes
            return
        self._flush()
        args, kwargs = self.placed(node.args), self.placed(node.kwargs)
        if node.kind == "module":
            self.steps.append((Copied(node.what.forward, [self.place(node.outputs[0])]), args, kwargs))
        elif written := {storage(t) for t in changed(node)}:
            call = Copied(node.what, self.placed(node.outputs))
            alone = all(storage(o) in written for o in node.outputs)
            self.steps.append((node.what if alone else call, args, kwargs))
        else:
            self.steps.append(self._torch_call(node, args, kwargs))

    def _writer(self, operator: Node, logits: Tensor) -> Any:
        """The last operator's node of the engine, if it is one and makes all of the logits; None if not."""
        made = [(storage(t), t.numel()) for t in operator.outputs]
        if self.newest != 1 or made != [(storage(logits), logits.numel())] or not logits.is_contiguous():
            return None
        program, count = self.steps[-1][1]
        return program[count - 1]

    def _flush(self) -> None:
        if self.pending:
            program = ops.step.program(self.pending)
            self.keep.append(program)
            self.steps.append((ops.step.run_nodes, (program, len(self.pending)), {}))
            self.natives += len(self.pending)
            self.pending = []

    def _torch(self, node: Node) -> list[Any] | None:
        return small_nodes(node.what, self.placed(node.args), node.kwargs, self.placed(node.outputs))

    def _torch_call(self, node: Node, args: Any, kwargs: Any) -> Run:
        """An operator that writes where its results belong, or whose results are copied there."""
        places = [self.place(o) for o in node.outputs]
        function = into(node)
        if function is not None:
            return function, args, {**kwargs, "out": one_or_all(places)}
        return Copied(node.what, places), args, kwargs

    def _module(self, node: Node) -> list[Any] | None:
        """A packed module by the call that is bound to its weights."""
        module = node.what
        residence = module.residence
        if node.kwargs or not isinstance(residence, AsStored) or residence.binding is None:
            return None
        call, y = residence.binding.made, self.place(node.outputs[0])
        inputs = [self.place(t) for t in node.args]
        if call is None or not y.is_contiguous() or not all(t.is_contiguous() for t in inputs):
            return None
        self.keep.append(call)
        if isinstance(module, PackedLinear) and module.shape[1] == module.in_features:
            return [call.node(inputs[0], y)]
        if isinstance(module, PackedExperts) and module.plainly:
            return [call.node(*inputs, y)]
        return None

    def _append(self, node: Node) -> list[Any]:
        key, value = (self.place(t) for t in node.args)
        texts = len(self.inputs[0])
        if key.dim() != 4 or key.shape[0] != texts or key.shape[2] != 1 or value.shape[3] > key.shape[3]:
            raise Unsuited(f"its cache takes keys of shape {list(key.shape)}")
        if key.stride(3) != 1 or value.stride(3) != 1:
            raise Unsuited("its cache takes keys whose values lie apart")
        layer = node.what
        if layer in self.rows:
            raise Unsuited("it writes to a layer of the cache twice")
        (heads, width), beside = (key.shape[1], key.shape[3]), value.shape[3]
        joined = self.widths.get(layer) == width + beside
        chunk = self.chunks.get(layer)
        rows = Rows(heads, width, beside, key.dtype, texts=texts, joined=joined, chunk=chunk)
        self.rows[layer] = rows
        if not joined:
            texts_of = zip(key, value, rows.natives, strict=True)
            return [ops.step.append_row(k[:, 0], v[:, 0], native) for k, v, native in texts_of]
        row = torch.empty(texts, heads, width + beside, dtype=key.dtype)
        self.keep.append(row)
        parts = (row[..., :width], key[:, :, 0]), (row[..., width:], value[:, :, 0])
        return [
            *(ops.step.elementwise(ops.step.Kind.COPY, to, t) for to, t in parts if t.numel()),
            *(ops.step.append_row(r, r, native) for r, native in zip(row, rows.natives, strict=True)),
        ]

    def _index(self, node: Node) -> list[Any]:
        key, texts = self.place(node.args[0]), len(self.inputs[0])
        one_each = key.numel() == texts * key.shape[-1] and len(key) == texts
        if not one_each or not key.is_contiguous() or node.what in self.indices:
            raise Unsuited(f"its index of keys takes some of shape {list(key.shape)}")
        rows = key.view(texts, 1, -1)
        index = self.indices[node.what] = Index(node.kwargs["field"], rows.shape[2], rows.dtype, texts)
        return [ops.step.append_row(r, r, native) for r, native in zip(rows, index.rows.natives, strict=True)]

    def _attend(self, node: Node) -> list[Any]:
        (query,), (made,), sources = node.args, node.outputs, node.kwargs["source"]
        rows = self.rows[node.what] if sources is None else self._source(node.what, sources, query)
        _, heads, _, width = query.shape
        scale = node.kwargs["scale"]
        scale = width**-0.5 if scale is None else scale
        extras = [node.kwargs.get(name) for name in ("sinks", "bias")]
        extras = [None if t is None else t.detach().float().contiguous() for t in extras]
        self.keep += extras
        queries, nodes = self.place(query)[:, :, 0], []
        if not queries.is_contiguous():
            dense = torch.empty(queries.shape, dtype=query.dtype)
            self.keep.append(dense)
            nodes.append(ops.step.elementwise(ops.step.Kind.COPY, dense, queries))
            queries = dense
        for q, out, native in zip(queries, self.place(made), rows.natives, strict=True):
            base = out.as_strided((heads, width), (width, 1), out.storage_offset())
            nodes.append(ops.step.attend_cached(base, q, rows.heads, native, scale, *extras))
        return nodes

    def _source(self, layer: int, heads: int, query: Tensor) -> Source:
        if layer not in self.sources:
            self.sources[layer] = Source(heads, query.shape[3], query.dtype, len(query))
        return self.sources[layer]


def _like(t: Tensor) -> Tensor:
    """The same tensor in memory of its own."""
    return _seen_as(torch.zeros(t.untyped_storage().nbytes(), dtype=torch.uint8), t)


def _seen_as(memory: Tensor, t: Tensor, start: int = 0) -> Tensor:
    """A tensor as `t` lies in its storage, but in that of another, from such an element on."""
    whole = torch.empty(0, dtype=t.dtype).set_(memory.untyped_storage())
    return whole.as_strided(t.shape, t.stride(), start + t.storage_offset())


@torch.inference_mode(False)
@torch.no_grad()
def lower(trace: Trace, logits: Tensor) -> Lowered:
    """A step that runs. Raises Unsuited for what has no place."""
    made = Lowering(trace, logits)
    return Lowered(
        steps=made.steps,
        inputs=made.inputs,
        words=tuple(c_int64.from_address(t.data_ptr()) for t in made.inputs),
        logits=made.logits,
        last=made.last,
        rows=made.rows,
        states={at: States(places) for at, places in made.states_by_layer().items()},
        indices=made.indices,
        sources=made.sources,
        fixed=list(made.fixed.values()),
        natives=made.natives,
        nbytes=made.memory.nbytes,
        counts=made.counts,
        keep=made.keep,
    )
