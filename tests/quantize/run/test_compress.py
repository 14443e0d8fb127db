import errno
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.architectures import TINY_CONFIGS, build_checkpoint
from support.paths import SRC
from support.runs import PlugPulled, digests, looks_complete
from transformers import AutoModelForCausalLM

from trilobite.checkpoint import packed as packed_module
from trilobite.checkpoint.guard import FIELD
from trilobite.checkpoint.layout import StoredTensor, Unit
from trilobite.checkpoint.packed import PARTIAL, REPORT, TIMES, PackedWriter, read_report
from trilobite.checkpoint.roles import read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.errors import (
    CheckpointError,
    DestinationError,
    FormatVersionError,
    ShapeError,
    TrilobiteError,
    WeightError,
)
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.quantize.run.card import CARD
from trilobite.quantize.run.compress import Result, compress, prepare
from trilobite.quantize.run.identity import run_identity
from trilobite.quantize.run.options import Options
from trilobite.recipe import Recipe, Role, Rule, load_recipe, parse_format

SERIAL = Options(jobs=1, device="cpu")
MILO = replace(load_recipe("milo-s1"), rank="dense-4+sparse-2", iterations=2, cap=False)


def run(source: Path, dst: Path, recipe: Recipe = MILO, options: Options = SERIAL) -> Result:
    return compress(str(source), dst, recipe, options=options)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "modeling_evil.py").write_text("raise SystemExit")
    return path


@pytest.fixture(scope="module")
def finished(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    dst = tmp_path_factory.mktemp("finished") / "packed"
    run(mixtral, dst)
    return dst


@pytest.fixture
def copy(mixtral: Path, tmp_path: Path) -> Path:
    """A source that a test may spoil."""
    return Path(shutil.copytree(mixtral, tmp_path / "mixtral"))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return found


def decoded(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    parts = {s: tensors[f"{name}_{s}"] for s in ("packed", "scale", "lra", "lrb") if f"{name}_{s}" in tensors}
    return dequantize(PackedWeight(shape=shape, **parts))


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_every_architecture(model_type: str, tmp_path: Path) -> None:
    """Bytes on disk as planned, every matrix decodes to its source, kept tensors are the source's."""
    build_checkpoint(model_type, tmp_path / "source", dtype=torch.bfloat16)
    result = compress(str(tmp_path / "source"), tmp_path / "dst", load_recipe("rtn3"), options=SERIAL)
    source, tensors = open_source(str(tmp_path / "source")), tensors_of(tmp_path / "dst")
    expected = {t.name: (t.shape, t.nbytes) for line in result.plan.lines for t in line.stored}
    assert {name: (tuple(t.shape), t.nbytes) for name, t in tensors.items()} == expected
    for line in result.plan.lines:
        w = read_matrix(source, line.matrix)
        if line.format is None:
            assert torch.equal(tensors[line.matrix.name], w)
            continue
        n, k = line.matrix.shape
        back = decoded(tensors, line.matrix.name, line.packed_shape)[:n, :k]
        error = float((w.float() - back).norm() / w.float().norm())
        limit = 0.01 if line.format.bits == 8 else 0.23
        assert error < limit, line.matrix.name
        assert result.records[line.matrix.name]["error"] == pytest.approx(error, rel=1e-3)
    on_disk = sum(p.stat().st_size for p in (tmp_path / "dst").glob("*.safetensors"))
    assert (
        sum(line.nbytes for line in result.plan.lines)
        < on_disk
        < sum(t.nbytes for t in tensors.values()) + 70_000
    )


def test_compensators_are_on_disk_as_planned(finished: Path, mixtral: Path) -> None:
    plan, tensors = prepare(open_source(str(mixtral)), MILO), tensors_of(finished)
    assert {n: t.nbytes for n, t in tensors.items()} == {
        t.name: t.nbytes for x in plan.lines for t in x.stored
    }
    source = open_source(str(mixtral))
    for line in plan.lines:
        if line.rank:
            n, k = line.matrix.shape
            w = read_matrix(source, line.matrix).float()
            assert float((w - decoded(tensors, line.matrix.name, (n, k))).norm() / w.norm()) < 0.19


def test_what_is_in_the_folder(finished: Path, mixtral: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        REPORT,
        TIMES,
        CARD,
    }
    config = json.loads((finished / "config.json").read_text())
    original = json.loads((mixtral / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "trilobite"
    assert "import trilobite" in config.pop(FIELD)
    assert config == original
    report = read_report(finished)
    assert [row["name"] for row in report["tensors"]] == [
        line.matrix.name for line in prepare(open_source(str(mixtral)), MILO).lines
    ]
    assert all("kept" in row or row["error"] > 0 for row in report["tensors"])
    assert str(mixtral.parent) not in (finished / REPORT).read_text()


def test_parts_of_an_expert_are_one_contiguous_read(finished: Path) -> None:
    info = open_source(str(finished)).tensors
    for layer in range(2):
        for e in range(4):
            own = [i for name, i in info.items() if f"layers.{layer}.block_sparse_moe.experts.{e}." in name]
            start, end = min(i.offset for i in own), max(i.offset + i.nbytes for i in own)
            assert end - start == sum(i.nbytes for i in own)
            assert len(own) == 9


def test_jobs_do_not_change_a_byte(finished: Path, mixtral: Path, tmp_path: Path) -> None:
    run(mixtral, tmp_path / "dst", options=Options(jobs=2, device="cpu"))
    assert digests(tmp_path / "dst") == digests(finished)


def test_a_finished_run_is_left_alone(finished: Path, mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.iterdir()}
    monkeypatch.setattr(PackedWriter, "__init__", lambda *a, **k: pytest.fail("wrote again"))
    assert run(mixtral, finished).fresh == 0
    assert {p: p.stat().st_mtime_ns for p in finished.iterdir()} == before


def test_a_finished_run_is_not_measured_again(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a kurtosis policy are in the report."""
    recipe = replace(MILO, rank="dense-4+kurtosis-2")
    plan = run(mixtral, tmp_path / "dst", recipe).plan
    monkeypatch.setattr("trilobite.quantize.plan.plan.kurtosis", lambda w: pytest.fail("read the weights"))
    assert run(mixtral, tmp_path / "dst", recipe).plan == plan


@pytest.mark.parametrize("damage", ["missing", "cut", "index"])
def test_a_finished_run_that_lost_weights_is_noticed(
    finished: Path, mixtral: Path, tmp_path: Path, damage: str
) -> None:
    dst = Path(shutil.copytree(finished, tmp_path / "dst"))
    shard = dst / "model-00001-of-00001.safetensors"
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, shard.stat().st_size - 100)
    else:
        (dst / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(DestinationError, match=r"delete .*dst and run the same command again") as e:
        run(mixtral, dst)
    assert "\n" not in str(e.value)


def test_a_run_is_not_continued_on_another_device(
    finished: Path, mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native quantizer is that of the CPU, on a GPU PyTorch rounds."""
    monkeypatch.setattr("trilobite.quantize.run.options.pick_device", lambda _: torch.device("cuda"))
    with pytest.raises(DestinationError, match="differs in its version"):
        run(mixtral, finished)
    source = open_source(str(mixtral))
    identity = run_identity(source, MILO, torch.device("cuda"), frequency=None, calibration=None)
    assert identity["version"].endswith("torch on cuda")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="an affinity is Linux's")
def test_one_job_for_each_usable_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7})
    assert Options(jobs=0).threads(torch.device("cpu")) == 3
    assert Options(jobs=2).threads(torch.device("cpu")) == 2
    assert Options(jobs=0).threads(torch.device("cuda")) == 1


@pytest.mark.parametrize("text", ["int3-g32", "e8p-2"])
@pytest.mark.parametrize("rank", ["", "uniform-2"])
def test_a_matrix_of_zeros_has_no_error(copy: Path, tmp_path: Path, text: str, rank: str) -> None:
    tensors = tensors_of(copy)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name].zero_()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    rules = (Rule(roles=(Role.ATTENTION,), format=parse_format(text)),)
    run(copy, tmp_path / "dst", Recipe(name="zeros", rules=rules, rank=rank, iterations=2, cap=False))
    row = next(r for r in read_report(tmp_path / "dst")["tensors"] if r["name"] == name)
    assert row["error"] == 0.0


def interrupted(
    source: Path, dst: Path, after: int, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> None:
    """Run until `after` tensors are written, then fail."""
    original, count = PackedWriter.write, []

    def write(self: PackedWriter, *args: object) -> None:
        if len(count) >= after:
            raise PlugPulled
        count.append(1)
        original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PackedWriter, "write", write)
        with pytest.raises(PlugPulled):
            run(source, dst, **settings)


@pytest.mark.parametrize("after", [0, 1, 7, 30])
@pytest.mark.parametrize("jobs", [1, 2])
def test_resumed_to_the_same_bytes(
    finished: Path, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, jobs: int
) -> None:
    options = Options(jobs=jobs, device="cpu")
    interrupted(mixtral, tmp_path / "dst", after, monkeypatch, options=options)
    assert not looks_complete(tmp_path / "dst")
    with pytest.raises(CheckpointError, match="unfinished run"):
        read_report(tmp_path / "dst")
    result = run(mixtral, tmp_path / "dst", options=options)
    # What another thread was writing when the run failed may be made again.
    assert result.fresh <= len(result.plan.lines) - after + jobs - 1
    assert after <= 1 or result.fresh < len(result.plan.lines)
    assert digests(tmp_path / "dst") == digests(finished)


def test_keyboard_interrupt_is_resumable(finished: Path, mixtral: Path, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(mixtral, tmp_path / "dst", options=replace(SERIAL, on_line=stop))
    assert not looks_complete(tmp_path / "dst")
    run(mixtral, tmp_path / "dst")
    assert digests(tmp_path / "dst") == digests(finished)


@pytest.mark.parametrize("spoil", ["torn", "no newline", "garbage", "foreign", "empty"])
def test_torn_journal(
    finished: Path, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    interrupted(mixtral, tmp_path / "dst", 9, monkeypatch)
    journal = tmp_path / "dst" / PARTIAL / "journal.jsonl"
    whole = journal.read_bytes()
    assert whole.count(b"\n") == 9
    last = {
        "torn": whole[:-20],
        "no newline": whole[:-1],
        "garbage": whole + b"\x00\xff{{{\n",
        "foreign": whole + b'{"name": "no.such.tensor"}\n',
        "empty": b"",
    }[spoil]
    journal.write_bytes(last)
    result = run(mixtral, tmp_path / "dst")
    assert result.fresh == len(result.plan.lines) - {"torn": 8, "no newline": 8, "empty": 0}.get(spoil, 9)
    assert digests(tmp_path / "dst") == digests(finished)


def test_a_lost_tensor_would_be_noticed(
    finished: Path, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail: a journal that lists a tensor whose bytes are not there."""
    interrupted(mixtral, tmp_path / "dst", 9, monkeypatch)
    file = next((tmp_path / "dst" / PARTIAL).glob("*.safetensors"))
    with file.open("r+b") as f:
        f.seek(int.from_bytes(f.read(8), "little") + 200)
        f.write(bytes(100))
    run(mixtral, tmp_path / "dst")
    assert digests(tmp_path / "dst") != digests(finished)


@pytest.mark.parametrize("step", ["companions", "shards", "index", "config", "cleaned"])
def test_killed_while_the_files_move_up(
    finished: Path, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """At every step of the last second."""

    def pull(*_: object, **__: object) -> None:
        raise PlugPulled

    def selective(path: Path, data: bytes, **settings: Path) -> None:
        stop = {
            "index": "model.safetensors.index.json",
            "config": "config.json",
            "companions": "tokenizer_config.json",
        }
        if path.name == stop.get(step):
            raise PlugPulled
        original(path, data, **settings)

    original = packed_module.write_whole
    with monkeypatch.context() as patch:
        patch.setattr(packed_module, "write_whole", selective)
        if step == "shards":
            real = os.replace
            patch.setattr(
                os, "replace", lambda a, b: pull() if str(b).endswith(".safetensors") else real(a, b)
            )
        if step == "cleaned":
            patch.setattr(shutil, "rmtree", lambda p: (p / "identity.json").unlink() or pull())
        with pytest.raises(PlugPulled):
            run(mixtral, tmp_path / "dst")
    run(mixtral, tmp_path / "dst")
    assert digests(tmp_path / "dst") == digests(finished)


def test_another_recipe_is_refused(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(mixtral, tmp_path / "dst", 5, monkeypatch)
    before = digests(tmp_path / "dst")
    with pytest.raises(DestinationError, match="unfinished run whose recipe") as e:
        run(mixtral, tmp_path / "dst", load_recipe("rtn3"))
    assert "delete it" in str(e.value)
    assert digests(tmp_path / "dst") == before


def test_another_recipe_over_a_finished_one_is_refused(finished: Path, mixtral: Path) -> None:
    before = digests(finished)
    with pytest.raises(DestinationError, match="differs in its recipe"):
        run(mixtral, finished, load_recipe("rtn3"))
    assert digests(finished) == before


def test_a_source_that_changed_is_refused(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(copy, tmp_path / "dst", 5, monkeypatch)
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(DestinationError, match="unfinished run whose source"):
        run(copy, tmp_path / "dst")


def test_a_source_that_changes_during_the_run_is_noticed(copy: Path, tmp_path: Path) -> None:
    def spoil(*_: object) -> None:
        os.utime(copy / "model.safetensors", ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed since it was opened"):
        run(copy, tmp_path / "dst", options=replace(SERIAL, on_line=spoil))
    assert not looks_complete(tmp_path / "dst")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.block_sparse_moe.experts.2.w3.weight", "model.norm.weight", "model.embed_tokens.weight"],
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_nan_and_infinity(copy: Path, tmp_path: Path, bad: float, name: str, jobs: int) -> None:
    tensors = tensors_of(copy)
    tensors[name].view(-1)[-1] = bad
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=re.escape(name)) as e:
        run(copy, tmp_path / "dst", load_recipe("rtn3"), Options(jobs=jobs, device="cpu"))
    assert "\n" not in str(e.value)
    assert not looks_complete(tmp_path / "dst")


def test_weights_out_of_range(copy: Path, tmp_path: Path) -> None:
    tensors = tensors_of(copy)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name][0, 0] = 1e30
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=f"{re.escape(name)}.*out of range"):
        run(copy, tmp_path / "dst")


def test_experts_that_do_not_divide_write_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    config = TINY_CONFIGS["qwen3_moe"]()
    config.moe_intermediate_size = 44
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    with pytest.raises(ShapeError, match="K=44"):
        run(source, tmp_path / "dst", load_recipe("quip3-free"))
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("after", [0, 3, 40])
def test_full_disk(
    finished: Path, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    real, count = os.pwrite, []

    def pwrite(handle: int, data: bytes, at: int) -> int:
        count.append(1)
        if len(count) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(DestinationError, match="disk is full; nothing is lost") as e:
            run(mixtral, tmp_path / "dst")
    assert isinstance(e.value, OSError)
    assert not looks_complete(tmp_path / "dst")
    run(mixtral, tmp_path / "dst")
    assert digests(tmp_path / "dst") == digests(finished)


def test_full_disk_while_ranks_are_noted(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def replaced(source: Path, target: Path) -> None:
        if target.name == "ranks.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises(DestinationError, match="disk is full"):
        run(mixtral, tmp_path / "dst")


def test_too_small_a_disk_is_noticed_at_the_start(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(DestinationError, match=r"needs .* GB.*run the same command again"):
        run(mixtral, tmp_path / "dst")


def test_pieces_of_a_write_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes ten bytes at a time."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: real(handle, data[:10], at))
    unit = Unit(name="a", tensors=(StoredTensor(name="a_packed", dtype="U8", shape=(7, 9)),), block="a")
    data = torch.arange(63, dtype=torch.uint8).view(7, 9)
    with PackedWriter(tmp_path / "dst", [unit], {}) as writer:
        writer.write(unit, [data], {})
        writer.finish(config={}, notes={}, companions={})
    assert torch.equal(tensors_of(tmp_path / "dst")["a_packed"], data)


@pytest.mark.parametrize("kind", ["file", "folder with a file", "folder with a folder"])
def test_foreign_destinations_are_refused(mixtral: Path, tmp_path: Path, kind: str) -> None:
    dst = tmp_path / "dst"
    if kind == "file":
        dst.write_text("mine")
    else:
        dst.mkdir()
        (dst / "precious.txt").write_text("mine") if kind == "folder with a file" else (
            dst / "photos"
        ).mkdir()
    before = digests(tmp_path)
    with pytest.raises(DestinationError):
        run(mixtral, dst)
    assert digests(tmp_path) == before


def test_an_empty_folder_is_welcome(mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    run(mixtral, tmp_path / "dst", load_recipe("rtn3"))
    assert looks_complete(tmp_path / "dst")


def test_source_as_destination_is_refused(copy: Path) -> None:
    before = digests(copy)
    with pytest.raises(TrilobiteError):
        run(copy, copy)
    assert digests(copy) == before


def test_sharded_output_keeps_experts_of_a_layer_together(
    mixtral: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedWriter.__init__, "__kwdefaults__", {"shard_bytes": 30_000})
    run(mixtral, tmp_path / "dst")
    source = open_source(str(tmp_path / "dst"))
    assert len(source.files) > 2
    for layer in range(2):
        files = {
            i.file for name, i in source.tensors.items() if f"layers.{layer}.block_sparse_moe.experts" in name
        }
        assert len(files) == 1
    one, many = tensors_of(finished), tensors_of(tmp_path / "dst")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_order_of_tensors_on_disk_is_that_of_the_plan(finished: Path, mixtral: Path) -> None:
    names = [t.name for line in prepare(open_source(str(mixtral)), MILO).lines for t in line.stored]
    info = open_source(str(finished)).tensors
    assert sorted(info, key=lambda name: (info[name].offset, name)) == names


def test_data_starts_at_a_multiple_of_64(finished: Path) -> None:
    for file in finished.glob("*.safetensors"):
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == 0


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_other_format_versions_are_refused(finished: Path, tmp_path: Path, version: object) -> None:
    path = Path(shutil.copytree(finished, tmp_path / "copy"))
    report = json.loads((path / REPORT).read_text())
    (path / REPORT).write_text(json.dumps(report | {"format_version": version}))
    with pytest.raises(FormatVersionError, match=f"version {version!r}.*reads version 1"):
        read_report(path)


def test_reports_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no {REPORT}"):
        read_report(tmp_path)
    (tmp_path / REPORT).write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_report(tmp_path)
    (tmp_path / REPORT).write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_report(tmp_path)


def test_keep(mixtral: Path, tmp_path: Path) -> None:
    run(mixtral, tmp_path / "dst", load_recipe("rtn3").keeping((Role.EXPERT,)))
    names = set(tensors_of(tmp_path / "dst"))
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names
    assert "model.layers.0.self_attn.q_proj.weight_packed" in names


# ru_maxrss would count the pages of the parent, which a child holds until it executes its own program.
MEMORY = """
import sys
from pathlib import Path
import torch
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
compress(sys.argv[1], Path(sys.argv[2]), load_recipe(sys.argv[3]), options=Options(jobs=2, device="cpu"))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def test_peak_memory(tmp_path: Path) -> None:
    """At most the two largest tensors in fp32 plus 1 GB.

    A checkpoint of 0.7 GB in bf16, beside half a gigabyte of libraries, would show its whole weight.
    """
    source, size, layers = tmp_path / "source", 4096, 10
    source.mkdir()
    if shutil.disk_usage(tmp_path).free < 3 * 2**30:
        pytest.skip("less than 3 GB of disk")
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not tell a process's peak memory")
    w = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    small, norm = w[:128].contiguous(), torch.ones(size).bfloat16()
    ends = {"model.embed_tokens.weight": w[:32].contiguous(), "model.norm.weight": norm}
    for i in range(layers):
        attention = {"q": w, "o": w.clone(), "k": small, "v": small.clone()}
        mlp = {"gate": w[:32].contiguous(), "up": w[:32].clone(), "down": w[:, :32].contiguous()}
        parts = {f"self_attn.{p}_proj": t for p, t in attention.items()}
        parts |= {f"mlp.{p}_proj": t for p, t in mlp.items()}
        parts |= {"input_layernorm": norm, "post_attention_layernorm": norm.clone()}
        tensors = {f"model.layers.{i}.{name}.weight": t for name, t in parts.items()} | (
            ends if i == 0 else {}
        )
        save_file(
            {n: t.clone() for n, t in tensors.items()},
            source / f"model-{i + 1:05d}-of-{layers:05d}.safetensors",
        )
    sizes = {"hidden_size": size, "intermediate_size": 32, "num_hidden_layers": layers, "vocab_size": 32}
    heads = {
        "num_attention_heads": 32,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    (source / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes | heads))
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(source), str(tmp_path / "dst"), "rtn3"]
    try:
        out = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=300
        ).stdout
    finally:
        shutil.rmtree(source)
    print(out)
    assert int(out.split()[-1]) <= 2 * 4 * size * size + 10**9
