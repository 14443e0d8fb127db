"""Packed checkpoints in vLLM itself: `make vllm` runs this in an environment of its own, `make vllm-all` all of it.

Greedy tokens are those of `trilobite.load`, in fp32, where no two tokens come as close as rounding.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.vllm_generate import MARK
from support.vllm_models import NEW, PROMPTS, expected_tokens, packed_model

import trilobite

pytest.importorskip(
    "vllm", reason="vLLM needs another transformers than this environment has: run `make vllm`"
)
MIXED = {
    "rules": [
        {"roles": ["head"], "format": "int8-g64"},
        {"names": "*.experts.0.*", "format": "int4-g32-dq"},
        {"names": "*.experts.1.*", "format": "int8-g32", "method": "rtn"},
        {"names": "*q_proj", "format": "int4-g32-sym"},
        {"names": "*o_proj", "format": "int3-g16-super"},
        {"names": "*k_proj", "format": "int4-g16", "method": "rtn"},
        {"names": "*.down_proj", "format": "int2-g32", "rank": "16"},
        {"roles": ["attention", "shared_expert", "dense_mlp", "expert"], "format": "int3-g32", "rank": "8"},
    ],
    "compensator": "int8",
    "cap": False,
}
"""A format for every part, some with compensators of several ranks: what one layer runs differs in all of it."""
# vLLM's kernel for CPUs rotates nothing in MLA's form (0.32); compiled, its own Python does.
ROTATED = {"custom_ops": ["all", "-rotary_embedding"]}
SETTINGS = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "compilation_config": ROTATED}
SECONDS = 900  # also where the machine is shared


def _environment(cores: str) -> dict[str, str]:
    """cores: `0|1`, one for each of two ranks on this machine."""
    return os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }


def _command(packed: Path, extra: dict[str, Any]) -> list[str]:
    settings = {"model": str(packed), "prompts": PROMPTS, "new": NEW, **SETTINGS, **extra}
    return [sys.executable, "-m", "support.vllm_generate", json.dumps(settings)]


def _tokens(packed: Path, cores: str = "0,1", **extra: Any) -> list[list[int]]:
    done = subprocess.run(
        _command(packed, extra), env=_environment(cores), capture_output=True, text=True, timeout=SECONDS
    )
    return _read(done.stdout, done.stderr)


def _read(output: str, errors: str) -> list[list[int]]:
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    assert lines, output[-2000:] + errors[-4000:]
    made: list[list[int]] = json.loads(lines[0].removeprefix(MARK))
    return made


Models = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A packed model by its type, and what it continues the prompts with."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def get(model_type: str) -> tuple[Path, list[list[int]]]:
        if model_type not in made:
            packed = packed_model(model_type, tmp_path_factory.mktemp(model_type), MIXED)
            made[model_type] = packed, expected_tokens(packed)
        return made[model_type]

    return get


long = pytest.mark.long
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
SPREAD: dict[str, Any] = {**TWO, "enable_expert_parallel": True}
TINY = ROOT / "examples" / "tiny-moe"
WAYS = {"one": ({}, "0,1"), "two": (TWO, "0|1"), "spread": (SPREAD, "0|1")}
SHORT = {("mixtral", "one"), ("qwen2_moe", "two")}
TYPES = ("mixtral", "qwen2_moe", "olmoe", "deepseek_v2", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize(
    ("model_type", "way"),
    [pytest.param(t, w, marks=() if (t, w) in SHORT else long) for t in TYPES for w in WAYS],
)
def test_tokens_are_those_of_trilobite(models: Models, model_type: str, way: str) -> None:
    packed, expected = models(model_type)
    extra, cores = WAYS[way]
    assert _tokens(packed, cores, **extra) == expected


@long
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v2"])
def test_compiled_graphs_give_the_same(models: Models, model_type: str) -> None:
    packed, expected = models(model_type)
    assert _tokens(packed, enforce_eager=False, compilation_config={}) == expected


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize("model_type", [TYPES[0], *(pytest.param(t, marks=long) for t in TYPES[1:4])])
def test_two_nodes(models: Models, model_type: str) -> None:
    """Without Ray: the second one has no API, only its rank."""
    packed, expected = models(model_type)
    port = _free_port()
    nodes = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    flags = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    flags += ["--headless", "-tp", "2", "--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
    flags += ["--skip-tokenizer-init", "--compilation-config", json.dumps(ROTATED)]
    with _serving(packed, flags, "1"):
        assert _tokens(packed, "0", node_rank=0, **nodes, **TWO) == expected


@contextmanager
def _serving(packed: Path, flags: list[str], cores: str) -> Iterator[subprocess.Popen[bytes]]:
    """`vllm serve PACKED`, until the block ends."""
    command = [sys.executable, "-m", "support.vllm_command", "serve", str(packed), *flags]
    with subprocess.Popen(command, env=_environment(cores), start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    pytest.fail("the server did not come up")


def _running(address: str) -> float:
    """Requests that the server works on, by its own count."""
    text = urllib.request.urlopen(f"{address}/metrics", timeout=5).read().decode()
    rows = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(row.split()[-1]) for row in rows)


def test_openai_server_and_a_client_that_hangs_up(tmp_path: Path) -> None:
    """The bundled model through `vllm serve` and OpenAI's client gives the text that `trilobite.load` gives."""
    import openai

    trilobite.compress(TINY, tmp_path / "packed", "milo-s1")
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    flags = ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    with _serving(tmp_path / "packed", flags, "0,1") as process:
        _until_ready(process, address)
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        ask = {"model": str(tmp_path / "packed"), "prompt": "The history of", "temperature": 0}
        with client.completions.create(**ask, max_tokens=400, stream=True) as stream:
            next(iter(stream))  # then hang up
        text = client.completions.create(**ask, max_tokens=24).choices[0].text
        end = time.monotonic() + 20
        while _running(address) > 0:
            assert time.monotonic() < end, "the server still works for the client that hung up"
            time.sleep(0.2)
    assert text == _text(tmp_path / "packed", "The history of", 24)


def _text(packed: Path, prompt: str, new: int) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packed)
    model = trilobite.load(packed, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=new, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_what_vllm_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    trilobite.compress(TINY, tmp_path / "packed", "quip3-free")
    done = subprocess.run(
        _command(tmp_path / "packed", {}),
        env=_environment("0,1"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    said = [line for line in done.stderr.splitlines() if "lattice format" in line]
    assert done.returncode
    assert "--recipe super3" in said[-1], done.stderr[-3000:]
