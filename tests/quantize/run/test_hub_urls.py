"""Compressing from hf:// without a copy of the model: huggingface_hub's range reads, of one commit."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from support.architectures import build_checkpoint
from support.calibrating import add_tokenizer
from support.hub import COMMIT, MODEL, Hub, hub
from support.runs import digests

from trilobite.checkpoint.remote import store as remote
from trilobite.checkpoint.source import open_source
from trilobite.errors import CheckpointError, StoreError
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    path = tmp_path / "original"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16, shard_size="150KB")
    add_tokenizer(path)
    with hub(path) as found:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": found.endpoint})
        monkeypatch.setattr(remote, "PAUSE", 0.01)
        monkeypatch.setattr("time.sleep", lambda _: None)  # the hub's own pauses, of seconds
        remote._filesystem.cache_clear()
        yield found
    remote._filesystem.cache_clear()


def test_a_model_of_the_hub(served: Hub, tmp_path: Path) -> None:
    """Named by its id, as if it had been downloaded; read tensor by tensor, at one commit; faults are ridden out."""
    count = iter(range(10_000))
    served.fault = lambda path: "resolve" in path and next(count) % 5 == 0
    options = Options(jobs=2, device="cpu")
    compress(f"hf://{MODEL}", tmp_path / "packed", load_recipe("rtn3"), options=options)
    reads = [(path, span) for path, span in served.requests if "/resolve/" in path]
    assert all(f"/{COMMIT}/" in path and span for path, span in reads)
    assert len([path for path, _ in reads if path.endswith(".safetensors")]) > 30

    snapshot = tmp_path / "models--org--original" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    served.folder.rename(snapshot)
    compress(snapshot, tmp_path / "local", load_recipe("rtn3"), options=options)
    assert digests(tmp_path / "packed") == digests(tmp_path / "local")


def test_what_the_hub_has_not(served: Hub) -> None:
    with pytest.raises(StoreError, match="hf://org/nothing: not there"):
        open_source("hf://org/nothing", remote=True)
    with pytest.raises(CheckpointError, match=r"a URL; --revision goes with a hub id: write hf://NAME@main"):
        open_source(f"hf://{MODEL}", revision="main", remote=True)
    with pytest.raises(
        CheckpointError, match=rf"hf://{MODEL}: a URL, .*; pass the hub id, {MODEL}, which is"
    ):
        open_source(f"hf://{MODEL}")
