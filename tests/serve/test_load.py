"""Many clients at once, some of whom hang up and some of whom send nonsense: a short form of `make load`."""

import asyncio
from pathlib import Path

from tools.load_server import Load, expected_texts
from tools.serving import model_in_float32, serving


def test_everybody_else_is_answered_right(tmp_path: Path) -> None:
    model = model_in_float32(tmp_path / "model")
    expected = expected_texts(model)
    with serving(model, "--slots", 4) as server:
        report = asyncio.run(Load(server, expected, 60).run(12))
    assert report.wrong == []
    assert report.left == 0
    assert report.outcomes["right"] > 30
    assert report.outcomes["aborted"] > 3
    assert report.outcomes["refused"] > 0
