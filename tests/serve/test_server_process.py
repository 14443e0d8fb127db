"""The process of a server: how it begins, and how it ends."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from support.commands import in_this_process

import trilobite
from tools.serving import TINY, serving
from trilobite.cli import serve
from trilobite.errors import MissingExtraError, ResourceError
from trilobite.runtime.offload.plan import Offload
from trilobite.serve import pages
from trilobite.serve.metrics import ExpertCache

LONG = {"prompt": "The sea is", "max_tokens": 200, "ignore_eos": True}


def refused(*options: object) -> str:
    """The one line with which a server does not begin."""
    command = [sys.executable, "-m", "trilobite", "serve", "--port", "0", *map(str, options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    return line


@pytest.fixture
def refused_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The same without a process of its own."""
    run = in_this_process(monkeypatch, capsys)

    def call(*options: object) -> str:
        ended = run("serve", "--port", "0", *options)
        assert ended.status == 1
        (line,) = ended.err.splitlines()
        return line

    return call


def test_sigterm_finishes_what_runs() -> None:
    with serving(TINY) as server:
        answers = []
        asked = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60))
        )
        asked.start()
        while "trilobite_texts 1.0" not in httpx.get(f"{server.url}/metrics").text:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        asked.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 200
        assert server.process.stderr is not None
        assert server.process.stderr.read() == "ended\n"


def test_a_port_in_use(refused_here: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        line = refused_here(TINY, "--port", other.getsockname()[1])
    assert "in use" in line
    assert "--port" in line


def test_too_much_context(refused_here: Callable[..., str]) -> None:
    assert "made for 512" in refused_here(TINY, "--context", 1024)


@pytest.mark.long
def test_memory_holds_the_pages_of_all_texts(packed: Path) -> None:
    """One bound, twice; the least that works differs by the pages of 63 texts."""
    least = [
        int(re.findall(r"smallest that works is (\d+)MiB", line)[0])
        for line in (
            refused(packed, "--memory", "40MiB", "--slots", slots, "--context", 512) for slots in (1, 64)
        )
    ]
    pages = 63 * 512 * 4 * 2 * 3 * 32 * 2 / 2**20
    assert least[1] - least[0] == pytest.approx(pages, abs=16)  # MiB; the program's own memory varies


def test_bits_per_weight(packed: Path) -> None:
    assert 3 < serve._about(packed)["bits_per_weight"] < 16
    assert serve._about(TINY) == {}


def test_metrics_tell_of_experts_that_stream(packed: Path) -> None:
    model = trilobite.load(str(packed), memory=Offload(memory=2**33, slots=8))
    found = ExpertCache(model)
    assert [f.samples[0].value for f in found.collect()] == [0, 0, 0]
    model(torch.arange(20)[None])
    samples = {f.name: f.samples[0].value for f in found.collect()}
    assert samples["trilobite_expert_cache_misses"] > 0
    assert samples["trilobite_expert_bytes_read"] > 0
    assert list(ExpertCache(trilobite.load(str(packed))).collect()) == []


def test_pages_beyond_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trilobite.load(str(TINY))
    found = pages.make_pages(model, 8, 100)
    assert (found.count, found.context) == (16, 100)
    assert found.bytes == (16 + 2) * 64 * 4 * 2 * 3 * 32 * 2  # layers, keys and values, heads, width, bf16
    monkeypatch.setattr(pages, "available_bytes", lambda: found.bytes - 1)
    with pytest.raises(ResourceError, match="--slots"):
        pages.make_pages(model, 8, 100)


def test_other_machines(refused_here: Callable[..., str]) -> None:
    assert "--api-key" in refused_here(TINY, "--host", "0.0.0.0")


def test_a_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(MissingExtraError, match=r"serve needs uvicorn: pip install 'trilobite\[serve\]'"):
        serve._check_extra()


def test_other_commands_import_no_server() -> None:
    code = "import sys, trilobite, trilobite.cli; sys.exit(any(m in sys.modules for m in ('fastapi', 'uvicorn')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
