"""stats and compress on pairs of sentences."""

import json
import sys
from pathlib import Path

import pytest
from support.translators import save

from trilobite import cli


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["trilobite", *line.split()])
    status: object = 0
    try:
        cli.main()
    except SystemExit as e:
        status = e.code or 0
    captured = capsys.readouterr()
    return int(str(status)), captured.out, captured.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "m")
    (tmp_path / "a").write_text("a cat\nthe dog\ntwo dogs run\n")
    (tmp_path / "b").write_text("eine katze\nder hund\nzwei hunde laufen\n")
    return tmp_path


def test_pairs_from_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    f = folder
    line = f"stats {f}/m --text {f}/a --target-text {f}/b -o {f}/s.json --json"
    status, out, err = run(monkeypatch, capsys, line)
    assert status == 0, err
    layers = json.loads(out)["layers"]
    assert list(layers) == ["encoder.1", "decoder.1", "decoder.3"]
    line = f"trace {f}/m --text {f}/a --target-text {f}/b -o {f}/t.npz --json"
    status, out, err = run(monkeypatch, capsys, line)
    assert status == 0, err
    assert json.loads(out)["layers"] == list(layers)
    status, out, err = run(monkeypatch, capsys, f"cache {f}/t.npz --pool")
    assert status == 0, err
    assert "a -> b" in out
    pairs = f"--calibration {f}/a --target-text {f}/b"
    line = f"compress {f}/m {f}/p -r gptq3 --rank frequency-2 --stats {f}/s.json {pairs} --json"
    status, out, err = run(monkeypatch, capsys, line)
    assert status == 0, err
    assert (f / "p" / "config.json").exists()


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("stats {f}/m --text {f}/a -o {f}/s.json", 1, "--target-text"),
        ("stats {f}/m --text {f}/a --target-text {f}/none -o {f}/s.json", 1, "cannot be read"),
        ("trace {f}/m --text {f}/a -o {f}/t.npz --context 8", 1, "--target-text"),
        ("trace {f}/m --text {f}/a --target-text {f}/b -o {f}/b", 1, "is the text itself"),
        ("compress {f}/m {f}/p -r gptq3 --calibration {f}/a", 1, "--target-text"),
        ("compress {f}/m {f}/p -r int8 --target-text {f}/b", 2, "--target-text goes with --calibration"),
        ("eval {f}/m --text {f}/a --context 8", 1, "--translation SOURCE TARGET"),
    ],
)
def test_what_is_missing_is_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    status: int,
    message: str,
) -> None:
    found, _, err = run(monkeypatch, capsys, line.format(f=folder))
    assert found == status
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert not (folder / "p").exists()
