"""What of benchmarks/gpu/measure.py, `trilobite bench` and doctor runs without a GPU; and compilations ahead of time."""

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from support.packing import relative_error
from support.paths import ROOT

from tools.ptx.memory import EmulationError, GlobalMemory

pytest.importorskip("triton", reason="Triton is not installed")
from support import triton_interpreter
from transformers import MixtralConfig
from typer.testing import CliRunner

from trilobite import doctor
from trilobite.cli import app
from trilobite.doctor import examine
from trilobite.errors import DeviceError
from trilobite.formats.weight import dequantize
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.gpu import tuning
from trilobite.kernels.gpu.tuning import Tile
from trilobite.measure import gpu as triton_bench
from trilobite.measure import tiles as triton_search
from trilobite.measure.gpu import (
    copies,
    expert_calls,
    experts_layer,
    hit_bytes,
    hit_experts,
    random_layer,
    random_weight,
    routings,
)
from trilobite.measure.shapes import ExpertsShape
from trilobite.recipe import Format, parse_format
from trilobite.runtime.modules.residence import OnGpu

pytestmark = pytest.mark.skipif(
    not triton_interpreter.available(), reason="Triton was imported without TRITON_INTERPRET"
)
triton_interpreter.install()
TINY = ExpertsShape(name="tiny", experts=4, active=2, hidden=128, intermediate=64)
CPU = torch.device("cpu")


TINY_MIXTRAL = MixtralConfig(
    num_hidden_layers=1,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
    vocab_size=64,
)


@pytest.fixture
def gpu_script() -> ModuleType:
    return importlib.import_module("benchmarks.gpu.measure")


@pytest.fixture
def gpu_cases(gpu_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("benchmarks.gpu.cases")
    monkeypatch.setattr(module, "STEPS", 2)
    return module


@pytest.fixture
def gpu_run(gpu_script: ModuleType) -> ModuleType:
    return importlib.import_module("benchmarks.gpu.run")


@pytest.fixture
def decoding(gpu_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("benchmarks.gpu.decoding")
    monkeypatch.setattr(module, "PROMPT", 2)
    return module


@pytest.mark.parametrize("fmt", ["int3-g64", "e8p-2", "e8p-3", "e8p-4"])
def test_random_weights_look_like_weights(fmt: str) -> None:
    w = dequantize(random_weight(64, 128, parse_format(fmt), rank=2, device=CPU))
    assert 0.01 < w.std() < 0.05
    assert w.mean().abs() < 0.002


def test_copies_of_an_expert_lie_in_places_of_their_own() -> None:
    pack = random_layer(TINY, Format(bits=3, group=64), CPU, rank=2)
    x, share = torch.randn(1, 128), torch.ones(1, 1)
    layer = experts_layer(pack)
    run = [ops.experts(x, torch.tensor([[e]]), share, layer) for e in (0, 3)]
    assert torch.equal(*run)
    pack.slab[-pack.slab.numel() // 4 :] = 0
    lost = ops.experts(x, torch.tensor([[3]]), share, layer)
    assert not torch.equal(lost, run[1])
    assert hit_bytes(TINY, pack, 1) == 4 * pack.slab.numel() / 2
    assert len(expert_calls(TINY, pack, 2)) == triton_bench.ROUTINGS


def test_dealt_experts_come_again_as_late_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ExpertsShape(name="fine", experts=16, active=3, hidden=64, intermediate=64)
    a_token = 3 * 3 * 64 * 64 // 4
    monkeypatch.setattr(triton_bench, "spread_bytes", lambda device: 20 * a_token)
    met = torch.cat([index.flatten() for index, _ in routings(layer, 1, CPU)])
    assert len(met) == 3 * 20  # enough calls even where two bits a weight are read
    for at in range(len(met) - 16):
        assert met[at : at + 16].unique().numel() == 16
    assert len(routings(layer, 4, CPU)) == triton_bench.ROUTINGS
    for index, weights in routings(layer, 5, CPU):  # 15 of 16 experts
        assert index.shape == weights.shape == (5, 3)
        assert index.unique().numel() == 15 == hit_experts(layer, 5)
    many = [index.unique().numel() for index, _ in routings(layer, 6, CPU) for _ in range(50)]
    assert abs(sum(many) / len(many) - hit_experts(layer, 6)) < 2
    assert all(row.unique().numel() == 3 for index, _ in routings(layer, 6, CPU) for row in index)


def test_copies_take_more_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = random_layer(TINY, Format(bits=3, group=64), CPU)
    assert [p.slab.data_ptr() for p in copies(pack)] == [pack.slab.data_ptr()]
    monkeypatch.setattr(triton_bench, "spread_bytes", lambda device: 8 * pack.slab.numel() + 1)
    found = copies(pack)
    assert len({p.slab.data_ptr() for p in found}) == 3
    assert all(torch.equal(p.slab, pack.slab) and p.codings == pack.codings for p in found)
    calls = expert_calls(TINY, pack, 2)
    slabs = [call.args[3].slab.data_ptr() for call in calls]  # type: ignore[attr-defined]
    assert all(len(set(slabs[i : i + 3])) == 3 for i in range(len(slabs) - 2))
    assert len(copies(pack, 5)) == 5


class FakeGraph:
    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


class FakeEvent:
    """A clock that only replays move: a millisecond each, and a host's gap of ten behind the event."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = FakeGraph.replays

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 10 + (end.at - self.at)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: FakeGraph):  # type: ignore[no-untyped-def]
        yield

    for name, fake in (
        ("is_available", lambda: True),
        ("synchronize", lambda: None),
        ("CUDAGraph", FakeGraph),
        ("current_stream", lambda: None),
        ("graph", capture),
        ("Event", FakeEvent),
        ("get_device_name", lambda: "Fake"),
        ("get_device_capability", lambda: (9, 0)),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(FakeGraph, "replays", 0)


def test_a_graph_is_warm_and_replayed_in_a_row(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    calls = [partial(made.append, i) for i in range(4)]
    took = triton_bench.seconds(calls, 5)
    assert took == pytest.approx((8 + 10) / 8 / 1e3 / 4)  # eight replays share the gap
    assert made == 2 * [0, 1, 2, 3]  # once to compile, once in the graph
    assert FakeGraph.replays > 5 * 8


def test_the_cache_has_room_for_every_replay(fake_cuda: None, decoding: ModuleType) -> None:
    decoding._graph_seconds(lambda: None, 20)
    assert FakeGraph.replays == decoding.WARM + 20
    made = decoding.Stepper(decoding.random_mixtral(TINY_MIXTRAL, CPU), TINY_MIXTRAL, 1, CPU, 5)
    with torch.inference_mode():
        for _ in range(5):
            made.step()
        assert int(made.cache.get_seq_length()) == decoding.PROMPT + 5
        with pytest.raises((IndexError, RuntimeError)):
            made.step()


@pytest.mark.long
def test_a_decoding_step_compiles_without_graph_breaks(
    decoding: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed modules in the GPU layout, attention and a static cache: one graph, and the same tokens to the bit."""
    monkeypatch.setattr(ops, "gpu_layout", lambda weights: True)
    model = decoding.random_mixtral(TINY_MIXTRAL, CPU)
    packs = [m for m in model.modules() if isinstance(getattr(m, "residence", None), OnGpu)]
    assert len(packs) == 6  # q, k, v, o, experts, head
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of graphs that other tests made
    found = []
    for compiled in (False, True):
        torch.manual_seed(3)
        made = decoding.Stepper(model, TINY_MIXTRAL, 2, CPU, 3)
        step = torch.compile(made.step, fullgraph=True, backend="aot_eager") if compiled else made.step
        with torch.inference_mode():
            found.append(torch.stack([step() for _ in range(3)]))
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], found[0][1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_compiled_step_stays_within_the_cache(
    gpu_cases: ModuleType, gpu_run: ModuleType, decoding: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def compile_nothing(step, **options):  # type: ignore[no-untyped-def]
        asked.append(options)
        return step

    monkeypatch.setattr(torch, "compile", compile_nothing)
    case = gpu_cases.compiled_case(TINY_MIXTRAL, CPU, 1e9)
    assert case.run(gpu_run.Clock(dry=True))["run as"] == "not measured"
    found = case.run(gpu_run.Clock())
    assert (found["batch"], found["run as"]) == (1, "torch.compile")
    assert [options["fullgraph"] for options in asked] == [True]


@pytest.mark.long
def test_parts_run_and_faults_cost_one_case(
    gpu_script: ModuleType,
    gpu_run: ModuleType,
    fake_cuda: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:  # type: ignore[type-arg]
    """The whole script on a tiny layer: every part, a baseline that torch lacks, a case that fails, one JSON a part."""
    matrix = gpu_script.Matrix(name="tiny", n=64, k=128)

    def broken(clock: object) -> None:
        raise triton_bench.TritonError("out of resource: shared memory")

    late = gpu_run.Case(name="late", run=broken, least=1e6)
    check = sys.modules["benchmarks.gpu.check"]
    monkeypatch.setattr(check, "FORMATS", (("int3-g64", 3),))
    monkeypatch.setattr(check, "TOKENS", (2,))
    monkeypatch.setattr(check, "COLUMNS", (128,))
    monkeypatch.setattr(check, "Check", partial(check.Check, rows=48, intermediate=128))
    monkeypatch.setattr(gpu_script, "LAYERS", (TINY,))
    monkeypatch.setattr(gpu_script, "SHAPES", (matrix,))
    monkeypatch.setattr(gpu_script, "ATTENTION", matrix)
    monkeypatch.setitem(
        gpu_script.PARTS, "model", lambda setup: [gpu_run.Case(name="whole model", run=broken)]
    )
    monkeypatch.setitem(gpu_script.PARTS, "torch-compile", lambda setup: [late])
    monkeypatch.setattr(gpu_script, "FEW_TOKENS", (3,))
    monkeypatch.setattr(gpu_run, "seconds", lambda calls: 1e-3)
    monkeypatch.setattr(gpu_script, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(gpu_script, "matmul_peak", lambda device: 1e12)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None, raising=False)
    monkeypatch.delattr(torch, "_grouped_mm")
    page, names = tmp_path / "page.md", list(gpu_script.PARTS)
    page.write_text("".join(f"<!-- begin gpu-{n} -->\n<!-- end gpu-{n} -->\n" for n in names))
    asked = Namespace(quick=True, only=names, minutes=8, markdown=page, begun=None)
    (failed,) = gpu_script.measure(asked, CPU)
    assert failed == "whole model: TritonError: out of resource: shared memory"
    lines = capsys.readouterr().out.splitlines()
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(reports) == len(names)
    last = json.loads(lines[-1])
    assert last == reports[-1]
    assert [len(last[n]) for n in names] == [1, 1, 0, 1, 2, 0]
    assert last["left_out"] == ["late"]
    assert last["failed"] == [failed]
    # With routing and without.
    assert sum("has no attribute '_grouped_mm'" in line for line in lines) == 2
    first = last["experts"][0]
    assert (first["bf16 / 3-bit"], first["grouped_mm / 3-bit"], first["4-bit / 3-bit"]) == (None, None, 1)
    assert last["linear"][0]["bf16 / 3-bit"] == last["lattice"][0]["e8p-2 / 3-bit"] == 1
    text = page.read_text()
    assert text.count("Fake, commit") == 4
    assert "–" in text


def test_a_wrong_kernel_is_found(gpu_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    check, run = sys.modules["benchmarks.gpu.check"], sys.modules["benchmarks.gpu.run"]
    monkeypatch.setattr(check, "TOKENS", (2,))
    case = check.Check(format="int3-g64", rank=0, k=192, device=CPU)
    right = check.ops.experts
    monkeypatch.setattr(check.ops, "experts", lambda *args: right(*args) * 1.1)
    with pytest.raises(check.WrongResultError, match=r"experts is off by 0\.(09|1)"):
        case.row(run.Clock())


def test_the_page_has_a_place_for_every_part(
    gpu_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--markdown", str(page)])
    assert gpu_script.parse_arguments().only[:2] == ["check", "experts"]
    for wrong, words in (
        (["--markdown", str(ROOT / "benchmarks/gpu/measure.py")], "no markers gpu-check"),
        (["--only", "model,modle"], "modle: no such part; known are check, experts, model"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *wrong])
        with pytest.raises(SystemExit):
            gpu_script.parse_arguments()
        assert words in capsys.readouterr().err


def test_nothing_begins_when_the_minutes_are_over(gpu_run: ModuleType) -> None:
    run = gpu_run.Run(0)
    case = gpu_run.Case(name="a case", run=lambda clock: pytest.fail("it ran"))
    assert run.part([case]) == []
    assert run.report()["left_out"] == ["a case"]


def test_a_model_that_does_not_fit_is_left_out(
    gpu_cases: ModuleType,
    gpu_run: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8e9, 16e9))
    run = gpu_run.Run(8)
    cases = gpu_cases.decoding_cases(TINY_MIXTRAL, torch.device("cuda"), 1e12, (1, 16))
    assert run.part(cases) == []
    assert run.report()["left_out"] == ["whole model, batch 1", "whole model, batch 16"]
    assert run.report()["failed"] == []
    assert "32 GB of memory are needed, 8 GB are free" in capsys.readouterr().out


def test_a_lost_gpu_ends_the_run(gpu_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_run, "release", lost)
    run = gpu_run.Run(8)
    cases = [gpu_run.Case(name=name, run=lambda clock: lost()) for name in "ab"]
    assert run.part(cases) == []
    assert [len(run.failed), run.left_out] == [1, ["b"]]
    assert run.lost


def test_a_new_process_goes_on_after_a_lost_gpu(
    gpu_script: ModuleType, gpu_run: ModuleType, fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    started: list[list[str]] = []
    begun: list[dict[str, list[str]]] = []
    monkeypatch.setattr(gpu_script, "_compile_ahead", lambda names, setup: 0.0)
    monkeypatch.setattr(gpu_script, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(gpu_script, "matmul_peak", lambda device: 1e12)
    monkeypatch.setattr(gpu_run, "release", lost)
    monkeypatch.setitem(
        gpu_script.PARTS, "experts", lambda setup: [gpu_run.Case(name="a", run=lambda clock: lost())]
    )
    monkeypatch.setattr(gpu_script, "_commit", lambda: "1")

    def start(command: list[str], check: bool) -> None:
        started.append(command)
        text = json.loads(Path(command[-1]).read_text())
        begun.append({key: text[key] for key in ("failed", "left_out")})

    monkeypatch.setattr(gpu_script.subprocess, "run", start)
    asked = Namespace(quick=True, only=["experts", "model", "linear"], minutes=8, markdown=None, begun=None)
    (failed,) = gpu_script.measure(asked, CPU)
    assert failed.startswith("a: RuntimeError: CUDA error")
    ((_, _, _, *options),) = started
    assert options[:3] == ["--only", "model,linear", "--minutes"]
    assert 7.9 < float(options[3]) <= 8
    assert options[4:6] == ["--quick", "--begun"]
    assert begun == [{"failed": [failed], "left_out": []}]


def test_tuning_passes_over_tiles_that_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = triton_search.candidates("linear", 8)
    tried = [{"linear": tile} for tile in tiles]
    counted = iter(range(len(tiles)))

    def last_only(calls: object, repeats: int) -> float:
        if next(counted) < len(tiles) - 1:
            raise triton_bench.TritonError("out of resource: shared memory")
        return 0.5

    monkeypatch.setattr(triton_search, "seconds", last_only)
    assert triton_search._fastest("linear", [[]], tried) == (tiles[-1], [0.5])

    def never(calls: object, repeats: int) -> float:
        raise triton_bench.TritonError("PTXAS error")

    monkeypatch.setattr(triton_search, "seconds", never)
    with pytest.raises(DeviceError, match=r"linear: none of \d+ tiles runs"):
        triton_search._fastest("linear", [[]], tried)


def test_tuning_takes_what_no_layer_loses_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large layer's gain of a tenth does not outweigh that the small one takes twice as long."""
    first, second = triton_search.candidates("gate_up", 1)[:2]
    times = iter((10.0, 2.0, 11.0, 1.0))
    monkeypatch.setattr(triton_search, "seconds", lambda calls, repeats: next(times))
    tried = [{"gate_up": first}, {"gate_up": second}]
    assert triton_search._fastest("gate_up", [[], []], tried) == (second, [11.0, 1.0])


def test_tuning_writes_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and clock are not there: which tiles are tried, in which order, and what is remembered."""
    found, tables = list[dict[str, Tile]](), list[dict[str, tuple[Tile, ...]]]()

    def clock(calls: object, repeats: int) -> float:
        found.append(dict(tuning._forced))
        return float(len(found) % 7 + 1)

    monkeypatch.setattr(triton_search, "seconds", clock)
    for name in ("random_layer", "random_weight", "repack", "copies"):
        monkeypatch.setattr(triton_search, name, lambda *args, **kwargs: [])
    for name in ("expert_calls", "linear_calls"):
        monkeypatch.setattr(triton_search, name, lambda *args: [lambda: None])
    monkeypatch.setattr(triton_search, "compile_all", lambda wanted, *rest: len(wanted))
    monkeypatch.setattr(tuning, "remember", lambda gpu, table: tables.append(dict(table)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    said = list[str]()
    triton_search.tune(torch.device("cuda"), said.append)
    operations = ["linear", "gate_up", "down", "lattice"]
    assert [list(t) for t in tables] == [operations[: n + 1] for n in range(4)]
    (table,) = tuning.parse(tuning.render({"a GPU": tables[-1]}), "here").values()
    for gate_up, down in zip(table["gate_up"], table["down"], strict=True):
        assert (gate_up.tokens, gate_up.block_m) == (down.tokens, down.block_m)
    assert all(f["down"].block_m == f["gate_up"].block_m for f in found if "down" in f)
    assert any("kernels compiled" in line for line in said)


def test_the_search_tries_what_was_found_by_searching() -> None:
    for operation, tiles in tuning.shipped()["sm_90"].items():
        for tile, each in zip(tiles, (*(t.tokens for t in tiles[:-1]), 256), strict=True):
            tried = triton_search.candidates(operation, each)
            plain = replace(tile, tokens=tried[0].tokens, splits=0, registers=0)
            assert plain in [tuning.fitted(t, tile.block_m) for t in tried], (operation, each)


def test_the_bf16_layer_is_the_same_layer(gpu_cases: ModuleType) -> None:
    x = torch.randn(5, 64).bfloat16()
    gate_up, down = torch.randn(4, 64, 64).bfloat16() * 0.1, torch.randn(4, 64, 32).bfloat16() * 0.1
    index, weights = triton_bench.routing(TINY, 5, CPU)
    expected = torch.zeros(5, 64)
    for t in range(5):
        for a in range(2):
            e = index[t, a]
            gate, up = (gate_up[e].float() @ x[t].float()).chunk(2)
            expected[t] += weights[t, a].float() * (down[e].float() @ (torch.nn.functional.silu(gate) * up))
    assert relative_error(gpu_cases.bf16_experts(x, index, weights, gate_up, down), expected) < 2e-2


def test_a_small_mixtral_decodes(
    gpu_script: ModuleType, gpu_cases: ModuleType, gpu_run: ModuleType, decoding: ModuleType
) -> None:
    (case,) = gpu_cases.decoding_cases(TINY_MIXTRAL, CPU, 1e9, (2,))
    found = case.run(gpu_run.Clock())
    assert found["run as"] == "eager"
    assert found["tokens/s"] > 0
    assert len(gpu_script.cells(found)) == len(found)


def test_without_a_gpu_the_script_and_tuning_say_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.measure"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
    with pytest.raises(DeviceError, match="there is none"):
        triton_search.tune(CPU, print)


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


def test_an_old_triton_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that torch 2.6 to 2.8 bring compile none of the kernels: the reference computes, and doctor says why."""
    weight = SimpleNamespace(packed=SimpleNamespace(device=torch.device("cuda")), lattice=None)
    monkeypatch.setattr("trilobite.kernels.gpu.launch.check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ops.gpu_layout([weight])  # type: ignore[list-item]
    monkeypatch.setattr("triton.__version__", "3.4.0")
    assert not ops.gpu_layout([weight])  # type: ignore[list-item]
    found = doctor._gpu_kernels()
    assert found["backend"].startswith("reference")
    assert found["reason"].startswith("Triton 3.4.0 is too old, the kernels need 3.6")


def test_a_capture_that_fails_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ["ours"]

    @contextmanager
    def graph(made: object) -> Iterator[None]:
        streams.append("of the capture")
        yield

    def broken() -> None:
        raise RuntimeError("not permitted while capturing")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(RuntimeError, match="while capturing"):
        triton_bench.captured(broken)
    assert streams[-1] == "ours"


@pytest.mark.long
def test_kernels_compile_ahead_of_time(tmp_path: Path) -> None:
    """Some of the variants that benchmarks/gpu/compile.py compiles, for GPUs that are not here; none may spill."""
    code = (
        "import torch\nfrom benchmarks.gpu import compile as g\n"
        "for arch in ('80', '90'):\n"
        "    first = {}\n"
        "    for fmt, rank in (('int3-g64', 0), ('e8p-2', 2)):\n"
        "        for v in g.record(arch, g.parse_format(fmt), rank, 'int3', torch.bfloat16):\n"
        "            first.setdefault(v.kernel, v)\n"
        "    assert set(first) == set(g.KERNELS), sorted(first)\n"
        "    for name in ('product', 'gate_up', 'combine', 'spin', 'lattice_product'):\n"
        "        r = g.compile_one(first[name], arch); print(name, r)\n"
        "        assert r.spilled == 0 and r.shared < 99 * 1024, r\n"
        "        assert name in ('combine', 'spin') or 1 < r.per_weight < 5, r\n"
    )
    run_compiler(code, tmp_path)


def run_compiler(code: str, cache: Path) -> str:
    """Run code in a process in which Triton compiles. returns: what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    script = cache / "script.py"  # a file, which workers can import
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_launches_find_what_was_compiled_ahead(tmp_path: Path) -> None:
    """The cache's key of an ahead-of-time compilation is that of the launch, or all that work would be done twice."""
    code = """
import torch, triton
from benchmarks.gpu import compile as g
from trilobite.measure import ahead
from trilobite.kernels.gpu.launch import recording

def run(call, warps, warmup=False):
    options = dict(num_warps=warps, num_stages=call.stages, enable_fp_fusion=True, maxnreg=call.registers or None)
    return call.kernel.run(grid=(1,), warmup=warmup, **call.arguments, **call.constants, **options)

if __name__ == "__main__":
    ahead.pretend(90)
    calls = {}
    with recording(lambda call: calls.setdefault(call.kernel.fn.__name__, call)):
        for fmt in ("int3-g64", "e8p-2"):
            shape = g.Shape(layer=g.DEEPSEEK, format=g.parse_format(fmt), rank=0, kind="int3", dtype=torch.bfloat16)
            shape.experts(8)
    calls = [calls[name] for name in ("route", "combine", "spin", "spin_back")]
    with ahead.noting() as wanted:
        for call in (*calls, *calls):
            assert run(call, call.warps) is None
    assert len(wanted) == 4, wanted
    assert ahead.compile_all(list(wanted), 90, 1, print) == 4
    hits = []
    triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
    for call in calls:
        run(call, call.warps, warmup=True)
    run(calls[0], 2 * calls[0].warps, warmup=True)
    print(hits)
"""
    assert run_compiler(code, tmp_path).splitlines()[-1] == "[True, True, True, True, False]"


@pytest.mark.long
@pytest.mark.parametrize(("arch", "tokens"), [("80", "3"), ("90", "40")])
def test_compiled_kernels_agree_with_the_reference(arch: str, tokens: str, tmp_path: Path) -> None:
    """What Triton makes of them runs in an emulator: few rows, and as many as tensor cores of a newer kind take."""
    code = f"""
import sys
from benchmarks.gpu import emulate as gpu_emulate
if __name__ == "__main__":
    sys.argv[1:] = ["--quick", "--arch", "{arch}", "--tokens", "{tokens}", "--jobs", "1"]
    gpu_emulate.main()
"""
    found = json.loads(run_compiler(code, tmp_path).splitlines()[-1])
    assert (found["cases"], found["failed"]) == (4, 0)
    every = {"product", "gate_up", "activate", "combine", "route", "spin", "lattice_product", "spin_back"}
    assert every <= set(found["launches"])


def test_emulated_kernels_need_their_barriers_and_waits(tmp_path: Path) -> None:
    """Without them the emulator sees a race: so it would see one in a kernel that lacks them."""
    code = """
from dataclasses import replace
from benchmarks.gpu import emulate as gpu_emulate
from trilobite.measure import ahead
from tools.ptx import emulator

ahead.pretend(90)
case = next(c for c in gpu_emulate.cases(True, (40,)) if c.operator == "linear")
parse = emulator.parse

def without(name, kind):
    def changed(text):
        program = parse(text)
        nothing = replace(program.instructions[0], name="fence", types=(), operands=(), predicate=None)
        program.instructions = [
            nothing if i.name == name and kind in i.types else i for i in program.instructions
        ]
        return program
    return changed

faults = (
    ("-", "-"), ("bar", "sync"), ("cp", "wait_group"), ("wgmma", "wait_group"), ("griddepcontrol", "wait")
)
for name, kind in faults:
    emulator.parse = without(name, kind)
    print(gpu_emulate.emulate(case).failure)
"""
    none, *failures = run_compiler(code, tmp_path).splitlines()
    assert none == ""
    expected = (
        "race: a read of what another warp wrote",
        "still to write",
        "a write to what a tensor core may still read",
        "a read of what a launch before writes, which nothing waited for",
    )
    for failure, message in zip(failures, expected, strict=True):
        assert message in failure


def test_programs_of_an_early_launch_wait_before_they_write_or_end() -> None:
    """What they read too soon the emulated kernels above show."""
    buffer = np.zeros(8, np.uint8)
    memory = GlobalMemory(early=True)
    memory.add("y", buffer.ctypes.data, buffer.nbytes)
    at, ones = np.array([buffer.ctypes.data]), np.ones((1, 4), np.uint8)
    with pytest.raises(EmulationError, match="a write while launches before are at work"):
        memory.store(at, ones)
    memory.wait()
    memory.store(at, ones)
    memory.end_program()
    with pytest.raises(EmulationError, match="has not waited"):
        memory.end_program()  # the next program has to wait for itself
    assert buffer.sum() == 4


def test_compilations_cover_the_forms_that_layers_take() -> None:
    script = importlib.import_module("benchmarks.gpu.compile")
    found = set()
    for fmt, *rest in script.cases(False, False):
        if (fmt, rest[0]) == ("int3-g64", 0):
            for v in script.record("90", parse_format(fmt), *rest):
                c = dict(v.constants)
                if v.kernel == "gate_up":
                    found.add((c["MODE"], c["EP"], c["EVEN_K"]))
    slots, sorted_ = 1, 2
    for mode in (slots, sorted_):
        for shape in ((8, True), (64, True), (128, False)):
            assert (mode, *shape) in found
    assert 1 in script.tokens_of("90")
