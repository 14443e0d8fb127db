"""A packed model made deeper: which layer's weights each of its layers has."""

from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint

from benchmarks.lib.deeper import deepen
from trilobite.checkpoint.layout import ALIGN
from trilobite.checkpoint.packed import read_report
from trilobite.checkpoint.source import open_source
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_layers_over_and_over(kind: str, tmp_path: Path) -> None:
    source, packed, deep = (tmp_path / name for name in ("source", "packed", "deep"))
    build_checkpoint(kind, source, changes={"num_key_value_heads": 1, "head_dim": 8})  # half a tile
    compress(str(source), packed, load_recipe("rtn3"))
    few = load(str(packed)).eval()
    count = few.config.num_hidden_layers
    assert count > 1
    deepen(packed, deep, 2 * count + 1)
    many = load(str(deep)).eval()
    assert len(many.model.layers) == 2 * count + 1
    for i, layer in enumerate(many.model.layers):
        expected = few.model.layers[i % count].state_dict()
        found = layer.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], t) for name, t in expected.items())
    others = [{k: v for k, v in m.state_dict().items() if ".layers." not in k} for m in (few, many)]
    assert all(torch.equal(others[1][name], t) for name, t in others[0].items())
    assert not torch.equal(*(m(torch.tensor([[3, 4, 5]])).logits for m in (few, many)))
    found, made = (open_source(folder) for folder in (packed, deep))
    assert found.rows
    last = 2 * count
    assert {
        n.replace(f".{last}.", ".0.", 1): r for n, r in (made.rows or {}).items() if f".{last}." in n[:20]
    } == {n: r for n, r in (found.rows or {}).items() if ".0." in n[:20]}
    assert all(
        min(t.offset for t in made.tensors.values() if t.file == file) % ALIGN == 0 for file in made.files
    )
    names = [row["name"] for row in read_report(deep)["tensors"]]
    assert len(set(names)) == len(names)
    assert any(f".layers.{2 * count}." in name for name in names)
