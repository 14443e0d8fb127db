"""Whether two steps that were written down are the same but for their inputs."""

from typing import Any

import torch
from torch import Tensor

from trilobite.runtime.step.trace import Trace, arguments, live, moving


def differ(one: Trace, other: Trace) -> str | None:
    """Why two steps, at different positions, are not the same but for their inputs; None where they are."""
    ways = [live(moving(t), [t.result.logits, *t.states.values()]) for t in (one, other)]
    if len(ways[0]) != len(ways[1]) or one.states.keys() != other.states.keys():
        return "it does different things at different positions"
    names: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for trace, known in zip((one, other), names, strict=True):
        known.update({id(t): ("input", i) for i, t in enumerate(trace.inputs)})
        known.update({id(t): ("state", key) for key, t in trace.states.items()})
    for at, (a, b) in enumerate(zip(*ways, strict=True)):
        sizes = [[(o.shape, o.stride(), o.storage_offset(), o.dtype) for o in n.outputs] for n in (a, b)]
        if a.kind != b.kind or a.what != b.what or (sizes[0] != sizes[1]):
            return f"{a.what} differs between positions"
        ours, theirs = ((n.args, sorted(arguments(n).items())) for n in (a, b))
        if not _same(ours, theirs, names):
            return f"arguments of {a.what} differ between positions"
        for known, node in zip(names, (a, b), strict=True):
            for i, o in enumerate(node.outputs):
                known.setdefault(id(o), (at, i))
    return None


def _same(a: Any, b: Any, names: tuple[dict[int, Any], dict[int, Any]]) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        ours, theirs = names[0].get(id(a)), names[1].get(id(b))
        if ours is not None or theirs is not None:
            return bool(ours == theirs)
        like = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return a is b or (like and bool(torch.equal(a, b)))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y, names) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)
