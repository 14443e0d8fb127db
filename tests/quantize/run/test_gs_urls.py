"""gs:// as s3:// in test_urls.py: what Google's client does otherwise."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from support.gcs_store import BUCKET, GoogleStore, google_store, point_at
from support.object_store import now_and_then
from support.runs import PlugPulled, digests

pytest.importorskip("gcsfs", reason="needs gcsfs: pip install 'trilobite[remote]'")
pytest.importorskip("gcp_storage_emulator", reason="needs a store: pip install gcp-storage-emulator")

from trilobite.checkpoint.packed import PackedWriter
from trilobite.checkpoint.remote import upload
from trilobite.checkpoint.source import open_source
from trilobite.checkpoint.verify import check_intact
from trilobite.errors import StoreError
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe

SRC, DST = f"{BUCKET}/original", f"{BUCKET}/packed"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "original"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16, shard_size="150KB")
    return path


@pytest.fixture(scope="module")
def finished(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("local") / "packed"
    with pytest.MonkeyPatch.context() as patch:
        small_shards(patch)
        pack(original, path)
    return digests(path)


@pytest.fixture(scope="module")
def serving() -> Iterator[GoogleStore]:
    with google_store() as store:
        yield store


@pytest.fixture
def store(serving: GoogleStore, original: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleStore]:
    point_at(serving, monkeypatch)
    small_shards(monkeypatch)
    if not serving.names(SRC):
        serving.put(original, SRC)
    yield serving
    if serving.names(DST):
        serving.fs.rm(DST, recursive=True)
    serving.requests.clear()
    serving.faults.clear()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's client asks six times by itself, with pauses of up to 16 seconds."""
    import gcsfs.retry

    async def at_once(_: float) -> None:
        pass

    monkeypatch.setattr(gcsfs.retry.asyncio, "sleep", at_once)


def small_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PackedWriter.__init__, "__kwdefaults__", {"shard_bytes": 30_000})


def pack(src: Path | str, dst: Path | str, scratch: Path | None = None, jobs: int = 1) -> None:
    options = Options(jobs=jobs, device="cpu", scratch=scratch)
    compress(src, dst, load_recipe("rtn3"), options=options)


def test_the_bytes_of_a_local_run(store: GoogleStore, finished: dict[str, str], tmp_path: Path) -> None:
    """Read by ranges, sent in shards, found whole by `verify`."""
    pack(SRC, DST, tmp_path / "scratch", jobs=2)
    assert digests(store.get(DST, tmp_path / "got")) == finished
    assert list((tmp_path / "scratch").iterdir()) == []
    reads = [r for r in store.of("GET", "model-") if "original" in r.path and "alt=media" in r.path]
    assert len(reads) > 30
    assert all(r.range for r in reads)
    check_intact(open_source(DST, remote=True))


def test_faults_change_nothing(
    store: GoogleStore, impatient: None, finished: dict[str, str], tmp_path: Path
) -> None:
    with store.failing(now_and_then(0.2, "500", "short", "cut", "flip")):
        pack(SRC, DST, tmp_path / "scratch", jobs=2)
    assert {"500", "short", "cut", "flip"} <= set(store.faults)
    assert digests(store.get(DST, tmp_path / "got")) == finished


def test_a_store_that_does_not_answer_in_time(
    store: GoogleStore, finished: dict[str, str], tmp_path: Path
) -> None:
    """Google's client would wait for ever."""
    count = itertools.count()
    with store.failing(lambda *_: "slow" if next(count) == 60 else ""):
        pack(SRC, DST, tmp_path / "scratch", jobs=2)
    assert store.faults == ["slow"]
    assert digests(store.get(DST, tmp_path / "got")) == finished


@pytest.mark.long
def test_a_killed_run_goes_on_elsewhere(
    store: GoogleStore, finished: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, count = upload.put, itertools.count()

    def stop(path: Path, url: str) -> None:
        if next(count) == 14:
            raise PlugPulled
        put(path, url)

    with monkeypatch.context() as patch:
        patch.setattr(upload, "put", stop)
        with pytest.raises(PlugPulled):
            pack(SRC, DST, tmp_path / "here")
    there = store.names(DST)
    assert "config.json" not in there
    whole = {name for name in there if f".partial/{name}.jsonl" in there}
    assert whole
    store.requests.clear()
    pack(SRC, DST, tmp_path / "there")
    assert digests(store.get(DST, tmp_path / "got")) == finished
    assert not [r for r in store.of("POST", "/upload/") if any(name in r.path for name in whole)]


def test_one_line_when_the_store_stays_away(
    store: GoogleStore, impatient: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Google's client would also log a traceback a trial."""
    store.faults.clear()
    with (
        store.failing(lambda method, path: "500" if "original" in path and "model-" in path else ""),
        pytest.raises(StoreError, match=r"original/model-\S+: failed 6 times in .*; nothing is lost: run"),
    ):
        pack(SRC, DST, tmp_path / "scratch")
    assert [record for record in caplog.records if record.name.startswith("gcsfs")] == []


def test_no_access_is_told_at_once(store: GoogleStore, tmp_path: Path) -> None:
    with (
        store.failing(lambda method, path: "403"),
        pytest.raises(
            StoreError, match=r"bucket/original: no access \(.*\); check the name and the cred"
        ) as e,
    ):
        pack(SRC, DST, tmp_path / "scratch")
    assert "\n" not in str(e.value)
    assert len(store.faults) == 1


def test_an_original_that_changes_meanwhile(store: GoogleStore, original: Path) -> None:
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
