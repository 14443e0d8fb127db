"""A packed model as deep as the one whose layers it has: those of a few, over and over, each in bytes of its own.

    python -m benchmarks.lib.deeper PACKED OUT --layers 48

A whole Qwen3-30B-A3B takes 61 GB to make at random, and 13 to measure. Its layers are equally large, and a token
reads each once: where time is what is asked, copies of four that `trilobite compress` packed stand for all of them.
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from benchmarks.lib.whole_models import leave_to_disk
from trilobite.checkpoint.folder import INDEX
from trilobite.checkpoint.layers import layer_number
from trilobite.checkpoint.layout import Shard, StoredTensor, Unit
from trilobite.checkpoint.packed import REPORT, read_report
from trilobite.checkpoint.source import Source, open_source


def _copies(names: Iterable[str], layer: int | None, few: int) -> dict[str, str]:
    """Of what layer `layer` has, or, None, of what is in no layer: under its name that of which it is a copy."""
    if layer is None:
        return {name: name for name in names if layer_number(name) is None}
    old = layer % few
    return {name.replace(f".{old}.", f".{layer}.", 1): name for name in names if layer_number(name) == old}


def _write_shard(path: Path, source: Source, names: Mapping[str, str], rows: Mapping[str, int]) -> int:
    """names: under each the tensor that it is a copy of    rows: as in the header. Returns bytes of tensors."""
    shard = Shard(path.name)
    for name, old in names.items():
        info = source.info(old)
        stored = StoredTensor(name=name, dtype=info.dtype, shape=info.shape)
        shard.units.append(Unit(name=name, tensors=(stored,), block=""))
    shard.units += [Unit(name=name, tensors=(), block="", rows=count) for name, count in rows.items()]
    with path.open("wb") as file:
        file.write(shard.header())
        for old in names.values():
            file.write(source.read(old).reshape(-1).view(torch.uint8).numpy().tobytes())
    return sum(unit.nbytes for unit in shard.units)


def deepen(packed: Path, out: Path, layers: int) -> None:
    """Write the folder `out`. packed: what `trilobite compress` wrote."""
    source, report = open_source(packed), read_report(packed)
    source_rows, described = source.rows or {}, {row["name"]: row for row in report["tensors"]}
    copies: list[dict[str, str]] = []
    config, few = dict(source.config), source.config["num_hidden_layers"]
    config["num_hidden_layers"] = layers
    for key, value in config.items():  # what stands there once for each layer
        if isinstance(value, list) and len(value) == few:
            config[key] = [value[i % few] for i in range(layers)]
    out.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, layer in enumerate((None, *range(layers)), 1):
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        names = _copies(source.tensors, layer, few)
        rows = {name: source_rows[old] for name, old in _copies(source_rows, layer, few).items()}
        total += _write_shard(out / file, source, names, rows)
        weight_map |= dict.fromkeys(names, file)
        copies.append(_copies(described, layer, few))
    report["tensors"] = [{**described[old], "name": name} for part in copies for name, old in part.items()]
    report["checksums"] = {}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (out / REPORT).write_text(json.dumps(report))
    if (packed / "generation_config.json").exists():
        shutil.copy(packed / "generation_config.json", out)
    leave_to_disk(out)


def main() -> None:
    """Parse, write."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("packed", type=Path)
    options.add_argument("out", type=Path)
    options.add_argument("--layers", type=int, required=True)
    args = options.parse_args()
    deepen(args.packed, args.out, args.layers)


if __name__ == "__main__":
    main()
