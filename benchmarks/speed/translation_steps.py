"""Steps of a translator's decoder, from lists and as transformers runs them, in turns in one process.

    GOMP_SPINCOUNT=10000 OMP_WAIT_POLICY=passive \\
        python -m benchmarks.speed.translation_steps PACKED --page docs/performance.md

PACKED is a folder that `trilobite compress` wrote of a model with an encoder; the variables are what
`trilobite translate` sets. A row is a number of texts: sources are as many sentences of the test set, from the first on,
padded to the longest; tokens are drawn. All logits are compared bit by bit. The last line is JSON.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.markdown import table
from benchmarks.lib.plain_translation import padded
from benchmarks.lib.script import add_machine, add_output, add_page, of_machine, parser, publish
from benchmarks.lib.translating import TEST
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load, load_tokenizer
from trilobite.runtime.step.conditions import new_cache
from trilobite.runtime.step.step_list import COMPARED, RECORDED
from trilobite.runtime.step.texts import WORTH

MARKER = "speed-translation-steps"
HEADER = ("texts", "transformers, ms", "from a list, ms", "times as fast", "tokens/s")


@torch.inference_mode()
def timed(model: Any, source: Tensor, mask: Tensor, tokens: Tensor) -> tuple[list[float], list[Tensor]]:
    """Seconds and logits of each step behind the first. source, mask: [texts, S]    tokens: [texts, steps + 1]."""
    encoded = model.get_encoder()(input_ids=source, attention_mask=mask)
    given = {
        "encoder_outputs": encoded,
        "attention_mask": mask,
        "use_cache": True,
        CACHE: new_cache(model.config),
    }
    seconds, logits = [], []
    for some in tokens.split(1, 1):
        started = time.perf_counter()
        made = model(decoder_input_ids=some, **given).logits
        seconds.append(time.perf_counter() - started)
        logits.append(made)
    return seconds[1:], logits[1:]


def measure(model: Any, sources: list[list[int]], options: argparse.Namespace) -> dict[str, float]:
    """Medians over all steps, in seconds."""
    texts, step = len(sources), model.forward
    source, mask = padded(sources)
    vocabulary = int(model.config.vocab_size)
    timed(model, source, mask, torch.randint(vocabulary, (texts, 2 + WORTH + RECORDED + COMPARED)))
    listed = step if texts == 1 else step.others.steps.get(texts)
    if listed is None or not listed.right:
        raise SystemExit(f"error: steps of {texts} texts have no list: {listed and listed.why}")
    found: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(options.rounds):
        tokens = torch.randint(vocabulary, (texts, 1 + options.tokens))
        seconds, ours = timed(model, source, mask, tokens)
        found["now"] += seconds
        del model.forward
        seconds, theirs = timed(model, source, mask, tokens)
        found["before"] += seconds
        model.forward = step
        if not all(map(torch.equal, ours, theirs)):
            raise SystemExit("error: logits differ")
    return {name: statistics.median(values) for name, values in found.items()}


def row(texts: int, found: dict[str, float]) -> tuple[str, ...]:
    """Of the table."""
    before, now = found["before"], found["now"]
    rate = f"{texts / before:,.0f} -> {texts / now:,.0f}"
    return (str(texts), f"{before * 1e3:.2f}", f"{now * 1e3:.2f}", f"{before / now:.1f}", rate)


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("packed", type=Path, help="a packed model with an encoder")
    options.add_argument("--texts", type=int, nargs="+", default=[1, 2, 5, 8, 20, 32, 64])
    options.add_argument("--tokens", type=int, default=24, help="steps of a round, each way")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--sentences", type=Path, default=TEST[0])
    add_page(options, MARKER)
    add_machine(options)
    add_output(options)
    args = options.parse_args()
    model, tokenizer = load(str(args.packed)), load_tokenizer(str(args.packed))
    ids = tokenizer(args.sentences.read_text().splitlines()[: max(args.texts)]).input_ids
    rows, summary = [], []
    for texts in args.texts:
        found = measure(model, ids[:texts], args)
        rows.append(row(texts, found))
        summary.append({"texts": texts, **found})
    publish(
        table(HEADER, rows),
        {"model": args.packed.name, "rows": summary},
        page=args.page,
        marker=of_machine(MARKER, args.machine),
        output=args.output,
    )


if __name__ == "__main__":
    main()
