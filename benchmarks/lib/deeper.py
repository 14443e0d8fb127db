"""A packed model as deep as the one whose layers it has: those of a few, over and over, each in bytes of its own.

    python -m benchmarks.lib.deeper PACKED OUT --layers 48

A whole Qwen3-30B-A3B takes 61 GB to make at random, and 13 to measure. Its layers are equally large, and a token
reads each once: where time is what is asked, copies of four that `trilobite compress` packed stand for all of them.
"""

import argparse
import json
import mmap
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
REPORT = "trilobite.json"
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def _layer(name: str) -> int | None:
    """Of a tensor; None outside of layers."""
    found = _LAYER.search(name)
    return int(found[0]) if found else None


def _named(name: str, layer: int) -> str:
    """What the tensor is called in another layer."""
    return _LAYER.sub(str(layer), name)


class _Shard:
    """A safetensors file, and where the bytes of each tensor begin and end in it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = 8 + int.from_bytes(self.bytes[:8], "little")
        header = json.loads(self.bytes[8:start])
        self.metadata: Mapping[str, str] = header.pop("__metadata__", {})
        self.tensors: dict[str, dict[str, Any]] = header
        self.start = start

    def read(self, name: str) -> bytes:
        """The tensor's bytes."""
        begin, end = self.tensors[name]["data_offsets"]
        return self.bytes[self.start + begin : self.start + end]


def _write_shard(path: Path, wanted: Mapping[str, tuple[_Shard, str]]) -> int:
    """wanted: under each name the tensor that it is a copy of. Returns bytes of tensors."""
    shards = [shard for shard, _ in wanted.values()]
    header: dict[str, Any] = {"__metadata__": dict(shards[0].metadata)}
    at = 0
    for name, (shard, old) in wanted.items():
        begin, end = shard.tensors[old]["data_offsets"]
        header[name] = {**shard.tensors[old], "data_offsets": [at, at + end - begin]}
        at += end - begin
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # as `trilobite compress` aligns what engines map
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shard, old in wanted.values():
            file.write(shard.read(old))
    return at


def _rows(rows: list[dict[str, Any]], names: Mapping[str, list[str]]) -> Iterator[dict[str, Any]]:
    """Rows of the report, one for each copy."""
    for row in rows:
        for name in names.get(row["name"], [row["name"]]):
            yield {**row, "name": name}


def deepen(packed: Path, out: Path, layers: int) -> None:
    """Write the folder `out`. packed: what `trilobite compress` wrote."""
    config = json.loads((packed / "config.json").read_text())
    few = config["num_hidden_layers"]
    config["num_hidden_layers"] = layers
    for key, value in config.items():  # what stands there once for each layer
        if isinstance(value, list) and len(value) == few:
            config[key] = [value[i % few] for i in range(layers)]
    index = json.loads((packed / INDEX).read_text())
    shards = {file: _Shard(packed / file) for file in set(index["weight_map"].values())}
    homes = {name: shards[file] for name, file in index["weight_map"].items()}
    parts = [{name: (home, name) for name, home in homes.items() if _layer(name) is None}]
    for layer in range(layers):
        same = [name for name in homes if _layer(name) == layer % few]
        parts.append({_named(name, layer): (homes[name], name) for name in same})
    out.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        total += _write_shard(out / file, part)
        weight_map |= dict.fromkeys(part, file)
    report = json.loads((packed / REPORT).read_text())
    copies = {
        row["name"]: [_named(row["name"], i) for i in range(_layer(row["name"]) or 0, layers, few)]
        for row in report["tensors"]
        if _layer(row["name"]) is not None
    }
    report["tensors"] = list(_rows(report["tensors"], copies))
    report["checksums"] = {}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (out / REPORT).write_text(json.dumps(report))
    if (packed / "generation_config.json").exists():
        shutil.copy(packed / "generation_config.json", out)


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
