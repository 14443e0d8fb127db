"""Two builds of the native library in turns."""

import json
import sys

import pytest

from benchmarks.speed import libraries
from trilobite.kernels.cpu import engine, native


@pytest.mark.long
@pytest.mark.skipif(not engine.available(), reason="the native library is not installed")
def test_a_library_beside_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its results are its own, and take about as long."""
    path = native.load()[1].removeprefix("loaded ")
    options = "--shapes qwen3 --tokens 2 --pairs 1 --rounds 3"
    monkeypatch.setattr(sys, "argv", ["libraries", path, path, *options.split()])
    libraries.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["mode"] for row in rows] == list(libraries.MODES)
    for row in rows:
        assert row["same"]
        assert 0.2 < row["ratio"] < 5


@pytest.mark.parametrize(
    ("paths", "line"), [(["one.so"], "two libraries"), (["one.so", "two.so"], "one.so: no such file")]
)
def test_what_is_no_pair_of_libraries_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], paths: list[str], line: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["libraries", *paths])
    with pytest.raises(SystemExit):
        libraries.main()
    assert line in capsys.readouterr().err
