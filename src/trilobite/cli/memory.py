"""Models larger than memory: the options, loading, and what is said about it."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.cli.console import note, size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trilobite.runtime.offload.slots import Counters

MemoryOption = Annotated[
    str,
    typer.Option(
        "--memory",
        help="Run in so much memory (8GiB), experts streaming from the disk; auto: only where the model does not fit.",
        metavar="SIZE",
    ),
]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory",
        help="Run on a GPU in so much of its memory (10GiB), experts streaming from RAM; --memory bounds that too.",
        metavar="SIZE",
    ),
]
GuessesOption = Annotated[
    int,
    typer.Option(
        "--guesses",
        help="With --memory, --gpu-memory: experts of a later layer to bring on speculation.",
        min=0,
        max=8,
        metavar="N",
    ),
]
AheadOption = Annotated[
    int,
    typer.Option(
        "--ahead", help="With --memory, --gpu-memory: how many layers ahead to speculate.", min=1, metavar="N"
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also say how the experts streamed, after every answer.")
]


def place_of(device: str, memory: str, gpu_memory: str | None = None) -> str:
    """The device to ask for, as bounds settle what `auto` leaves open.

    Raises typer.BadParameter for a GPU's memory with another device.
    """
    if gpu_memory is not None:
        if device == "cpu":
            raise typer.BadParameter("--gpu-memory is for GPUs: leave out --device cpu")
        return "cuda" if device == "auto" else device
    return "cpu" if device == "auto" and memory.lower() != "auto" else device


def load_within(
    path: str,
    memory: str,
    *,
    gpu_memory: str | None = None,
    device: str = "cpu",
    activations: str = "exact",
    guesses: int = 2,
    ahead: int = 1,
    context: int | None = None,
    texts: int = 1,
) -> "PreTrainedModel":
    """Load a model; where its experts stream, say on standard error what takes how much. Raises OffloadError.

    context: tokens of a text, None = as many as `Offload` has    texts: at a time
    """
    from trilobite import load
    from trilobite.runtime.offload.expectation import expectation
    from trilobite.runtime.offload.plan import AUTO, Offload, parse_size
    from trilobite.runtime.offload.streaming import streaming

    automatic = memory.lower() == AUTO
    bound: str | Offload = AUTO
    if not automatic or gpu_memory is not None:
        bound = Offload(
            memory=None if automatic else parse_size(memory),
            guesses=guesses,
            ahead=ahead,
            context=Offload.context if context is None else context,
            texts=texts,
        )
    model = load(path, device=device, activations=activations, memory=bound, gpu_memory=gpu_memory)
    found = streaming(model)
    if found is not None:
        if automatic and gpu_memory is None and (expected := expectation(found)) is not None:
            pace = f"{expected.tokens:.1f}" if expected.tokens < 10 else f"{expected.tokens:.0f}"
            note(
                "the model does not fit into free memory: experts stream from the disk, whose "
                f"{size(expected.bandwidth)}/s allow about {pace} tokens/s, more where a text keeps to "
                "few experts"
            )
        for line in found.notes:
            note(line)
    return model


class Metrics:
    """What streaming cost since the last look."""

    def __init__(self, model: "PreTrainedModel") -> None:
        """Looks a first time."""
        self._model = model
        self._before = self._now()

    def _now(self) -> "list[Counters]":
        """Of every tier that streams, the fastest first."""
        from trilobite.runtime.offload.streaming import streaming

        tier = streaming(self._model)
        found = []
        while tier is not None and tier.cache is not None:
            found.append(tier.counters)
            tier = tier.below
        return found

    def since(self) -> dict[str, Any]:
        """Counters as plain data; empty where nothing streams. below: those of the tier behind the first one."""
        now, before = self._now(), self._before
        self._before = now
        tiers = [_plain(later - earlier) for later, earlier in zip(now, before, strict=True)]
        return {} if not tiers else tiers[0] if len(tiers) == 1 else {**tiers[0], "below": tiers[1]}

    def line(self) -> str:
        """The same for people."""
        found = self.since()
        if not found:
            return "nothing streams: all experts lie in memory"
        below = found.get("below")
        return _line("experts", found) + ("" if below is None else _line("; behind them", below))


def _plain(found: "Counters") -> dict[str, Any]:
    return {
        "hit_ratio": round(found.hit_ratio, 4),
        "bytes_read": found.bytes,
        "guesses": found.guesses,
        "guesses_used": found.used,
        "stalled_seconds": round(found.stalled, 4),
    }


def _line(what: str, found: dict[str, Any]) -> str:
    return (
        f"{what}: hit ratio {100 * found['hit_ratio']:.1f} %, {size(found['bytes_read'])} read, "
        f"{found['guesses_used']} of {found['guesses']} guesses used, {found['stalled_seconds']:.2f} s stalled"
    )
