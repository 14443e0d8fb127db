"""What a server makes of many clients, beside `generate` at the same batch, on models of a few true layers.

    python -m benchmarks.speed.serve --clients 1 4 8 16 --page docs/serving.md

Every client sends one prompt at the same moment and reads its answer as a stream; nobody's prompt is in the cache.
`generate` runs the same prompts as one batch of transformers' `generate`, without HTTP. Tokens per second are those of
all answers together, from the first request to the last token, so that reading the prompts counts. The ratio of a
client alone to `generate` is what server and continuous batching cost. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from benchmarks.lib.markdown import table
from benchmarks.lib.script import add_output, add_page, parser, publish
from benchmarks.lib.whole_models import packed_models
from tools.serving import Server, serving
from trilobite.runtime.load import load

MARKER = "serving"


def write_tokenizer(folder: Path) -> int:
    """A tokenizer of numbered words, as many as the model has; returns how many."""
    size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return size


class Prompts:
    """Prompts of numbered words, none of them twice."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self.vocabulary, self.tokens, self.random = vocabulary, tokens, random.Random(3)

    def draw(self, count: int) -> list[list[int]]:
        return [[self.random.randrange(3, self.vocabulary) for _ in range(self.tokens)] for _ in range(count)]


def text(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


async def _client(http: httpx.AsyncClient, ids: Sequence[int], tokens: int) -> tuple[float, int]:
    """Seconds until the first token, tokens of the answer."""
    body = {"prompt": text(ids), "max_tokens": tokens, "stream": True, "ignore_eos": True}
    started, first = time.perf_counter(), 0.0
    usage: dict[str, int] = {}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - started
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    assert usage["prompt_tokens"] == len(ids)
    return first, int(usage["completion_tokens"])


async def burst(server: Server, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
    """Tokens per second of all clients together, and the median of seconds until their first tokens."""
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
        started = time.perf_counter()
        found = await asyncio.gather(*(_client(http, p, tokens) for p in prompts))
        seconds = time.perf_counter() - started
    return sum(n for _, n in found) / seconds, statistics.median(first for first, _ in found)


def served(
    folder: Path, prompts: Prompts, options: argparse.Namespace, progress: Callable[[str], None]
) -> Iterator[tuple[int, float, float]]:
    """Clients, tokens per second, seconds until the first token."""
    context = prompts.tokens + options.tokens
    slots, threads = max(options.clients), torch.get_num_threads()
    with serving(folder, "--slots", slots, "--context", context, threads=threads) as server:
        asyncio.run(burst(server, prompts.draw(1), 4))
        for clients in options.clients:
            progress(f"{clients} clients")
            runs = [
                asyncio.run(burst(server, prompts.draw(clients), options.tokens))
                for _ in range(options.repeat)
            ]
            yield clients, max(r[0] for r in runs), min(r[1] for r in runs)


@torch.inference_mode()
def generated(
    folder: Path, prompts: Prompts, options: argparse.Namespace, progress: Callable[[str], None]
) -> Iterator[tuple[int, float, float]]:
    """The same for batches of `generate`."""
    model = load(str(folder))

    def run(batch: int, tokens: int) -> float:
        ids = torch.tensor(prompts.draw(batch))
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    run(1, 4)
    for batch in options.clients:
        progress(f"generate, batch {batch}")
        seconds = min(run(batch, options.tokens) for _ in range(options.repeat))
        yield batch, batch * options.tokens / seconds, min(run(batch, 1) for _ in range(options.repeat))


def measure(
    folder: Path, options: argparse.Namespace, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each number of clients."""
    prompts = Prompts(write_tokenizer(folder), options.prompt)
    alone = {b: found for b, *found in generated(folder, prompts, options, progress)}
    rows = []
    for clients, speed, first in served(folder, prompts, options, progress):
        reference, reference_first = alone[clients]
        row = {"clients": clients, "tokens_per_second": speed, "first_token": first}
        row |= {"generate": reference, "generate_first_token": reference_first, "ratio": speed / reference}
        rows.append({name: round(value, 4) for name, value in row.items()})
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    header = ("clients", "tokens/s", "first token", "`generate` tokens/s", "its first token", "ratio")
    return table(
        header,
        [
            (
                str(r["clients"]),
                f"{r['tokens_per_second']:.1f}",
                f"{r['first_token']:.2f} s",
                f"{r['generate']:.1f}",
                f"{r['generate_first_token']:.2f} s",
                f"{r['ratio']:.2f}",
            )
            for r in rows
        ],
    )


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument(
        "packed", type=Path, nargs="*", help="packed models; default: two of a few true layers"
    )
    options.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--repeat", type=int, default=1)
    add_page(options, MARKER)
    add_output(options)
    args = options.parse_args()
    parts, found = [], {}
    for title, folder in [(p.name, p) for p in args.packed] or packed_models():
        found[title] = measure(folder, args, partial(print, f"{title}:", flush=True))
        parts.append(f"{title}:\n\n{report(found[title])}")
    publish("\n\n".join(parts), found, page=args.page, marker=MARKER, output=args.output)


if __name__ == "__main__":
    main()
