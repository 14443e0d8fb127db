"""Many clients of vLLM on a packed model, beside `trilobite serve` on it and vLLM on the original in bf16.

    make vllm    # makes vLLM's environment
    python -m benchmarks.speed.vllm --page docs/vllm.md

The model has two layers of OLMoE's shape (64 experts of 2048 x 1024, 8 of them for a token), random weights. Clients,
prompts and what is counted as in `benchmarks.speed.serve`. All servers have as many threads as torch has here. A second
table says how many cores each kept busy, and how often a second one went from a thread that had not finished to another:
taken away, or given away by a thread that waited for work. The last line is JSON.
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoConfig

from benchmarks.lib.descendants import taken
from benchmarks.lib.markdown import table
from benchmarks.lib.script import ROOT, add_output, add_page, add_work, parser, publish
from benchmarks.lib.whole_models import make_checkpoint
from benchmarks.speed.serve import Prompts, Run, burst, free_port, served, write_tokenizer
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe

MARKER = "vllm"
PYTHON = ROOT / "build" / "vllm-venv" / "bin" / "python"
TITLES = {"serve": "`trilobite serve`", "vllm": "vLLM, packed", "vllm-bf16": "vLLM, bf16"}


def models(work: Path) -> dict[str, Path]:
    """The original, made where it is not there yet, and the model that this version packs of it."""
    original, packed = work / "olmoe-2-layers", work / "olmoe-2-layers-packed"
    if not (original / "config.json").exists():
        config = AutoConfig.for_model(
            "olmoe", num_hidden_layers=2, vocab_size=32000, max_position_embeddings=2048, eos_token_id=2
        )
        make_checkpoint(config, original)
    write_tokenizer(original)
    shutil.rmtree(packed, ignore_errors=True)
    compress(str(original), packed, load_recipe("rtn3"))
    return {"serve": packed, "vllm": packed, "vllm-bf16": original}


@contextmanager
def vllm(folder: Path, prompts: Prompts, options: argparse.Namespace) -> Iterator[Run]:
    """vLLM's server, in its environment."""
    port, length = free_port(), 2 * (prompts.tokens + options.tokens)
    command = [
        options.vllm,
        "-m",
        "support.vllm_command",
        "serve",
        folder,
        "--port",
        port,
        "--max-model-len",
        length,
    ]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tests"),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        [str(c) for c in command],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(url):
            if process.poll() is not None:
                raise SystemExit(f"vLLM ended with {process.returncode}")
            time.sleep(0.5)
        yield lambda clients: asyncio.run(burst(url, prompts.draw(clients), options.tokens, words=False))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class Served:
    """Of some clients. speed: tokens per second    first: seconds until the first token    cores: that were busy

    forced: switches per second of threads that had not finished
    """

    speed: float
    first: float
    cores: float
    forced: float

    @classmethod
    def by(cls, run: Run, clients: int) -> "Served":
        """One run."""
        before = taken()
        speed, first = run(clients)
        return cls(speed, first, *taken().since(before))


Found = dict[str, dict[int, Served]]
"""By server and clients: the fastest run."""


def measure(server: str, folder: Path, options: argparse.Namespace) -> dict[int, Served]:
    """By clients: the fastest of the runs."""
    prompts = Prompts(write_tokenizer(folder), options.prompt)
    if server == "serve":
        running = served(folder, prompts, options)
    else:
        running = vllm(folder, prompts, options)
    found = {}
    with running as run:
        run(1)
        for clients in options.clients:
            print(f"{server}: {clients} clients", flush=True)
            runs = (Served.by(run, clients) for _ in range(options.repeat))
            found[clients] = max(runs, key=lambda served: served.speed)
    return found


def report(found: Found) -> str:
    """Speeds, then cores, a line for each number of clients."""

    def rows(cell: Callable[[Served], str]) -> str:
        numbers = next(iter(found.values()))
        cells = [(str(n), *(cell(found[server][n]) for server in found)) for n in numbers]
        return table(("clients", *(TITLES[server] for server in found)), cells)

    speeds = rows(lambda s: f"{s.speed:.1f} ({s.first:.2f} s)")
    cores = rows(lambda s: f"{s.cores:.2f} ({s.forced:.0f})")
    return f"{speeds}\n\nCores busy, in brackets forced switches of threads per second:\n\n{cores}"


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--servers", nargs="+", choices=TITLES, default=list(TITLES))
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--repeat", type=int, default=2)
    options.add_argument("--vllm", type=Path, default=PYTHON, help="python of the environment with vLLM")
    add_work(options, "the two models stay here for reuse")
    add_page(options, MARKER)
    add_output(options)
    args = options.parse_args()
    folders = models(args.work)
    found: Found = {s: measure(s, folders[s], args) for s in args.servers}
    summary: dict[str, Any] = {s: {str(c): asdict(v) for c, v in rows.items()} for s, rows in found.items()}
    publish(report(found), summary, page=args.page, marker=MARKER, output=args.output)


if __name__ == "__main__":
    main()
