"""What of benchmarks/gpu.py, `trilobite bench` and doctor runs without a GPU; and compilations ahead of time."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packing import relative_error

pytest.importorskip("triton", reason="Triton is not installed")
import triton_interpreter
from transformers import MixtralConfig
from typer.testing import CliRunner

from trilobite.cli import app
from trilobite.doctor import examine
from trilobite.errors import DeviceError
from trilobite.formats.weight import dequantize
from trilobite.kernels import cpu, ops, triton_bench
from trilobite.kernels.triton_bench import Layer, expert_calls, hit_bytes, random_layer, random_weight, tune
from trilobite.recipe import Format

pytestmark = pytest.mark.skipif(
    not triton_interpreter.available(), reason="Triton was imported without TRITON_INTERPRET"
)
triton_interpreter.install()
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TINY = Layer(name="tiny", experts=4, active=2, hidden=128, intermediate=64)
CPU = torch.device("cpu")


@pytest.fixture
def gpu_script(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def test_random_weights_look_like_weights() -> None:
    w = dequantize(random_weight(64, 128, Format(bits=3, group=64), rank=2, device=CPU))
    assert 0.01 < w.std() < 0.05
    assert w.mean().abs() < 0.002


def test_copies_of_an_expert_lie_in_places_of_their_own() -> None:
    pack = random_layer(TINY, Format(bits=3, group=64), CPU, rank=2)
    x, share = torch.randn(1, 128), torch.ones(1, 1)
    run = [
        ops.experts_gpu(x, torch.tensor([[e]]), share, pack, intermediate=64, activation="silu")
        for e in (0, 3)
    ]
    assert torch.equal(*run)
    pack.slab[-pack.slab.numel() // 4 :] = 0
    lost = ops.experts_gpu(x, torch.tensor([[3]]), share, pack, intermediate=64, activation="silu")
    assert not torch.equal(lost, run[1])
    assert hit_bytes(TINY, pack, 1) == 4 * pack.slab.numel() / 2
    assert len(expert_calls(TINY, pack, 2)) == triton_bench.ROUTINGS


def test_the_bf16_layer_is_the_same_layer(gpu_script) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(5, 64).bfloat16()
    gate_up, down = torch.randn(4, 64, 64).bfloat16() * 0.1, torch.randn(4, 64, 32).bfloat16() * 0.1
    index, weights = triton_bench.routing(TINY, 5, CPU)
    expected = torch.zeros(5, 64)
    for t in range(5):
        for a in range(2):
            e = index[t, a]
            gate, up = (gate_up[e].float() @ x[t].float()).chunk(2)
            expected[t] += weights[t, a].float() * (down[e].float() @ (torch.nn.functional.silu(gate) * up))
    assert relative_error(gpu_script.bf16_experts(x, index, weights, gate_up, down), expected) < 2e-2


def test_a_small_mixtral_decodes(gpu_script, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(gpu_script, "PROMPT", 2)
    monkeypatch.setattr(gpu_script, "STEPS", 2)
    config = MixtralConfig(
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        vocab_size=64,
    )
    (case,) = gpu_script.whole_model(CPU, 1e9, config, (2,))
    found = case.run(gpu_script.Clock())
    assert found["run as"] == "eager"
    assert found["tokens/s"] > 0
    assert len(gpu_script.cells(found)) == len(found)


def test_without_a_gpu_the_script_and_tuning_say_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
    with pytest.raises(DeviceError, match="there is none"):
        tune(CPU, print)


@pytest.mark.skipif(not cpu.available(), reason="the native library is not installed")
def test_bench_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "--json"])
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)["bench"]
    assert 0 < row["share"] < 3


def test_doctor_names_the_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trilobite.doctor._bandwidth", lambda: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = examine()
    assert found["gpu_kernels"] == {"backend": "none", "reason": "torch sees no CUDA device"}
    assert found["extras"]["gpu"] is True


@pytest.mark.parametrize("arch", ["80", "90"])
def test_kernels_compile_ahead_of_time(arch: str, tmp_path: Path) -> None:
    """Some of the variants that benchmarks/gpu_compile.py compiles, for a GPU that is not here; none may spill."""
    code = (
        "import gpu_compile as g, torch\n"
        "first = {}\n"
        "for fmt, rank in (('int3-g64', 0), ('e8p-2', 2)):\n"
        f"    for v in g.record({arch!r}, g.parse_format(fmt), rank, 'int3', torch.bfloat16):\n"
        "        first.setdefault(v.kernel, v)\n"
        "assert set(first) == set(g.KERNELS), sorted(first)\n"
        "for name in ('product', 'gate_up', 'combine', 'spin', 'lattice_product'):\n"
        f"    r = g.compile_one(first[name], {arch!r}); print(name, r)\n"
        "    assert r.spilled == 0 and r.shared < 99 * 1024, r\n"
        "    assert name in ('combine', 'spin') or 1 < r.per_weight < 5, r\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(BENCHMARKS), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
