"""How close do the GPU kernels come to what this GPU can do?

    python -m benchmarks.gpu.measure [--quick] [--only experts,model] [--minutes 8] [--markdown docs/gpu.md]

Unattended, on a GPU with 80 GB; the whole model is left out where memory does not suffice. The limits come first:
bandwidth of a large copy (bytes read and written), and a large bf16 product. Then all kernels that the cases need are
compiled in parallel. Then the parts: a check against the reference, and the most valuable first; no case begins when
the minutes are over. What fails is named and left out; where a fault takes the GPU from the process, a new one goes on
with the next part. A line of JSON with everything measured so far follows each part, so the last one says it all.

A figure is the median over intervals of eight replays of one CUDA graph, which goes through so many weights or routings
that none is still in the cache when it comes again. `floor` is the time at which the copy's bandwidth would deliver the
packed bytes. `bf16` is the layer with torch's grouped_mm and the routing that it takes, `grouped_mm` its two products
alone.

Whole model: 32 layers of Mixtral-8x7B's shape, INT3 g64, random weights, INT8 head; milliseconds of one decoding step
behind 128 tokens at batch 1, 16 and 32, as MiLo's Table 6 (seconds a step on an A100-40GB: 0.088, 0.102, 0.105).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import (
    MILO,
    Experts,
    Linear,
    Matrix,
    compiled_case,
    decoding_cases,
    int3_cases,
    lattice_cases,
)
from benchmarks.gpu.check import check_cases
from benchmarks.gpu.rows import cells, finite
from benchmarks.gpu.run import Case, Run, compile_ahead
from benchmarks.lib.markdown import insert, markers, table
from benchmarks.lib.script import parser
from trilobite.measure.gpu import copy_bandwidth, matmul_peak
from trilobite.measure.shapes import DEEPSEEK, MIXTRAL

TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
FEW_TOKENS = (1, 16, 128)
LAYERS = (MIXTRAL, DEEPSEEK)
ATTENTION = Matrix(name="Mixtral attention", n=4096, k=4096)
SHAPES = (
    Matrix(name="Mixtral up", n=14336, k=4096),
    ATTENTION,
    Matrix(name="DeepSeek-MoE shared up", n=2816, k=2048),
    Matrix(name="DeepSeek-MoE attention", n=2048, k=2048),
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What parts are measured with. bandwidth: of the copy    tokens: of kernels    config: of the whole model."""

    device: torch.device
    bandwidth: float
    tokens: tuple[int, ...]
    config: Any


def check(setup: Setup) -> Iterable[Case]:
    """Whether the kernels compute what the reference does."""
    return check_cases(setup.device)


def experts(setup: Setup) -> Iterable[Case]:
    """The routed experts of one layer."""
    return int3_cases((Experts(layer, setup.device) for layer in LAYERS), setup.tokens, setup.bandwidth)


def model(setup: Setup) -> Iterable[Case]:
    """Decoding steps of the whole model, at MiLo's batch sizes."""
    return decoding_cases(setup.config, setup.device, setup.bandwidth, tuple(MILO))


def linear(setup: Setup) -> Iterable[Case]:
    """Linear layers."""
    return int3_cases((Linear(shape, setup.device) for shape in SHAPES), setup.tokens, setup.bandwidth)


def lattice(setup: Setup) -> Iterable[Case]:
    """QuIP#'s codewords, in experts and one linear layer."""
    layers = (Experts(layer, setup.device) for layer in LAYERS)
    return lattice_cases(chain(layers, [Linear(ATTENTION, setup.device)]), FEW_TOKENS, setup.bandwidth)


def torch_compile(setup: Setup) -> Iterable[Case]:
    """The whole model's step in one graph of torch.compile."""
    return [compiled_case(setup.config, setup.device, setup.bandwidth)]


PARTS: dict[str, Callable[[Setup], Iterable[Case]]] = {
    "check": check,
    "experts": experts,
    "model": model,
    "linear": linear,
    "lattice": lattice,
    "torch-compile": torch_compile,
}
"""After the check the most valuable first; those whose kernels are the youngest, or that take longest, last."""


def mixtral_config(layers: int) -> Any:
    """Of Mixtral-8x7B's shape."""
    from transformers import MixtralConfig

    return MixtralConfig(
        num_hidden_layers=layers,
        hidden_size=4096,
        intermediate_size=14336,
        num_key_value_heads=8,
        vocab_size=32000,
    )


def parse_arguments() -> argparse.Namespace:
    """Raises SystemExit on names that are no part's, and on a page without their markers."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="1, 16 and 128 tokens")
    options.add_argument("--only", default=",".join(PARTS), help="parts, in the order in which to run them")
    options.add_argument("--minutes", type=float, default=8.0, help="no case begins after so many")
    options.add_argument("--markdown", type=Path, help="a page to put the tables into")
    options.add_argument("--begun", type=Path, help=argparse.SUPPRESS)  # JSON of the process before this one
    arguments = options.parse_args()
    arguments.only = arguments.only.split(",")
    if unknown := [name for name in arguments.only if name not in PARTS]:
        options.error(f"--only {unknown[0]}: no such part; known are {', '.join(PARTS)}")
    if page := arguments.markdown:
        text = page.read_text(encoding="utf-8")
        for name in arguments.only:
            if not all(marker in text for marker in markers(f"gpu-{name}")):
                options.error(f"{page}: no markers gpu-{name}; add them where the figures belong")
    return arguments


def measure(arguments: argparse.Namespace, device: torch.device) -> list[str]:
    """Everything, as asked for, until a fault takes the GPU from this process. returns: what failed."""
    started, run = time.perf_counter(), Run(arguments.minutes)
    gpu, commit = torch.cuda.get_device_name(), _commit()
    bandwidth, peak = copy_bandwidth(device), matmul_peak(device)
    limits = f"{gpu}, commit {commit}: copy {bandwidth / 1e9:.0f} GB/s, bf16 {peak / 1e12:.0f} TFLOP/s"
    print(limits, flush=True)
    tokens = FEW_TOKENS if arguments.quick else TOKENS
    setup = Setup(device=device, bandwidth=bandwidth, tokens=tokens, config=mixtral_config(32))
    found = json.loads(arguments.begun.read_text()) if arguments.begun else {}
    run.failed, run.left_out = found.get("failed", []), found.get("left_out", [])
    found |= {"gpu": gpu, "copy": bandwidth, "peak": peak, "commit": commit}
    found["compile_ahead_s"] = _compile_ahead(arguments.only, setup)
    for name in arguments.only:
        found[name] = rows = run.part(PARTS[name](setup))
        found |= run.report() | {"seconds": time.perf_counter() - started}
        if arguments.markdown and rows:
            text = table(tuple(rows[0]), [cells(row) for row in rows])
            insert(arguments.markdown, f"gpu-{name}", f"{limits}\n\n{text}")
        print(json.dumps(finite(found)), flush=True)
        run.free_memory()
        if run.lost and (rest := arguments.only[arguments.only.index(name) + 1 :]):
            _go_on(arguments, rest, arguments.minutes - (time.perf_counter() - started) / 60, found)
            break
    return run.failed


def _go_on(arguments: argparse.Namespace, rest: list[str], minutes: float, found: dict[str, Any]) -> None:
    """Measure the other parts in a new process, which adds them to what was found."""
    options = ["--only", ",".join(rest), "--minutes", f"{minutes:.2f}"]
    options += ["--quick"] * arguments.quick
    options += ["--markdown", str(arguments.markdown)] if arguments.markdown else []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(finite(found)))
        file.flush()
        subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.measure", *options, "--begun", file.name], check=False
        )


def _compile_ahead(names: list[str], setup: Setup) -> float:
    """Seconds of it. One layer of the model launches the kernels of all."""
    setup = replace(setup, config=mixtral_config(1))
    major, minor = torch.cuda.get_device_capability()
    return compile_ahead((case for name in names for case in PARTS[name](setup)), 10 * major + minor)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit(
            "error: no CUDA device; this script measures one (tests/benchmarks/ runs its parts on the CPU)"
        )
    failed = measure(arguments, torch.device("cuda"))
    if failed:
        sys.exit(f"error: {len(failed)} cases failed; first: {failed[0]}")


if __name__ == "__main__":
    main()
