"""URLs at the command line: what takes them, and what says why it does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Run
from support.object_store import BUCKET, ObjectStore, object_store, point_at

pytest.importorskip("s3fs", reason="needs s3fs: pip install 'trilobite[remote]'")
pytest.importorskip("moto.server", reason="needs moto's server: pip install 'moto[s3]' flask flask-cors")

SRC, PACKED, DST = f"{BUCKET}/original", f"{BUCKET}/packed", f"{BUCKET}/new"


@pytest.fixture(scope="module")
def serving(original: Path, packed: Path) -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(serving: ObjectStore, original: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    point_at(serving, monkeypatch)
    if not serving.names(BUCKET):
        serving.put(original, SRC)
        serving.put(packed, PACKED)
    serving.requests.clear()
    return serving


def test_compress(run: Run, store: ObjectStore, packed: Path, tmp_path: Path) -> None:
    found = run("compress", SRC, DST, "-r", "rtn3", "--scratch", tmp_path, "--json").json
    assert found["destination"] == DST
    assert found["bytes_on_disk"] == sum(info["size"] for info in store.fs.ls(DST, detail=True))
    assert store.names(DST) == sorted(p.name for p in packed.iterdir())
    again = run("compress", SRC, DST, "-r", "rtn3", "--scratch", tmp_path)
    assert "already complete" in again.err
    assert f"{DST}, recipe rtn3" in again.out


@pytest.mark.parametrize("command", [("plan", "-r", "rtn3"), ("inspect",)])
def test_what_is_shown_of_an_original(
    run: Run, store: ObjectStore, original: Path, command: tuple[str, ...]
) -> None:
    local, there = (run(*command, path, "--json").json for path in (original, SRC))
    assert there.pop("path", SRC) == SRC
    local.pop("path", None)
    assert there == local
    if command[0] == "plan":
        weights = sum(p.stat().st_size for p in original.glob("*.safetensors"))
        assert sum(r.nbytes for r in store.of("GET", ".safetensors")) < weights / 10


def test_what_is_shown_of_a_packed_one(run: Run, store: ObjectStore, packed: Path) -> None:
    local, there = (run("inspect", path, "--json").json for path in (packed, PACKED))
    assert there.pop("path") == PACKED
    del local["path"]
    assert there == local


def test_verify(run: Run, store: ObjectStore) -> None:
    found = run("verify", PACKED)
    assert found.out.startswith(f"{PACKED}: all ")
    name = next(n for n in store.names(PACKED) if n.endswith(".safetensors"))
    data = bytearray(store.fs.cat_file(f"{PACKED}/{name}"))
    try:
        store.fs.pipe_file(f"{PACKED}/{name}", bytes(data[:-1]) + bytes([data[-1] ^ 1]))
        found = run("verify", PACKED)
    finally:
        store.fs.pipe_file(f"{PACKED}/{name}", bytes(data))
    assert found.status == 1
    assert "is not as it was written" in found.err


@pytest.mark.parametrize(
    "command",
    [
        ("chat", PACKED),
        ("generate", PACKED, "hello"),
        ("serve", PACKED),
        ("eval", PACKED, "--text", "TEXT"),
        ("stats", SRC, "--text", "TEXT", "-o", "OUT"),
        ("trace", PACKED, "--text", "TEXT", "-o", "OUT"),
        ("report", PACKED, "-o", "OUT"),
    ],
    ids=lambda c: c[0],
)
def test_commands_that_need_files_say_so(
    run: Run, store: ObjectStore, tmp_path: Path, command: tuple[str, ...]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 100)
    found = run(*({"TEXT": text, "OUT": tmp_path / "out"}.get(part, part) for part in command))
    assert (found.status, found.out) == (1, "")
    (line,) = found.err.splitlines()
    assert (
        "a URL, and this needs the files on this machine; copy it first: aws s3 cp --recursive s3://" in line
    )


def test_scratch_goes_with_a_url(run: Run, store: ObjectStore, original: Path, tmp_path: Path) -> None:
    found = run("compress", original, tmp_path / "dst", "-r", "rtn3", "--scratch", tmp_path)
    assert found.status == 2
    assert "--scratch" in found.err
    found = run("compress", SRC, DST, "-r", "rtn3", "--revision", "main")
    assert found.status == 1
    assert "--revision goes with a hub id" in found.err
