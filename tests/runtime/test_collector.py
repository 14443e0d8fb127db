"""The garbage collector rests while a model is built, and then does what it did."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from trilobite.errors import TrilobiteError
from trilobite.runtime import load as loading
from trilobite.runtime.collector import without_collecting
from trilobite.runtime.load import load


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    collects = gc.isenabled()
    yield
    (gc.enable if collects else gc.disable)()


@pytest.mark.parametrize("collects", [True, False])
def test_as_before(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    begun: list[str] = []

    def watch(phase: str, _: object) -> None:
        begun.append(phase)

    gc.callbacks.append(watch)
    try:
        with without_collecting():
            assert not gc.isenabled()
            assert not begun
        assert begun == (["start", "stop"] if collects else [])
    finally:
        gc.callbacks.remove(watch)
    assert gc.isenabled() == collects


def test_rests_while_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    collected, build = [], loading._from_tensors

    def look(*args: Any) -> Any:
        collected.append(gc.isenabled())
        return build(*args)

    monkeypatch.setattr(loading, "_from_tensors", look)
    load(ROOT / "examples/tiny-moe")
    assert collected == [False]
    assert gc.isenabled()


def test_works_again_after_an_error(tmp_path: Path) -> None:
    gc.enable()
    with pytest.raises(TrilobiteError):
        load(tmp_path)
    assert gc.isenabled()
