"""How often does a number that enters a matrix need the lowest of the three digits of exact products?

    python -m benchmarks.quality.low_digits MODEL... [--tokens 1024] [--page docs/performance.md]

Runs the models in bfloat16 and cuts what enters attention, its output matrix and the MLPs into digits as the CPU engine
does (csrc/kernel/digits.h): per segment of 64 columns, multiples of the least power of two with which the largest has
three. By input, over all layers: in how many of a segment's 16 steps of four columns some lowest digit is not zero, how
many segments have no more than the two such steps for which the engine has room (many tokens), and how many times 16
columns have none (one token). The last line is JSON.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.lib.markdown import table
from benchmarks.lib.scoring import open_bench
from benchmarks.lib.script import add_page, add_text, parser, publish
from trilobite.runtime.load import load

SEGMENT, STEP, ROOM, PART = 64, 4, 2, 4
"""Columns; columns; steps; steps."""
LARGEST = 127 * (2**16 + 2**8 + 1)
"""Of three digits."""
INPUTS = {"q_proj": "attention", "o_proj": "its output matrix", "mlp": "MLP"}
"""By the last part of a module's name: what its input is called."""


def steps(x: Tensor) -> Tensor:
    """Which steps have a lowest digit. x: [tokens, K], K a multiple of 64    returns: [tokens, K / 64, 16]"""
    segments = x.double().unflatten(-1, (-1, SEGMENT))
    scale = torch.frexp(segments.abs().amax(-1, keepdim=True) / LARGEST).exponent
    whole = torch.round(torch.ldexp(segments, -scale)).long()
    low = (whole + 128) % 256 != 128
    return low.unflatten(-1, (-1, STEP)).any(-1)


@torch.inference_mode()
def measure(model: Path, ids: Tensor, context: int) -> dict[str, list[float]]:
    """By input: mean steps, share of segments with at most ROOM, of parts with none. ids: [tokens] int64"""
    found: dict[str, list[Tensor]] = defaultdict(list)

    def look(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given:
            found[name].append(steps(given[0].flatten(0, -2)).flatten(0, -2))

    original = load(str(model), dtype=torch.bfloat16)
    for path, module in original.named_modules():
        if name := INPUTS.get(path.rpartition(".")[2]):
            module.register_forward_pre_hook(partial(look, name))
    original(ids[: len(ids) // context * context].view(-1, context))
    return {name: summary(torch.cat(parts)) for name, parts in found.items()}


def summary(low: Tensor) -> list[float]:
    """What `measure` says. low: [segments, 16]"""
    count, none = low.sum(-1), ~low.unflatten(-1, (-1, PART)).any(-1)
    return [float(t.double().mean()) for t in (count, count <= ROOM, none)]


def main() -> None:
    """One table."""
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    add_text(options, tokens=1024)
    add_page(options, "low-digits")
    args = options.parse_args()
    found = {}
    for model in args.models:
        bench = open_bench(model, args.text, context=args.context, tokens=args.tokens)
        found[model.name] = measure(model, bench.ids, args.context)
    rows = [
        (model, name, f"{mean:.2f}", f"{few:.1%}", f"{none:.1%}")
        for model, of in found.items()
        for name, (mean, few, none) in of.items()
    ]
    report = table(
        ("model", "input of", "steps of 16", f"segments with up to {ROOM}", "16 columns without"), rows
    )
    publish(report, {"low_digits": found}, page=args.page, marker="low-digits")


if __name__ == "__main__":
    main()
