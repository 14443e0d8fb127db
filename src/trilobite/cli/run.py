"""generate: text from a model; the options of what makes text."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trilobite.cli.console import note, print_json, quiet
from trilobite.cli.memory import (
    AheadOption,
    GpuMemoryOption,
    GuessesOption,
    MemoryOption,
    Metrics,
    VerboseOption,
    load_within,
    place_of,
)
from trilobite.cli.options import ActivationsOption, DeviceOption, JsonOption, named, usable_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trilobite.runtime.generate.cache import FixedCache
    from trilobite.runtime.generate.text import Generated

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A packed or an original checkpoint: folder or hub id.", callback=named, metavar="MODEL"
    ),
]


def _check_seed(seed: int | None) -> int | None:
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise typer.BadParameter("expected an integer of at most 64 bits")
    return seed


SeedOption = Annotated[
    int | None, typer.Option(help="Same seed, same text.", callback=_check_seed, metavar="S")
]
TemperatureOption = Annotated[
    float, typer.Option(help="0 = always the likeliest token; 0.7 = livelier.", min=0.0, metavar="T")
]
TopPOption = Annotated[
    float,
    typer.Option(
        help="Sample among the likeliest tokens of this total probability.", min=0.0, max=1.0, metavar="P"
    ),
]
TopKOption = Annotated[
    int,
    typer.Option("--top-k", help="Sample among the N likeliest tokens; 0 = all.", min=0, metavar="N"),
]
PenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Above 1: what the text holds already becomes less likely; default: the checkpoint's own.",
        metavar="X",
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End the text before this string; repeat it for several.", metavar="TEXT"),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="On a GPU: compile the decoding step to a CUDA graph; the first token waits for the compiler.",
    ),
]


def place(device: str, compiled: bool, gpu_memory: str | None) -> str:
    """Where a model runs.

    Raises typer.BadParameter for a step compiled on a CPU, where that does not pay, or with experts that stream.
    """
    if compiled and gpu_memory is not None:
        raise typer.BadParameter("a compiled step brings no experts: leave out --compile or --gpu-memory")
    found = usable_device(device)
    if compiled and found == "cpu":
        raise typer.BadParameter("--compile is for GPUs: add --device cuda")
    return found


def fixed_cache(compiled: bool, model: "PreTrainedModel") -> "FixedCache | None":
    """What makes `generate` compile its step, where that is asked for."""
    from trilobite.runtime.generate.cache import FixedCache

    if not compiled:
        return None
    cache = FixedCache(model)
    note("the first token waits for the compiler, a minute or more")
    return cache


def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="What to continue; - = standard input.", metavar="PROMPT")],
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", help="At most so many tokens.", min=1, metavar="N")
    ] = 64,
    seed: SeedOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    repetition_penalty: PenaltyOption = None,
    stop: StopOption = None,
    device: DeviceOption = "auto",
    compiled: CompileOption = False,
    activations: ActivationsOption = "exact",
    memory: MemoryOption = "auto",
    gpu_memory: GpuMemoryOption = None,
    guesses: GuessesOption = 2,
    ahead: AheadOption = 1,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Continue a prompt.

    The text streams to standard output, the speed goes to standard error.

    \b
    Example: trilobite generate mixtral-3bit "The sea is" -n 64 --temperature 0.7 --seed 1
    """
    from trilobite.runtime.generate import text as runtime
    from trilobite.runtime.load import load_tokenizer

    with quiet():
        sampling = runtime.Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            stop=tuple(stop or ()),
            seed=seed,
        )
        if prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        where = place(place_of(device, memory, gpu_memory), compiled, gpu_memory)
        loaded = load_within(
            model,
            memory,
            gpu_memory=gpu_memory,
            device=where,
            activations=activations,
            guesses=guesses,
            ahead=ahead,
        )
        tokenizer, metrics = load_tokenizer(model), Metrics(loaded)
        apart = "\n" if loaded.config.is_encoder_decoder else ""  # the prompt is a source, no beginning
        echo = _Echo(prompt + apart)
        made = runtime.generate(
            loaded,
            tokenizer,
            prompt,
            tokens=tokens,
            sampling=sampling,
            on_text=None if json else echo.write,
            cache=fixed_cache(compiled, loaded),
        )
    if json:
        print_json(
            {
                "prompt": prompt,
                "text": made.text,
                "prompt_tokens": made.prompt_tokens,
                "tokens": made.tokens,
                "stop": made.stop,
                "prompt_seconds": round(made.prompt_seconds, 4),
                "seconds": round(made.seconds, 4),
                "tokens_per_second": round(made.tokens_per_second, 3),
                **metrics.since(),
            }
        )
    else:
        echo.write("\n")
        note(speed(made))
        if verbose:
            note(metrics.line())


class _Echo:
    """The prompt, once the model accepted it and its first text is there; then what follows."""

    def __init__(self, prompt: str) -> None:
        self.before = prompt

    def write(self, text: str) -> None:
        _write(self.before + text)
        self.before = ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def speed(made: "Generated") -> str:
    """How fast a text was read and made, in a line."""
    stop = {"context": "; stopped where the model's context ends", "interrupted": "; stopped by you"}.get(
        made.stop, ""
    )
    remembered = f" ({made.remembered} remembered)" if made.remembered else ""
    return (
        f"{made.tokens} tokens, {made.tokens_per_second:.1f} tokens/s; "
        f"prompt of {made.prompt_tokens} tokens{remembered} in {made.prompt_seconds:.2f} s{stop}"
    )
