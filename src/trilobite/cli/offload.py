"""trace, cache: which experts a text uses, and what that says about caches and guesses."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trilobite.cli.console import Progress, number, print_json, print_table, quiet, size
from trilobite.cli.memory import MemoryOption, load_within, place_of
from trilobite.cli.options import (
    DeviceOption,
    JsonOption,
    TargetTextOption,
    WindowOption,
    check_output,
    usable_device,
)
from trilobite.cli.run import ModelArgument


def trace(
    model: ModelArgument,
    text: Annotated[
        Path, typer.Option("--text", help="A UTF-8 text file to run through the model.", metavar="FILE")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to write the trace (npz).", metavar="FILE")
    ] = Path("trace.npz"),
    target: TargetTextOption = None,
    context: WindowOption = None,
    samples: Annotated[
        int | None, typer.Option(help="Only the first N windows, or pairs of lines.", min=1, metavar="N")
    ] = None,
    device: DeviceOption = "auto",
    memory: MemoryOption = "auto",
    json: JsonOption = False,
) -> None:
    """Note which experts a text uses, and which ones would have been guessed.

    Layer by layer and token by token, for an original or a packed model. An encoder-decoder reads pairs: --text has
    the sentences, --target-text their translations, line by line. `trilobite cache` reads the file.

    \b
    Example: trilobite trace mixtral-3bit --text wiki.test.txt --samples 8 -o trace.npz
    Example: trilobite trace nllb-moe-int4 --text test.en --target-text test.de -o trace.npz
    """
    check_output(output, text, target)
    from trilobite.evaluate.measure import default_context, trace_experts, trace_experts_of_pairs
    from trilobite.evaluate.trace import save_trace
    from trilobite.runtime.load import load_tokenizer

    with quiet():
        loaded = load_within(model, memory, device=usable_device(place_of(device, memory)))
        tokenizer = load_tokenizer(model)
        with Progress() as bars:
            how: Any = {"samples": samples, "progress": bars.step("pairs" if target else "windows")}
            if target is not None:
                found = trace_experts_of_pairs(loaded, tokenizer, text, target, **how)
            else:
                context = context or default_context(512, loaded)
                found = trace_experts(loaded, tokenizer, text, context=context, **how)
    save_trace(output, found)
    layers, tokens, active = found.experts.shape
    if json:
        print_json(
            {
                "output": str(output),
                "layers": found.names,
                "experts": found.experts_of,
                "active": active,
                "tokens": tokens,
                "guessers": sorted(found.guesses),
            }
        )
        return
    print(f"{layers} layers of {max(found.experts_of)} experts, {active} of them for each of {tokens} tokens")
    print(f"written to {output}, {size(output.stat().st_size)}; `trilobite cache {output}` reads it")


def cache(
    path: Annotated[Path, typer.Argument(help="A file made by `trilobite trace`.", metavar="TRACE")],
    tokens: Annotated[
        int | None, typer.Option("-n", "--tokens", help="Only the first N tokens.", min=1, metavar="N")
    ] = None,
    pool: Annotated[
        bool, typer.Option("--pool", help="One pool of slots instead of k for each layer.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw both figures into a PNG file.", metavar="FILE")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what a cache of experts would do for a traced text, and how good guesses are.

    Hit ratio against the number k of experts of a layer that fit, by policy (belady knows the future: the bound
    for all); recall of the needed experts against the number guessed, by guesser (arXiv:2312.17238, figure 2).

    \b
    Example: trilobite cache trace.npz --plot figure2.png
    """
    from trilobite.evaluate.cache_simulation import hit_ratios, recalls
    from trilobite.evaluate.trace import load_trace

    found = load_trace(path)
    ratios, recall = hit_ratios(found, tokens=tokens, shared=pool), recalls(found)
    if plot is not None:
        from trilobite.evaluate.cache_plot import draw

        draw(plot, ratios, recall, title=f"{Path(found.model).name}, {found.text}")
    if json:
        print_json({"model": found.model, "text": found.text, "hit_ratio": ratios, "recall": recall})
        return
    what = f"{found.model} on {found.text}"
    _print("policy, k", ratios, f"hit ratio with k slots a layer{' in one pool' if pool else ''}: {what}")
    _print("guesser, guesses", recall, "recall of the experts needed")
    if plot is not None:
        print(f"drawn into {plot}")


def _print(corner: str, rows: dict[str, dict[int, float]], title: str) -> None:
    columns = sorted({n for row in rows.values() for n in row})
    table = [(name, *(number(row.get(n), 3) for n in columns)) for name, row in rows.items()]
    print_table((corner, *map(str, columns)), table, title=title)
