"""Many clients of vLLM on a packed model, beside `trilobite serve` on it and vLLM on the original in bf16.

    make vllm    # makes vLLM's environment
    python -m benchmarks.speed.vllm --page docs/vllm.md

The model has two layers of OLMoE's shape (64 experts of 2048 x 1024, 8 of them for a token), random weights. Clients,
prompts and what is counted as in `benchmarks.speed.serve`. All servers have as many threads as torch has here.
The last line is JSON.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoConfig

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
    """The original and the packed model, made where they are not there yet."""
    original, packed = work / "olmoe-2-layers", work / "olmoe-2-layers-packed"
    if not (original / "config.json").exists():
        config = AutoConfig.for_model(
            "olmoe", num_hidden_layers=2, vocab_size=32000, max_position_embeddings=2048, eos_token_id=2
        )
        make_checkpoint(config, original)
    write_tokenizer(original)
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


def measure(server: str, folder: Path, options: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """Clients -> tokens per second, seconds until the first token: the best of the runs."""
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
            speeds, firsts = zip(*(run(clients) for _ in range(options.repeat)), strict=True)
            found[clients] = max(speeds), min(firsts)
    return found


def report(found: dict[str, dict[int, tuple[float, float]]]) -> str:
    """A line for each number of clients."""
    rows = []
    for clients in next(iter(found.values())):
        cells = (f"{found[s][clients][0]:.1f} ({found[s][clients][1]:.2f} s)" for s in found)
        rows.append((str(clients), *cells))
    return table(("clients", *(TITLES[s] for s in found)), rows)


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
    found: dict[str, dict[int, tuple[float, float]]] = {s: measure(s, folders[s], args) for s in args.servers}
    summary: dict[str, Any] = {s: {str(c): v for c, v in rows.items()} for s, rows in found.items()}
    publish(report(found), summary, page=args.page, marker=MARKER, output=args.output)


if __name__ == "__main__":
    main()
