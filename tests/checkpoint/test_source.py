import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.paths import SHARED

from trilobite.checkpoint.source import INDEX, Source, open_source
from trilobite.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def folder(path: Path, *, config: str = '{"model_type": "llama"}') -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    return path


def checkpoint(path: Path, **tensors: torch.Tensor) -> Path:
    tensors = tensors or {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5.0)}
    save_file(tensors, folder(path) / "model.safetensors")
    return path


def sharded(path: Path) -> Path:
    shards = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
    folder(path)
    for shard, name in shards.items():
        save_file({name: torch.full((2, 2), float(ord(name)))}, path / shard)
    (path / INDEX).write_text(json.dumps({"weight_map": {name: shard for shard, name in shards.items()}}))
    return path


def raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file written by hand: `header` as JSON, or as the bytes that it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size = len(text) if length is None else length
    (folder(path) / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + data)
    return path


def entry(start: int, stop: int, shape: list[Any], dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", DTYPES)
def test_read_gives_the_stored_bits_in_every_dtype(tmp_path: Path, name: str) -> None:
    bits = torch.randint(0, 256, (3 * 5 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if name == "BOOL":
        bits = bits % 2
    stored = bits.view(DTYPES[name]).reshape(3, -1)
    # The one-byte tensor in front puts the next one at an odd place in the file.
    source = open_source(str(checkpoint(tmp_path, a=torch.ones(1, dtype=torch.uint8), w=stored)))
    assert source.tensors["w"].dtype == name
    assert same_bits(source.read("w"), stored)
    assert same_bits(source.read_part("w", 1, 3), stored[1:3])
    assert source.read_part("w", 1, 1).shape == (0, *stored.shape[1:])


def test_read_of_unaligned_data(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.float32)
    header = {"odd": entry(0, 1, [1]), "w": entry(1, 25, [2, 3], "F32")}
    source = open_source(str(raw(tmp_path, header, b"\x07" + values.numpy().tobytes())))
    assert torch.equal(source.read("w"), values.reshape(2, 3))
    assert torch.equal(source.read_part("w", 1, 2), values[3:].reshape(1, 3))
    assert source.tensors["w"].offset % 4 == 1, "or the test shows nothing"
    assert source.read("w").data_ptr() % 4 == 0
    assert source.read_part("w", 1, 2).data_ptr() % 4 == 0


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    source = open_source(str(checkpoint(tmp_path, s=torch.tensor(3.5), e=torch.empty(0, 4))))
    assert source.read("s").shape == ()
    assert source.read("s").item() == 3.5
    assert source.read("e").shape == (0, 4)
    assert source.read_part("e", 0, 0).shape == (0, 4)


def test_writing_to_a_read_tensor_never_changes_the_file(tmp_path: Path) -> None:
    source = open_source(str(checkpoint(tmp_path)))
    source.read("a.weight").zero_()
    assert torch.equal(source.read("a.weight"), torch.arange(12.0).reshape(3, 4))


def mapped(path: Path) -> int:
    """Mappings of a file that this process has now."""
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_memory_is_one_tensor_and_is_released(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, **{f"t{i}": torch.zeros(1024, 1024) for i in range(4)}) / "model.safetensors"
    source = open_source(str(tmp_path))
    assert mapped(path) == 0
    w = source.read("t1")
    assert mapped(path) == 1
    first, last = next(
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(path) in line
    )
    assert int(last, 16) - int(first, 16) <= 4 * 2**20 + 2 * 4096
    del w
    for name in source.tensors:
        assert source.read(name).sum() == 0
    assert mapped(path) == 0


def test_sharded_checkpoint(tmp_path: Path) -> None:
    source = open_source(str(sharded(tmp_path)))
    assert sorted(source.tensors) == ["a", "b"]
    assert source.tensors["b"].file.name == "model-00002-of-00002.safetensors"
    assert source.read("b").unique().item() == ord("b")


def test_shards_without_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert sorted(open_source(str(tmp_path)).tensors) == ["a", "b"]
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: missing beside"):
        open_source(str(tmp_path))


def test_only_the_files_of_the_index_belong(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert open_source(str(tmp_path)).read("a").shape == (2, 2)


# --- broken checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [1, 118])
def test_truncated_file(tmp_path: Path, missing: int) -> None:
    path = checkpoint(tmp_path, w=torch.zeros(64, 64)) / "model.safetensors"
    os.truncate(path, path.stat().st_size - missing)
    with pytest.raises(
        CheckpointError, match=f"model.safetensors: {missing} bytes shorter than its header says; "
    ):
        open_source(str(tmp_path))


def test_extended_file(tmp_path: Path) -> None:
    path = checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"xyz")
    with pytest.raises(CheckpointError, match="3 bytes longer than its header says"):
        open_source(str(tmp_path))


GARBAGE: dict[str, tuple[Any, bytes, int | None, str]] = {
    "no file": (b"", b"", 50, "50 bytes too short for its own header"),
    "huge header": (b"hello", b"", 2**60, "not a safetensors file"),
    "not json": (b"{{{{", b"", None, "header is garbage"),
    "not utf-8": (b"\xff\xfe\xfd", b"", None, "header is garbage"),
    "deep json": (b"[" * 200_000, b"", None, "header is garbage"),
    "a list": ([1], b"", None, "header is garbage"),
    "entry is no mapping": ({"w": 3}, b"", None, "tensor 'w': no dtype"),
    "no shape": (
        {"w": {"dtype": "U8", "data_offsets": [0, 1]}},
        b"x",
        None,
        "tensor 'w': impossible shape None",
    ),
    "negative shape": ({"w": entry(0, 1, [-1])}, b"x", None, "impossible shape"),
    "true in shape": ({"w": entry(0, 1, [True])}, b"x", None, "impossible shape"),
    "reversed offsets": ({"w": entry(1, 0, [1])}, b"x", None, "needs 1 bytes"),
    "offsets do not fit shape": ({"w": entry(0, 3, [2])}, b"xyz", None, "needs 2 bytes"),
    "unknown dtype": ({"w": entry(0, 1, [1], "F4")}, b"x", None, "dtype F4; this release reads F64"),
    "name is no text": ({"\ud800": entry(0, 1, [1])}, b"x", None, "garbage .*surrogates"),
    "dtype is a list": ({"w": entry(0, 1, [1], ["U8"])}, b"x", None, "dtype"),
    "beyond the end": ({"w": entry(0, 9, [9])}, b"x", None, "8 bytes shorter"),
    "overlap": ({"v": entry(0, 4, [4]), "w": entry(2, 6, [4])}, b"abcdef", None, "'w' starts at .*overlap"),
    "hole": ({"v": entry(0, 2, [2]), "w": entry(4, 6, [2])}, b"abcdef", None, "'w' starts at .*hole"),
    "twice": (
        b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        None,
        "'w' occurs twice",
    ),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_in_a_header(tmp_path: Path, case: str) -> None:
    header, data, length, message = GARBAGE[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        open_source(str(raw(tmp_path, header, data, length=length)))
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_a_disk_that_fails(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").symlink_to(
        "/proc/self/mem"
    )  # nothing is mapped at its beginning
    with pytest.raises(CheckpointError, match=r"cannot be read \(Input/output error\)"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("size", [0, 7])
def test_file_shorter_than_a_header_size(tmp_path: Path, size: int) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match=f"{size} bytes long; the copy is incomplete"):
        open_source(str(tmp_path))


def test_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (folder(tmp_path) / "model.safetensors").write_bytes(pointer)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_source(str(tmp_path))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_source(str(tmp_path))
    path.write_bytes(whole)
    assert len(open_source(str(tmp_path)).tensors) == 2


def test_missing_shard(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=f"model-00002-of-00002.safetensors: listed in {INDEX} but missing"
    ):
        open_source(str(tmp_path))


def test_tensor_of_the_index_missing_from_its_shard(tmp_path: Path) -> None:
    index = json.loads((sharded(tmp_path) / INDEX).read_text())
    index["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: tensor 'c' is missing"):
        open_source(str(tmp_path))


def test_same_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    both = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}
    save_file(both, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a' is also in model-00001-of-00002\.safetensors"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_index_pointing_outside(tmp_path: Path, shard: str) -> None:
    (folder(tmp_path) / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="expected a file name"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_garbage_index(tmp_path: Path, index: str) -> None:
    (sharded(tmp_path) / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=re.escape(INDEX)):
        open_source(str(tmp_path))


def test_pickles_are_refused_unopened(tmp_path: Path) -> None:
    (folder(tmp_path) / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model.bin\).*convert"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("config", ["", "{", "[1]", "\udcff"])
def test_garbage_config(tmp_path: Path, config: str) -> None:
    checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config.json"):
        open_source(str(tmp_path))


def test_no_config_no_weights_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        open_source(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
        open_source(str(folder(tmp_path)))
    with pytest.raises(CheckpointError, match="no such folder"):
        open_source(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="a file; expected the folder"):
        open_source(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("LocalEntryNotFoundError", "hub cannot be reached"),
        ("OfflineModeIsEnabled", "hub cannot be reached"),
        ("HFValidationError", "no such model on the hub"),
        ("HTTPError", r"the download failed \(first line second line\); run again"),
    ],
)
def test_hub_errors_become_one_line(monkeypatch: pytest.MonkeyPatch, error: str, message: str) -> None:
    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> str:
        raise getattr(huggingface_hub.errors, error)("first line\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=f"^nobody/nothing: .*{message}") as caught:
        open_source("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_hub_id_downloads_no_code_and_no_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        return str(checkpoint(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "a.weight" in open_source("some/model", revision="v2").tensors
    assert (asked["repo"], asked["revision"]) == ("some/model", "v2")
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja"]
    unwanted = [
        "modeling_x.py",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/model.safetensors",
    ]
    kept = filter_repo_objects(
        wanted + unwanted, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == wanted


# --- changes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["truncate", "touch", "delete"])
def test_file_changed_since_it_was_opened(tmp_path: Path, change: str) -> None:
    source = open_source(str(checkpoint(tmp_path)))
    path = tmp_path / "model.safetensors"
    if change == "truncate":
        os.truncate(path, 50)
    elif change == "touch":
        os.utime(path, ns=(0, 0))
    else:
        path.unlink()
    for read in (
        lambda: source.read("a.weight"),
        lambda: source.read_part("a.weight", 0, 1),
        source.fingerprint,
    ):
        with pytest.raises(CheckpointError, match="since it was opened"):
            read()


def test_unknown_tensor(tmp_path: Path) -> None:
    source = open_source(str(checkpoint(tmp_path)))
    with pytest.raises(CheckpointError, match="no tensor 'zzz'"):
        source.read("zzz")


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    a = open_source(str(checkpoint(tmp_path / "a"))).fingerprint()
    assert a == open_source(str(checkpoint(tmp_path / "b"))).fingerprint()
    assert re.fullmatch(r"[0-9a-f]{64}", a)


def test_fingerprint_notices_changes(tmp_path: Path) -> None:
    big = torch.zeros(1024, 1024)

    def fingerprint() -> str:
        return open_source(str(tmp_path)).fingerprint()

    seen = set()
    checkpoint(tmp_path, w=big)
    seen.add(fingerprint())
    folder(tmp_path, config='{"model_type": "other"}')
    seen.add(fingerprint())
    checkpoint(tmp_path, v=big)
    seen.add(fingerprint())
    checkpoint(tmp_path, w=big.reshape(512, 2048))
    seen.add(fingerprint())
    checkpoint(tmp_path, w=big.int())
    seen.add(fingerprint())
    for place in (0, 512 * 1024, -1):  # first, a middle and the last sampled slice
        changed = big.clone()
        changed.view(-1)[place:][: 1024 * 300] = 1
        checkpoint(tmp_path, w=changed)
        seen.add(fingerprint())
    assert len(seen) == 8


def test_companions(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    wanted = [
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "qwen.tiktoken",
        "tokenizer.model",
    ]
    unwanted = [INDEX, "modeling_x.py", "pytorch_model.bin", ".secret.json", "trilobite.json", "README.md"]
    for name in (*wanted, *unwanted):
        (tmp_path / name).write_text("{}")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / INDEX).unlink()
    assert [p.name for p in open_source(str(tmp_path)).companions()] == wanted


# --- real checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-mixtral-outliers", "tiny-deepseek"])
def test_real_checkpoint(name: str) -> None:
    path = SHARED / "models" / name
    if not path.is_dir():
        pytest.skip(f"{path} is not here")
    source: Source = open_source(str(path))
    total = 0
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, "pt") as f:
            for key in f.keys():  # noqa: SIM118  (not a dict)
                total += 1
                assert same_bits(source.read(key), f.get_tensor(key)), key
    assert total == len(source.tensors)
    assert {p.name for p in source.companions()} == {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
