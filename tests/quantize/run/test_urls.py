"""Compressing from a URL to a URL: the bytes of a local run, whatever the network does, and no more disk than needed."""

import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fsspec.registry import _registry
from support.architectures import build_checkpoint
from support.calibrating import CONTEXT, SAMPLES, add_tokenizer, calibration, words
from support.object_store import BUCKET, ObjectStore, now_and_then, object_store, point_at
from support.runs import PlugPulled, digests
from support.workers import FakeWorkers

pytest.importorskip("s3fs", reason="needs s3fs: pip install 'trilobite[remote]'")
pytest.importorskip("moto.server", reason="needs moto's server: pip install 'moto[s3]' flask flask-cors")

from trilobite.checkpoint.packed import PackedWriter
from trilobite.checkpoint.remote import upload
from trilobite.checkpoint.source import open_source
from trilobite.errors import (
    CheckpointError,
    DestinationError,
    MissingExtraError,
    StoreError,
    TrilobiteError,
)
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.run.compress import Result, compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import Recipe, load_recipe

RECIPE, OTHER = load_recipe("rtn3"), load_recipe("int8")
SHARD = 30_000
SRC, DST = f"{BUCKET}/original", f"{BUCKET}/packed"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "original"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16, shard_size="150KB")
    add_tokenizer(path)
    (path / "README.md").write_text("---\nlicense: apache-2.0\n---\nAn original.\n")
    return path


@pytest.fixture(scope="module")
def serving() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(serving: ObjectStore, original: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    point_at(serving, monkeypatch)
    small_shards(monkeypatch)
    if not serving.names(SRC):
        serving.put(original, SRC)
    yield serving
    if serving.names(DST):
        serving.fs.rm(DST, recursive=True)
    serving.requests.clear()
    serving.faults.clear()


def small_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PackedWriter.__init__, "__kwdefaults__", {"shard_bytes": SHARD})


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def pack(
    src: Path | str,
    dst: Path | str,
    scratch: Path | None = None,
    recipe: Recipe = RECIPE,
    ground: Calibration | None = None,
    jobs: int = 1,
) -> Result:
    options = Options(jobs=jobs, device="cpu", scratch=scratch)
    return compress(src, dst, recipe, calibration=ground, options=options)


@pytest.fixture(scope="module")
def finished(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a local run makes with RECIPE."""
    path = tmp_path_factory.mktemp("local") / "packed"
    with pytest.MonkeyPatch.context() as patch:
        small_shards(patch)
        pack(original, path)
    return digests(path)


def sent(store: ObjectStore, folder: Path, url: str = DST) -> dict[str, str]:
    return digests(store.get(url, folder))


def test_the_bytes_of_a_local_run(
    store: ObjectStore, finished: dict[str, str], scratch: Path, tmp_path: Path
) -> None:
    """Tensors are read by ranges; nothing stays on this machine."""
    pack(SRC, DST, scratch, jobs=3)
    assert sent(store, tmp_path / "got") == finished
    assert len([name for name in finished if name.endswith(".safetensors")]) > 3
    assert list(scratch.iterdir()) == []
    reads = store.of("GET", "original/model-")
    assert len(reads) > 30
    assert all(r.range for r in reads)
    assert max(r.nbytes for r in reads) < 70_000


def test_no_more_of_the_disk_than_two_shards_and_the_one_in_work(
    store: ObjectStore, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, write = [0], PackedWriter.write

    def watched(self: PackedWriter, *args: object) -> None:
        write(self, *args)  # type: ignore[arg-type]
        most.append(sum(p.stat().st_blocks * 512 for p in scratch.rglob("*.safetensors")))

    monkeypatch.setattr(PackedWriter, "write", watched)
    pack(SRC, DST, scratch, jobs=3)
    largest = max(info["size"] for info in store.fs.ls(DST, detail=True) if "model-" in info["name"])
    assert 0 < max(most) < 3.5 * largest


def test_faults_change_nothing(
    store: ObjectStore, finished: dict[str, str], scratch: Path, tmp_path: Path
) -> None:
    """Errors, bodies that are too short or cut off, bytes that arrive changed."""
    with store.failing(now_and_then(0.2, "500", "short", "cut", "flip")):
        pack(SRC, DST, scratch, jobs=2)
    assert {"500", "short", "cut", "flip"} <= set(store.faults)
    assert sent(store, tmp_path / "got") == finished


def test_a_store_that_does_not_answer_in_time(
    store: ObjectStore, finished: dict[str, str], scratch: Path, tmp_path: Path
) -> None:
    count = itertools.count()
    with store.failing(lambda *_: "slow" if next(count) in (40, 120) else ""):
        pack(SRC, DST, scratch, jobs=2)
    assert store.faults == ["slow", "slow"]
    assert sent(store, tmp_path / "got") == finished


def interrupted(
    scratch: Path, after: int, monkeypatch: pytest.MonkeyPatch, method: str = "write", recipe: Recipe = RECIPE
) -> None:
    """Run until so many tensors, or files, are written."""
    whose, name = (PackedWriter, method) if method == "write" else (upload, method)
    original, count = getattr(whose, name), []

    def stop(*args: object) -> None:
        if len(count) >= after:
            raise PlugPulled
        count.append(1)
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(whose, name, stop)
        with pytest.raises(PlugPulled):
            pack(SRC, DST, scratch, recipe)


@pytest.mark.parametrize(
    ("method", "after", "elsewhere"),
    [("write", 25, False), ("put", 0, False), pytest.param("put", 14, True, marks=pytest.mark.long)],
)
def test_a_killed_run_goes_on(
    store: ObjectStore,
    finished: dict[str, str],
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    after: int,
    elsewhere: bool,
) -> None:
    """Here, and on a machine that has nothing but the URL: no shard that is there is made or sent again."""
    interrupted(scratch, after, monkeypatch, method)
    there = store.names(DST)
    assert "config.json" not in there
    with pytest.raises(CheckpointError, match=r"an unfinished run; run the same|nothing is there"):
        open_source(DST, remote=True)
    whole = {name for name in there if f".partial/{name}.jsonl" in there}
    assert whole or after < 14
    store.requests.clear()
    if elsewhere:
        shutil.rmtree(scratch)
    result = pack(SRC, DST, scratch)
    assert sent(store, tmp_path / "got") == finished
    assert {r.path.rpartition("/")[2] for r in store.of("PUT")}.isdisjoint(whole)
    if method == "write" and not elsewhere:
        assert result.fresh == len(result.records) - after


def test_a_run_that_ended_is_not_done_again(store: ObjectStore, scratch: Path) -> None:
    pack(SRC, DST, scratch)
    store.requests.clear()
    assert pack(SRC, DST, scratch).fresh == 0
    assert not store.of("PUT")
    with pytest.raises(DestinationError, match="packed: holds a checkpoint that differs in its recipe"):
        pack(SRC, DST, scratch, OTHER)


@pytest.mark.long
def test_another_recipe_into_an_unfinished_run(
    store: ObjectStore, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused as long as it is there; once it is removed at the URL, what is left here is, too."""
    interrupted(scratch, 4, monkeypatch, "put")
    with pytest.raises(
        DestinationError, match=f"{DST}: holds an unfinished run whose recipe differs; delete it"
    ):
        pack(SRC, DST, scratch, OTHER)
    store.fs.rm(DST, recursive=True)
    pack(SRC, DST, scratch, OTHER)
    pack(SRC, tmp_path / "local", recipe=OTHER)
    assert sent(store, tmp_path / "got") == digests(tmp_path / "local")


def test_a_shard_that_was_removed_is_made_again(
    store: ObjectStore,
    finished: dict[str, str],
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted(scratch, 40, monkeypatch)
    store.fs.rm(next(f"{DST}/{name}" for name in store.names(DST) if name.endswith(".safetensors")))
    pack(SRC, DST, scratch)
    assert sent(store, tmp_path / "got") == finished


def test_one_line_when_the_store_stays_away(
    store: ObjectStore, finished: dict[str, str], scratch: Path, tmp_path: Path
) -> None:
    """And nothing is lost."""
    with (
        store.failing(lambda method, path: "500" if method == "PUT" and "model-00003" in path else ""),
        pytest.raises(
            StoreError, match=r"packed/model-00003-\S+: failed 6 times in \d+ s, .*; nothing is lost: run"
        ),
    ):
        pack(SRC, DST, scratch)
    with (
        store.failing(
            lambda method, path: "cut" if method == "GET" and "original/model-00002" in path else ""
        ),
        pytest.raises(
            StoreError, match=r"original/model-00002-\S+: failed 6 times in .*; nothing is lost: run"
        ),
    ):
        pack(SRC, DST, scratch)
    pack(SRC, DST, scratch)
    assert sent(store, tmp_path / "got") == finished


def test_an_original_that_changes_meanwhile(
    store: ObjectStore, original: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(SRC, remote=True)
    name, info = next((n, i) for n, i in source.tensors.items() if i.nbytes > 1000)
    source.read(name)
    try:
        data = bytearray((original / info.file.name).read_bytes())
        data[-1] ^= 1
        store.fs.pipe_file(f"{SRC}/{info.file.name}", bytes(data))
        with pytest.raises(StoreError, match="changed since it was opened"):
            source.read(name)
        with pytest.raises(StoreError, match="changed since it was opened"):
            source.check_unchanged()
    finally:
        store.put(original, SRC)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("gptq3", {}), pytest.param("quip2", {"finetune": "block"}, marks=pytest.mark.long)],
)
def test_calibrated_runs(
    store: ObjectStore,
    original: Path,
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    settings: dict[str, str],
) -> None:
    """They read what was packed again, be it sent or not; fine-tuning sends nothing before it has trained."""
    text = tmp_path / "words.txt"
    text.write_text(words(SAMPLES * CONTEXT))
    chosen = load_recipe(recipe)
    ground = calibration(text, **settings)
    pack(original, tmp_path / "local", None, chosen, ground)
    if recipe == "gptq3":
        whole = PackedWriter.write
        monkeypatch.setattr(PackedWriter, "write", lambda self, *a: _stop_at(self, 40) or whole(self, *a))
        with pytest.raises(PlugPulled):
            pack(SRC, DST, scratch, chosen, ground)
        monkeypatch.setattr(PackedWriter, "write", whole)
    pack(SRC, DST, scratch, chosen, ground)
    assert sent(store, tmp_path / "got") == digests(tmp_path / "local")


def _stop_at(writer: PackedWriter, count: int) -> None:
    if len(writer.done) >= count:
        raise PlugPulled


def test_with_workers(store: ObjectStore, finished: dict[str, str], scratch: Path, tmp_path: Path) -> None:
    """They read the source by themselves and see nothing of this machine; what they make comes back to it."""
    options = Options(workers=FakeWorkers(3), scratch=scratch)
    compress(SRC, DST, RECIPE, options=options)
    assert sent(store, tmp_path / "got") == finished


def test_a_destination_that_holds_something_else(store: ObjectStore, scratch: Path) -> None:
    store.fs.pipe_file(f"{DST}/notes.txt", b"mine")
    with pytest.raises(
        DestinationError, match="packed: is not empty and holds no unfinished run; choose another"
    ):
        pack(SRC, DST, scratch)
    assert store.names(DST) == ["notes.txt"]


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (f"{BUCKET}/nowhere", DST, "bucket/nowhere: nothing is there; check the name"),
        ("s3://no-such-bucket/model", DST, "no-such-bucket/model: nothing is there"),
        ("ftp://host/model", DST, "ftp://: no kind of URL that is read here; expected s3://, gs://, hf://"),
        (SRC, "s3://no-such-bucket/model", "no-such-bucket/.*: not there"),
    ],
)
def test_what_is_not_there(store: ObjectStore, scratch: Path, src: str, dst: str, message: str) -> None:
    with pytest.raises(TrilobiteError, match=message) as e:
        pack(src, dst, scratch)
    assert "\n" not in str(e.value)


def test_a_package_that_is_missing(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)  # other tests have used it
    with pytest.raises(
        MissingExtraError, match=r"gs:// needs gcsfs: pip install gcsfs, or 'trilobite\[remote\]'"
    ):
        open_source("gs://bucket/model", remote=True)
