"""What `compress --ray` prints of its nodes."""

from pathlib import Path

import pytest
from support.commands import Run
from support.workers import FakeWorkers

pytest.importorskip("ray", reason="Ray is not installed: pip install 'trilobite[ray]'")

from trilobite.cli import compress
from trilobite.integrations.ray import NodeRate


class TwoNodes(FakeWorkers):
    def __init__(self) -> None:
        super().__init__(2)
        self.nodes = {
            name: NodeRate(f"host {name}", began=1.0, ended=3.0, tensors=5, weights=weights)
            for name, weights in (("aaaaaa", 2_000_000), ("bbbbbb", 5_000_000))
        }


@pytest.fixture(autouse=True)
def _two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "chosen_workers", lambda address, count: TwoNodes())


def test_what_each_node_did(run: Run, original: Path, tmp_path: Path) -> None:
    found = run("compress", original, tmp_path / "packed", "-r", "rtn3", "--ray", "local", "--verbose")
    rows = [line.split() for line in found.out.splitlines() if line.startswith("host")]
    assert [(*row[:3], row[-1]) for row in rows] == [
        ("host", "aaaaaa", "5", "1.0"),
        ("host", "bbbbbb", "5", "2.5"),
    ]
    found = run("compress", original, tmp_path / "quiet", "-r", "rtn3", "--ray", "local")
    assert "host" not in found.out


def test_json_is_one_object(run: Run, original: Path, tmp_path: Path) -> None:
    found = run(
        "compress", original, tmp_path / "packed", "-r", "rtn3", "--ray", "local", "--verbose", "--json"
    )
    assert [(n["node"], n["weights_per_second"]) for n in found.json["nodes"]] == [
        ("host aaaaaa", 1_000_000),
        ("host bbbbbb", 2_500_000),
    ]
