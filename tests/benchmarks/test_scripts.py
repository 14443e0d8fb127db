"""Every script of benchmarks/quality and benchmarks/speed runs to its last line of JSON, on tiny inputs."""

import importlib
import itertools
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from support.calibrating import add_tokenizer, words
from support.paths import ROOT

from benchmarks.gpu import offload as gpu_offload
from benchmarks.lib import divergence, llama, packed
from benchmarks.lib.divergence import Found
from benchmarks.lib.ggml_mixes import Shape, type_in_mix
from benchmarks.lib.markdown import cells
from benchmarks.quality import (
    analyses,
    budgets,
    codebooks,
    finetuned,
    low_digits,
    offload_mixes,
    offload_traces,
    own_scales,
    pareto,
    peers,
    peers_plot,
    planner,
    proxy_bound,
    published,
    recipes,
    rotation,
    row_loss,
    scales,
    sensitivity,
    tasks,
)
from benchmarks.speed import attention as speed_of_attention
from benchmarks.speed import cached, calibrated_cost, cold, latents, offload_gpu, planned_token, prompts
from benchmarks.speed import compress as speed_of_compress
from benchmarks.speed import peers as speed_of_peers
from benchmarks.speed import planned as speed_of_planned
from benchmarks.speed import serve as speed_of_serving
from trilobite.evaluate.measure import trace_experts
from trilobite.evaluate.trace import save_trace
from trilobite.kernels.cpu import engine
from trilobite.measure.shapes import ExpertsShape
from trilobite.quantize.calibrate import sampled
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load, load_tokenizer
from trilobite.runtime.offload import misses
from trilobite.runtime.offload.copies import HostCopies

CONTEXT = 32


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what one script packs is found by the next."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_checkpoint("mixtral", path)
    add_tokenizer(path)
    return path


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(words(12 * CONTEXT))
    monkeypatch.setattr(packed, "TRAINING_TEXT", path)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the `main` of a script with these arguments; returns the object of its last line."""
    threads = torch.get_num_threads()

    def call(script: Any, *arguments: object) -> Any:
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
        script.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    yield call
    torch.set_num_threads(threads)


def test_recipes_without_data(run: Any, model: Path, text: Path, work: Path) -> None:
    options = ["--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT, "--work", work]
    found = run(recipes, model, *options, "--recipes", "rtn3", "search3")
    assert [row["name"] for row in found["rows"]][-2:] == ["rtn3", "search3"]


def test_scales(run: Any, model: Path, text: Path, work: Path) -> None:
    options = ["--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT, "--work", work]
    names = ["search3", "search3 columns", "search3 importance", "search3 both"]
    found = run(scales, model, *options, "--recipes", *names)
    assert list(found["kl"]) == names
    assert len({round(kl["tiny"], 12) for kl in found["kl"].values()}) == 4


def test_rows_that_are_not_run_again_stay(
    run: Any, model: Path, text: Path, work: Path, tmp_path: Path
) -> None:
    """Those of the page, in the order of the script; of other tokens none."""
    page = tmp_path / "page.md"
    page.write_text("<!-- begin scales -->\n<!-- end scales -->\n")
    options = ["--text", text, "--context", CONTEXT, "--work", work, "--page", page, "--tokens"]
    run(scales, model, *options, 2 * CONTEXT, "--recipes", "search3 columns")
    before = cells(page.read_text())
    run(scales, model, *options, 2 * CONTEXT, "--recipes", "search3")
    after = cells(page.read_text())
    assert [row[0] for row in after] == ["recipe", "search3", "search3 columns"]
    assert after[2] == before[1]
    run(scales, model, *options, 3 * CONTEXT, "--recipes", "search3")
    assert [row[0] for row in cells(page.read_text())] == ["recipe", "search3"]


def test_published(run: Any, model: Path, text: Path, work: Path) -> None:
    options = ["--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT, "--work", work]
    names = ["hqq3", "hqq3 paper", "milo-s1 int3 hqq", "milo-s1 int3 hqq eq. 13"]
    found = run(published, model, *options, "--recipes", *names)
    assert list(found["kl"]) == names
    assert len({round(kl["tiny"], 12) for kl in found["kl"].values()}) == 4
    assert found["bits"]["milo-s1 int3 hqq"] == found["bits"]["milo-s1 int3 hqq eq. 13"]


def test_tasks(run: Any, model: Path, tmp_path: Path, work: Path) -> None:
    pytest.importorskip("lm_eval")
    item = {"query": "Question: w1 w2?\n", "choices": ["w3", "w4 w5"], "gold": 1}
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(item) + "\n" for _ in range(3)))
    options = ["--data", tmp_path, "--tasks", "piqa", "--recipes", "int4", "--work", work]
    found = run(tasks, model, *options)
    assert list(found["scores"]) == ["16 bit", "int4"]
    assert found["scores"]["int4"]["piqa"]["n"] == 3


def test_recipes_with_a_text_and_what_stands_upon_them(run: Any, model: Path, text: Path, work: Path) -> None:
    """Hessians are collected once, and the scripts that take them find them there."""
    windows = ["--calibration", text, "--samples", 8, "--context", CONTEXT, "--work", work]
    few = ["--text", text, "--tokens", 2 * CONTEXT]
    found = run(recipes, model, *windows, *few, "--recipes", *row_loss.METHODS)
    assert [row["name"] for row in found["rows"]][-2:] == list(row_loss.METHODS)
    assert (work / model.name / "hessians").is_dir()
    assert set(run(row_loss, model, *few, "--context", CONTEXT, "--work", work)["kl"]) == {
        f"{a} / {b}" for a in row_loss.METHODS for b in row_loss.METHODS
    }


@pytest.mark.long
def test_finetuned(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    windows = ["--calibration", text, "--samples", 6, "--context", CONTEXT, "--work", tmp_path / "work"]
    orders = ["no", "block", "paper-block"]
    found = run(finetuned, model, *windows, "--text", text, "--tokens", 2 * CONTEXT, "--finetune", *orders)
    assert [row["finetune"] for row in found["rows"]] == orders
    assert len({row["kl"] for row in found["rows"]}) == 3


def test_proxy_bound(
    run: Any, model: Path, text: Path, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    windows = ["--calibration", text, "--samples", 8, "--context", CONTEXT, "--work", work]
    with pytest.raises(SystemExit):
        run(proxy_bound, model, *windows, "--layers", 0)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_analyses(run: Any, text: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyses, "FIGURES", tmp_path)  # those of the documentation stay
    options = ["--models-folder", ROOT / "examples", "--models", "tiny-moe", "--only", "table2"]
    found = run(analyses, *options, "--text", text, "--context", CONTEXT, "--work", work)
    assert set(found["sections"]) == {"table2"}


def test_low_digits(run: Any, model: Path, text: Path) -> None:
    found = run(low_digits, model, "--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT)
    for mean, few, none in found["low_digits"]["tiny"].values():
        assert 0 < mean < 4
        assert 0.8 < few <= 1
        assert 0.5 < none < 1
    x = torch.ones(2, 128)
    x[1, 69:75] = 2**-8 + 2**-15  # eight bits, of which the last is worth 2^-15
    low = low_digits.steps(x)
    assert low.sum(-1).tolist() == [[0, 0], [0, 2]]
    assert low_digits.summary(low[1]) == [1, 1, 7 / 8]


def test_mixes(run: Any, model: Path, text: Path, work: Path) -> None:
    options = ["--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT, "--work", work]
    found = run(offload_mixes, model, *options)
    sizes = [row["bytes"] for row in found["rows"]]
    assert len(sizes) == 16
    assert sizes[-1] == min(sizes)


def test_traces(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    found = run(
        offload_traces, model, "--text", text, "--context", CONTEXT, "--samples", 2, "--figures", tmp_path
    )
    assert {"belady", "lru, one pool"} <= set(found["tiny"]["hit_ratio"])
    assert (tmp_path / "offload-tiny.png").stat().st_size > 10_000


@pytest.fixture
def streamable(model: Path, text: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A packed checkpoint, and a trace of it."""
    compress(str(model), tmp_path / "packed", load_recipe("rtn3"))
    whole = load(str(tmp_path / "packed"))
    trace = trace_experts(whole, load_tokenizer(str(model)), text, context=CONTEXT)
    save_trace(tmp_path / "trace.npz", trace)
    return tmp_path / "packed", tmp_path / "trace.npz"


@pytest.mark.long
@pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
def test_offloading_to_a_gpu(
    run: Any, streamable: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the host and interpreted kernels in its place."""
    triton_interpreter = pytest.importorskip("support.triton_interpreter")
    triton_interpreter.install()
    monkeypatch.setattr(HostCopies, "gpu_layout", True)
    monkeypatch.setattr(gpu_offload.Real, "make_engine", lambda _: HostCopies())
    monkeypatch.setattr(gpu_offload, "ROUNDS", 1)
    monkeypatch.setattr(offload_gpu, "WARM", 1)
    monkeypatch.setattr(misses, "ROUNDS", 1)
    monkeypatch.setattr(misses, "TOKENS", (1, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    rows = run(gpu_offload, *streamable, "--shares", 80, "--tokens", 2)["rows"]
    assert {row["variant"] for row in rows} == set(offload_gpu.VARIANTS)


@pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
def test_offloading_to_a_gpu_on_paper(run: Any, streamable: tuple[Path, Path]) -> None:
    options = ["--copy", 12, "--shares", 80, "--tokens", 16]
    found = run(offload_gpu, *streamable, *options)
    rows = {row["variant"]: row for row in found["rows"]}
    assert set(rows) == set(offload_gpu.VARIANTS)
    assert rows["full"]["hit_ratio"] > rows["neither"]["hit_ratio"]
    assert all(row["seconds"] >= row["alone"] for row in found["rows"])


def test_codebooks(run: Any) -> None:
    assert run(codebooks, "--vectors", 1280)["rows"]


def test_speed_of_compression(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_of_compress, "SHAPES", ((64, 128),))
    monkeypatch.setattr(
        speed_of_compress,
        "MILO_CASES",
        tuple(replace(c, shape=(64, 128), rank=4) for c in speed_of_compress.MILO_CASES[:1]),
    )
    monkeypatch.setattr(speed_of_compress, "implied", lambda found: {})
    monkeypatch.setattr(speed_of_compress, "implied_table", lambda models: "")
    assert run(speed_of_compress, "--quick", "--jobs", 1)["speeds"]


def test_compression_from_disk_to_disk(
    run: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path, layers: int) -> tuple[list[int], int]:
        shutil.copytree(model, folder)
        return [1, 1], layers

    monkeypatch.setattr(speed_of_compress, "write_mixtral", write)
    options = ("--rss-only", "--work", tmp_path, "--layers", 3)
    sizes = [
        run(speed_of_compress, *options, "--recipe", recipe)["memory"]["packed_bytes"]
        for recipe in ("rtn3", "int8")
    ]
    assert sizes[0] < 0.7 * sizes[1]
    with pytest.raises(SystemExit):
        run(speed_of_compress, *options, "--recipe", "rtn33")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", range(len(calibrated_cost.CASES)))
def test_calibrated_cost(run: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    cases = [replace(c, n=64, k=128, rows=32, rank=min(c.rank, 4)) for c in calibrated_cost.CASES]
    monkeypatch.setattr(calibrated_cost, "CASES", cases)
    assert run(calibrated_cost, "--child", number)["seconds"] > 0


@pytest.mark.skipif(not engine.available(), reason="the native library is not installed")
def test_speed_of_the_engine(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = importlib.import_module("benchmarks.speed.cpu")
    tiny = replace(cpu.MIXTRAL, name="tiny", hidden=64, intermediate=64)
    monkeypatch.setattr(cpu, "MIXTRAL", tiny)
    monkeypatch.setattr(cpu, "DEEPSEEK", tiny)
    assert run(cpu, "--quick", "--only", "overhead")["overhead"]


def test_planner(run: Any, model: Path, text: Path, tmp_path: Path) -> None:
    options = ("--text", text, "--context", CONTEXT, "--tokens", 4 * CONTEXT)
    figure = tmp_path / "planner.png"
    found = run(planner, model, *options, "--plans", 4, "--figure", figure)["models"][model.name]
    assert figure.stat().st_size > 10_000
    assert [kind for kind, *_ in found["points"]] == ["planned", "random"] * 2
    assert all(kl > 0 and predicted > 0 for *_, predicted, kl in found["points"])
    assert planner.correlation([1, 2, 3, 4], [1.0, 2.5, 3.0, 9.0]) == 1
    assert planner.correlation([1, 2, 3, 4], [4, 3, 2, 1]) == -1


def test_budgets(run: Any, model: Path, text: Path, work: Path) -> None:
    options = ("--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT, "--work", work)
    found = run(budgets, model, *options, "--recipes", "fine3", "--bits 3.5625")
    assert list(found["kl"]) == ["fine3", "--bits 3.5625"]
    assert 3 < found["bits"]["--bits 3.5625"][model.name] <= 3.5625


def test_what_is_found_is_kept(
    run: Any, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several recipes only those are measured that no earlier run found on the same tokens."""
    options = ("--text", text, "--context", CONTEXT, "--work", tmp_path, "--recipes", "search3")
    first = run(scales, model, *options, "--tokens", 2 * CONTEXT)["kl"]
    monkeypatch.setattr(divergence, "pack", None)
    assert run(scales, model, *options, "--tokens", 2 * CONTEXT)["kl"] == first
    with pytest.raises(TypeError):
        run(scales, model, *options, "--tokens", 3 * CONTEXT)


@pytest.mark.long
def test_peers(run: Any, model: Path, text: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours alone: the others' libraries are not here."""
    options = ("--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT, "--work", work)
    monkeypatch.setattr(peers, "BUDGETS", (3.4,))
    monkeypatch.setattr(peers, "LATTICE", ())
    monkeypatch.setattr(peers, "SAMPLES", 4)
    monkeypatch.setattr(sampled, "FOR_HESSIANS", 4)
    for preset in ("milo-s1", "quip2-free", "quip2"):
        monkeypatch.setitem(peers.PRESETS, preset, load_recipe("rtn3"))
    found = run(peers, model, *options, "--data", "--calibration", text)["peers"][model.name]
    assert list(found) == ["free", "text"]
    assert all("**--bits 3.4**" in rows for rows in found.values())
    assert found["free"]["**--bits 3.4**"]["kl"] != found["text"]["**--bits 3.4**"]["kl"]
    for rows in found.values():
        assert rows["**--bits 3.4 --method gptq**"]["kl"] != rows["**--bits 3.4**"]["kl"]


def test_rows_of_peers_that_are_not_run_again_stay() -> None:
    """Of the same text; those that are run again are new, all by bits, with and without data apart."""
    first = {"free": {"a": Found(bits=3, kl=0.5), "b": Found(bits=2, kl=0.7)}}
    report = peers.report(first, "head")
    second = {"free": {"a": Found(bits=3, kl=0.4)}, "text": {"c": Found(bits=4, kl=0.1)}}
    found = peers.read_tables(peers.report(second, "head", report))
    assert found == {
        "free": {"b": ("2.00", "0.7000"), "a": ("3.00", "0.4000")},
        "text": {"c": ("4.00", "0.1000")},
    }
    assert list(found["free"]) == ["b", "a"]
    assert peers.read_tables(peers.report({"text": {}}, "head", report)) == peers.read_tables(report)
    assert "b" not in peers.read_tables(peers.report(second, "other", report))["free"]


def test_mixes_of_types() -> None:
    """Some roles of a model of eight experts are raised; others are not."""
    shape = Shape(layers=8, experts=8, sharing=2)
    found = [type_in_mix("Q3_K_M", part, 3, shape, importance=False) for part in ("q", "k", "v", "o", "down")]
    assert found == ["Q3_K", "Q8_0", "Q8_0", "Q5_K", "Q4_K"]
    assert type_in_mix("IQ3_XXS", "down", 0, shape, importance=True) == "IQ3_XXS"
    assert type_in_mix("IQ3_XXS", "down", 0, shape, importance=False) == "Q4_K"
    assert type_in_mix("Q2_K", "kv_b", 0, shape, importance=False) == "Q2_K"


def test_rotation(run: Any, model: Path, text: Path, work: Path) -> None:
    options = ("--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT, "--work", work)
    found = run(rotation, model, *options, "--bits", 3.4)["kl"][f"{model.name} 3.4"]
    assert found["all rotated"] != found["as they are"]


def test_a_vector_of_scales_for_each_matrix(run: Any, model: Path, text: Path, work: Path) -> None:
    options = ("--text", text, "--context", CONTEXT, "--tokens", 2 * CONTEXT, "--work", work)
    kl = run(own_scales, model, *options)["kl"][model.name]
    assert len(set(kl.values())) == 6


@pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
def test_one_token_of_planned_recipes(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ExpertsShape(name="tiny", experts=4, active=2, hidden=256, intermediate=512)
    monkeypatch.setattr(planned_token, "MIXTRAL", tiny)
    assert run(planned_token, "--model", model, "--bits", 3.4, "--rounds", 1)["mean"]["exact"] > 0


@pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
def test_steps_over_latents(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint("deepseek_v2", tmp_path / "original", dtype=torch.bfloat16)
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    monkeypatch.setattr(latents, "packed_models", lambda names: [(names[0], tmp_path / "packed")])
    rows = run(latents, "--tokens", 20, 40, "--rounds", 1, "--steps", 2)["latents"]
    assert [row["tokens"] for row in rows] == [20, 40]
    assert min(row[way] for row in rows for way in latents.WAYS) > 0


@pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
def test_one_core_out_of_a_cache(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "SHAPE", (64, 128))
    found = run(cached, "--repeats", 2, "--tokens", 2)
    assert {row["format"] for row in found["rows"]} == {"int2-g64", "int3-g64", "int4-g64"}
    assert {row["mode"] for row in found["rows"]} == {"exact", "int8"}
    assert min(row["rate"] for row in found["rows"]) > 0 < found["probe"]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc/self/io here")
def test_first_tokens_from_the_disk(run: Any, model: Path, tmp_path: Path) -> None:
    compress(str(model), tmp_path / "packed", load_recipe("rtn3"))
    rows = run(cold, tmp_path / "packed", "--prompt", 3, "--tokens", 6, "--rounds", 1)["rows"]
    assert [row["pages"] for row in rows] == ["small", "huge", "ahead"]
    assert all(min(row[name] for name in ("load", "first", "written", "token")) > 0 for row in rows)
    assert all(row["first"] > row["load"] and row["read"] >= 0 for row in rows)


@pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
def test_prompts_of_whole_models(
    run: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp is not here: its programs take a second, and two with one layer more."""
    compress(str(model), tmp_path / "packed", load_recipe("rtn3"))
    speed = r"""case "$2" in *-1.*) s=8;; *) s=4;; esac; echo "[{\"avg_ts\": $s, \"n_gen\": 0}]" """
    _programs(tmp_path / "llama.cpp/native/bin", bench=speed)
    _program(tmp_path / "python", 'touch "$3"')
    monkeypatch.setattr(
        prompts, "packed_models", lambda names, layers: ((n, tmp_path / "packed") for n in names)
    )
    seconds = itertools.count(1)

    def read(model: Any, tokens: int) -> float:
        """Reads, and says that it took a second more than the last time."""
        speed_of_peers.read_prompt(model, tokens)
        return next(seconds)

    monkeypatch.setattr(prompts, "read_prompt", read)
    options = ("--builds", tmp_path, "--python", tmp_path / "python", "--prompt", 8, "--rounds", 1)
    found = run(prompts, "--shapes", "mixtral", *options)["mixtral"]
    assert found["seconds"]["llama.cpp"] == {"1 layers": 1, "2 layers": 2, "layer": 1, "whole": 32}
    assert found["GMAC/s"].keys() == {"exact", "int8"}
    mixtral = 2 * 3 * 4096 * 14336 + 2 * 4096 * (4096 + 1024)
    assert prompts.macs("mixtral") == mixtral

    seconds = itertools.count(100, -1)
    with pytest.raises(
        SystemExit, match=r"mixtral, exact: 2 layers took 9\d\.000 s and 1 took 9\d\.000; something"
    ):
        run(prompts, "--shapes", "mixtral", *options)


@pytest.mark.long
def test_speed_of_planned_recipes(
    run: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        speed_of_planned, "write_mixtral", lambda folder, layers: shutil.copytree(model, folder)
    )
    options = ("--tokenizer", model, "--work", tmp_path, "--importance", "weights")
    assert run(speed_of_planned, *options)["rows"][0]["peak"] > 0


def test_sensitivity(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run(sensitivity, model, "--tokens", 64)
    found = printed["priors"]
    assert all(len(course) == sensitivity.DEPTHS and min(course) > 0 for course in found.values())
    shipped = json.loads(sensitivity.TABLE.read_text())["sensitivities"]
    least, most = printed["of_shipped"]
    assert least <= found["expert: down"][0] / shipped["expert: down"][0] <= most
    one, other = {"a: b": [0.0, 1.0, 2.0]}, {"a: b": [3.0, 5.0, None]}
    monkeypatch.setattr(sensitivity, "DEPTHS", 3)
    moved = sensitivity.mean(sensitivity.levelled([one, other]))
    # Means of what both know are .5 and 4: all moves to 2.25.
    assert moved["a: b"] == pytest.approx([(1.75 + 1.25) / 2, (2.75 + 3.25) / 2, 3.75])


def test_peers_plot(run: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    row = "| **--bits 3.5 --method gptq**"
    worse = page.replace(row, f"| IQ3_S | 3.50 | 0.0001 |\n{row}")
    (tmp_path / "worse.md").write_text(worse, encoding="utf-8")
    figure = tmp_path / "peers.png"
    before = run(peers_plot, "--figure", figure)["beaten"]
    after = run(peers_plot, "--figure", figure, "--page", tmp_path / "worse.md")["beaten"]
    assert figure.stat().st_size > 10_000
    assert "--bits 3.5 --method gptq" not in before["tiny-mixtral"]["free"]
    assert "--bits 3.5 --method gptq" in after["tiny-mixtral"]["free"]
    ours, theirs = ("**--bits 3**", 3.0, 0.2), (("a", 3.07, 0.4), ("b", 3.08, 0.1), ("c", 2.5, 0.5))
    points = [pareto.Point(recipe=name, bits=bits, kl=kl) for name, bits, kl in (ours, *theirs)]
    assert peers_plot.ratios(points) == {"--bits 3": "0.50 (a)"}
    with pytest.raises(SystemExit, match="no table of"):
        run(peers_plot, "--page", ROOT / "README.md", "--figure", tmp_path / "none.png")


def test_pareto(run: Any, tmp_path: Path) -> None:
    fronts = run(pareto, "--figure", tmp_path / "pareto.png")["fronts"]
    assert (tmp_path / "pareto.png").stat().st_size > 10_000
    assert "quip2" in fronts["tiny-mixtral-outliers"]["calibrated"]
    with pytest.raises(SystemExit, match="no table"):
        run(pareto, "--page", ROOT / "README.md", "--figure", tmp_path / "none.png")


def test_a_front_is_what_nobody_beats() -> None:
    made = [
        pareto.Point(recipe=str(i), bits=b, kl=k)
        for i, (b, k) in enumerate(((3, 2), (2, 3), (4, 2.5), (4, 1)))
    ]
    assert [p.recipe for p in pareto.front(made)] == ["1", "0", "3"]


@pytest.mark.long
def test_speed_of_serving(run: Any, model: Path, tmp_path: Path) -> None:
    """On a copy: the script writes a tokenizer of its own."""
    copy = shutil.copytree(model, tmp_path / "copy")
    (row,) = run(speed_of_serving, copy, "--clients", 2, "--prompt", 8, "--tokens", 3, "--repeat", 1)["copy"]
    assert row["clients"] == 2
    assert row["ratio"] == pytest.approx(row["serve"] / row["generate"], rel=0.01)


def _program(path: Path, does: str) -> None:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


def _programs(folder: Path, *, bench: str, batched: str = "exit 1") -> None:
    """In the place of llama.cpp's."""
    folder.mkdir(parents=True)
    _program(folder / "llama-bench", bench)
    _program(folder / "llama-batched-bench", batched)


def test_attention_of_prompts(run: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    rows = run(speed_of_attention, "--prompts", 3, 20, "--repeats", 1, "-o", report)["rows"]
    kinds = (16, 128), (32, 128), (16, 192)
    assert [(row["heads"], row["width"], row["length"]) for row in rows] == [
        (*kind, n) for kind in kinds for n in (3, 20)
    ]
    assert all(row["torch"] > 0 and row["engine"] > 0 for row in rows)
    assert "32 on 8" in report.read_text()


def test_speed_of_peers(run: Any, model: Path, tmp_path: Path) -> None:
    """Beside programs that print what llama.cpp's and ik_llama.cpp's print, in two tiers; in one of them one fails."""
    alone = [{"n_prompt": 8, "n_gen": 0, "avg_ts": 64.0}, {"n_prompt": 0, "n_gen": 4, "avg_ts": 16.0}]
    texts = (
        "|    PP |   TG |  B | S_TG t/s |\n|-------|------|----|----------|\n|     8 |    4 |  2 |    24.00 |"
    )
    for tier in ("native", "avx2"):
        printing = {"bench": f"echo '{json.dumps(alone)}'", "batched": f"echo '{texts}'"}
        _programs(tmp_path / "llama.cpp" / tier / "bin", **printing)
        if tier == "avx2":
            printing = {"bench": "echo loading >&2; echo unknown model >&2; exit 1"}
        else:
            printing["batched"] += " >&2"
        _programs(tmp_path / "ik_llama.cpp" / tier / "bin", **printing)
    packed_model = tmp_path / "packed"
    compress(str(model), packed_model, load_recipe("rtn3"))
    options = ["--builds", tmp_path, "--tiers", "avx2", "native", "--peers", "llama.cpp", "ik_llama.cpp"]
    options += ["--prompt", 8, "--tokens", 4, "--texts", 2, "--rounds", 1]
    report = tmp_path / "report.md"
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    found = run(speed_of_peers, packed_model, "--gguf", file, *options, "-o", report)["rows"]
    assert all(
        program.pop("probe") > 0 for row in found for program in row.values() if isinstance(program, dict)
    )
    theirs = {"tg": 16.0, "tg 2": 24.0, "pp 8": 64.0}
    assert [row["llama.cpp"] for row in found] == [theirs, theirs]
    assert [row["ik_llama.cpp"] for row in found] == [{}, theirs]
    with pytest.raises(RuntimeError, match="llama-bench: unknown model"):
        llama.bench(tmp_path / "ik_llama.cpp/avx2/bin", Path("none"), threads=1, prompt=8, tokens=4)
    column = [line.split("|")[7].strip() for line in report.read_text().splitlines()]
    assert column[2:] == ["-", "-", "-", "16.0", "24.0", "64.0"]
    assert found[0]["tier"] in ("avx2", "neon", "scalar")
    assert found[1]["tier"] == engine.info()["tier"]
    assert all(
        row[mode][what] > 0 for row in found for mode in ("exact", "int8") for what in ("tg", "tg 2", "pp 8")
    )
