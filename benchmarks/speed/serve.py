"""What a server makes of many clients, beside `generate` at the same batch, on models of a few true layers.

    python -m benchmarks.speed.serve --clients 1 4 8 16 --page docs/serving.md

`--llama LLAMA_SERVER --gguf FILE FILE` puts llama.cpp's server beside it, with a file of `benchmarks.lib.gguf` for each
model (same shapes, Q3_K), the same clients, slots and threads.
Every client sends one prompt at the same moment and reads its answer as a stream; nobody's prompt is in the cache.
`generate` runs the same prompts as one batch of transformers' `generate`, without HTTP. Tokens per second are those of
all answers together, from the first request to the last token, so that reading the prompts counts. All take turns,
`--repeat` times, since memory differs from minute to minute; medians. The ratio of a client alone to `generate` is what
server and continuous batching cost. "int8" is our server with `--activations int8`, as llama.cpp multiplies always. The
last line is JSON.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
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
from tools.serving import serving
from trilobite.kernels.cpu import engine
from trilobite.runtime.load import load

MARKER = "serving"
WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


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


async def _client(
    http: httpx.AsyncClient, ids: Sequence[int], tokens: int, *, words: bool
) -> tuple[float, int]:
    """Seconds until the first token, tokens of the answer."""
    body: dict[str, Any] = {"max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body |= {"prompt": text(ids)} if words else {"prompt": ids, "cache_prompt": False, **WITH_USAGE}
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


async def burst(
    url: str, prompts: Sequence[Sequence[int]], tokens: int, *, words: bool = True
) -> tuple[float, float]:
    """Tokens per second of all clients together, and the median of seconds until their first tokens.

    words: prompts go as text, not as numbers
    """
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        started = time.perf_counter()
        found = await asyncio.gather(*(_client(http, p, tokens, words=words) for p in prompts))
        seconds = time.perf_counter() - started
    return sum(n for _, n in found) / seconds, statistics.median(first for first, _ in found)


Run = Callable[[int], tuple[float, float]]
"""Of so many clients: tokens per second of all together, and the median of seconds until their first tokens."""


@contextmanager
def served(
    folder: Path, prompts: Prompts, options: argparse.Namespace, activations: str = "exact"
) -> Iterator[Run]:
    """Our server, in a process of its own."""
    context = prompts.tokens + options.tokens
    slots, threads = max(options.clients), torch.get_num_threads()
    arguments = ("--slots", slots, "--context", context, "--activations", activations)
    with serving(folder, *arguments, threads=threads) as server:
        yield lambda clients: asyncio.run(burst(server.url, prompts.draw(clients), options.tokens))


@contextmanager
def llama(file: Path, prompts: Prompts, options: argparse.Namespace) -> Iterator[Run]:
    """llama.cpp's server."""
    slots, port = max(options.clients), free_port()
    context = slots * (prompts.tokens + options.tokens + 8)
    command = [options.llama, "-m", file, "-t", torch.get_num_threads(), "-c", context, "-np", slots]
    command += ["--port", port, "--no-warmup", "--log-disable"]
    process = subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(url):
            if process.poll() is not None:
                raise SystemExit(f"{options.llama} ended with {process.returncode}")
            time.sleep(0.2)
        yield lambda clients: asyncio.run(burst(url, prompts.draw(clients), options.tokens, words=False))
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def generated(folder: Path, prompts: Prompts, options: argparse.Namespace) -> Iterator[Run]:
    """Batches of `generate`, in this process."""
    model = load(str(folder))

    @torch.inference_mode()
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

    yield lambda batch: (batch * options.tokens / run(batch, options.tokens), run(batch, 1))


def measure(
    folder: Path, file: Path | None, options: argparse.Namespace, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each number of clients. file: for llama.cpp."""
    prompts = Prompts(write_tokenizer(folder), options.prompt)
    with ExitStack() as stack:
        runs = {
            "serve": stack.enter_context(served(folder, prompts, options)),
            "generate": stack.enter_context(generated(folder, prompts, options)),
        }
        if engine.available():
            runs["int8"] = stack.enter_context(served(folder, prompts, options, "int8"))
        if file is not None:
            runs["llama"] = stack.enter_context(llama(file, prompts, options))
        for run in runs.values():
            run(1)
        rows = []
        for clients in options.clients:
            progress(f"{clients} clients")
            rows.append({"clients": clients} | _in_turns(runs, clients, options.repeat))
    return rows


def _in_turns(runs: dict[str, Run], clients: int, repeat: int) -> dict[str, float]:
    """The median of what each does in its turns, and of the ratios of turns beside each other."""
    turns = [{name: run(clients) for name, run in runs.items()} for _ in range(repeat)]
    row: dict[str, float] = {}
    for name in runs:
        row[name] = statistics.median(turn[name][0] for turn in turns)
        row[f"{name}_first_token"] = statistics.median(turn[name][1] for turn in turns)
    row["ratio"] = statistics.median(turn["serve"][0] / turn["generate"][0] for turn in turns)
    if "llama" in runs:
        row["llama_ratio"] = statistics.median(turn["serve"][0] / turn["llama"][0] for turn in turns)
    return {name: round(value, 4) for name, value in row.items()}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    columns = {"serve": "tokens/s", "serve_first_token": "first token"}
    columns |= {
        "generate": "`generate` tokens/s",
        "generate_first_token": "its first token",
        "ratio": "ratio",
    }
    if "int8" in rows[0]:
        columns |= {"int8": "int8 tokens/s", "int8_first_token": "its first token"}
    if "llama" in rows[0]:
        columns |= {
            "llama": "llama-server tokens/s",
            "llama_first_token": "its first token",
            "llama_ratio": "ratio to it",
        }

    def cell(name: str, value: float) -> str:
        if name.endswith("first_token"):
            return f"{value:.2f} s"
        return f"{value:.2f}" if name.endswith("ratio") else f"{value:.1f}"

    lines = [(str(r["clients"]), *(cell(name, r[name]) for name in columns)) for r in rows]
    return table(("clients", *columns.values()), lines)


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument(
        "packed", type=Path, nargs="*", help="packed models; default: two of a few true layers"
    )
    options.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--repeat", type=int, default=3)
    add_page(options, MARKER)
    add_output(options)
    options.add_argument("--llama", help="llama.cpp's llama-server")
    options.add_argument("--gguf", type=Path, nargs="+", default=[], help="a file of each model for it")
    args = options.parse_args()
    parts, found = [], {}
    models = zip_longest(
        [(p.name, p) for p in args.packed] or packed_models(), args.gguf if args.llama else []
    )
    for (title, folder), file in models:
        found[title] = measure(folder, file, args, partial(print, f"{title}:", flush=True))
        parts.append(f"{title}:\n\n{report(found[title])}")
    publish("\n\n".join(parts), found, page=args.page, marker=MARKER, output=args.output)


if __name__ == "__main__":
    main()
