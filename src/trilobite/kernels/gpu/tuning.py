"""Which tile for how many tokens: tables by GPU, in the package, extended by `trilobite bench --tune`.

A table maps an operation to tiles in order of `tokens`, the most rows of activations an expert (or the linear layer) may
have for a tile to be used; the last one serves any number. The most particular table that has the operation decides:
the user's file for this GPU's name, the package's for the name, for its architecture (sm_90), the default.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilobite.errors import TuningError
from trilobite.kernels.gpu.launch import OLD_TRITON

OPERATIONS = ("linear", "gate_up", "down", "rank", "lattice")
"""linear layers; gate and up projection of experts; their down projection; V x of a compensator; lattice formats of
any of these, factored always. `trilobite bench --tune` finds all but those of compensators."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one operation is cut into programs.

    tokens: it serves up to so many rows an expert    form: how it multiplies (`device.tile`): factored, scaled
    block_n, block_m: rows of W, at most 64 unless scaled or for lattice formats, and slots
    chunks: of 128 columns that a step of the loop takes at once, 1 if scaled
    splits: ranges of K that are summed apart, 0 = as many as fill the GPU    warps, stages: of Triton
    registers: a thread may use so many, 0 = as the assembler likes; it likes 128, and at times spills to keep to that
    """

    tokens: int
    form: str
    block_n: int
    block_m: int
    chunks: int = 1
    splits: int = 0
    warps: int = 4
    stages: int = 3
    registers: int = 0


WIDE = 8
"""Bits from which words are wide."""
THIRD, HALF = 168, 255
"""Registers of a thread with which three and two programs of four warps run on a processor."""
FORMS = ("factored", "scaled")


Table = dict[str, tuple[Tile, ...]]
_forced: dict[str, Tile] = {}
_pretended: tuple[str, ...] | None = None


def user_file() -> Path:
    """Where `trilobite bench --tune` writes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trilobite" / "tuning.json"


def _check(operation: str, tiles: tuple[Tile, ...]) -> None:
    """Raise ValueError for tiles that the kernels cannot have."""
    rules = {
        "tiles in order of tokens": bool(tiles)
        and [t.tokens for t in tiles] == sorted({t.tokens for t in tiles}),
        f"form one of {', '.join(FORMS)}": all(t.form in FORMS for t in tiles),
        "block_m of 8 or more": all(t.block_m >= 8 for t in tiles),  # slots fill a tensor core's side
        "factored for lattice formats": operation != "lattice" or all(t.form == "factored" for t in tiles),
        "one chunk at a time if scaled": all(t.chunks == 1 or t.form != "scaled" for t in tiles),
        "block_n of 16, 32, 64 or 128": all(t.block_n in (16, 32, 64, 128) for t in tiles),
        # A compensator's scales change every 64 rows.
        "block_n at most 64 unless scaled": all(
            t.block_n <= 64 or t.form == "scaled" or operation == "lattice" for t in tiles
        ),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"{operation}: expected {broken[0]}")


def parse(text: str, where: str) -> dict[str, Table]:
    """Tables by GPU from JSON. Raises TuningError when it is not one of ours."""
    try:
        data = json.loads(text)
        tables = {
            gpu: {op: tuple(Tile(**tile) for tile in tiles) for op, tiles in table.items()}
            for gpu, table in data.items()
        }
        for table in tables.values():
            for operation, tiles in table.items():
                _check(operation, tiles)
        return tables
    except (ValueError, TypeError, AttributeError) as e:
        raise TuningError(
            f"{where}: not a tuning table ({e}); delete it, `trilobite bench --tune` writes it anew"
        ) from e


def render(tables: dict[str, Table]) -> str:
    """Tables as JSON, a tile a line."""
    lines = []
    for gpu, table in sorted(tables.items()):
        operations = []
        for op, tiles in table.items():
            rows = ",\n".join(f"   {json.dumps(asdict(t))}" for t in tiles)
            operations.append(f'  "{op}": [\n{rows}\n  ]')
        lines.append(f" {json.dumps(gpu)}: {{\n" + ",\n".join(operations) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@lru_cache(maxsize=1)
def shipped() -> dict[str, Table]:
    """The package's tables."""
    name = "tuning.json"
    return parse(files("trilobite.kernels.gpu").joinpath(name).read_text(encoding="utf-8"), name)


@lru_cache(maxsize=1)
def user() -> dict[str, Table]:
    """The user's tables; empty without a file."""
    path = user_file()
    return parse(path.read_text(encoding="utf-8"), str(path)) if path.exists() else {}


def remember(gpu: str, fastest: Table) -> Path:
    """Put an operation's tiles for a GPU into the user's file."""
    tables = {**user(), gpu: {**user().get(gpu, {}), **fastest}}
    path = user_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render(tables), encoding="utf-8")
    temporary.replace(path)
    user.cache_clear()
    names_of.cache_clear()
    tiles_of.cache_clear()
    return path


@lru_cache(maxsize=16)
def names_of(device: torch.device) -> tuple[str, ...]:
    """Names under which tables for a device may stand, the most particular first."""
    if device.type != "cuda":
        return general()
    major, minor = torch.cuda.get_device_capability(device)
    return general(torch.cuda.get_device_name(device), f"sm_{major}{minor}", f"sm_{major}0")


def general(*names: str) -> tuple[str, ...]:
    """Names of a GPU's tables, and those of tables for any GPU after them."""
    if OLD_TRITON:  # tables of architectures are of what newer ones compile
        return (*(n for n in names if not n.startswith("sm_")), "Triton before 3.8", "default")
    return (*names, "default")


@lru_cache(maxsize=64)
def tiles_of(operation: str, names: tuple[str, ...]) -> tuple[tuple[Tile, ...], str]:
    """The tiles for an operation, and where they come from."""
    for name in names:
        for tables, where in ((user(), "user"), (shipped(), "package")):
            if operation in tables.get(name, {}):
                return tables[name][operation], f"{where}: {name}"
    raise AssertionError(f"no default tiles for {operation}")


def tile_for(operation: str, tokens: int, x: Tensor) -> Tile:
    """The tile for an operation on so many rows an expert, with activations of x's type on its device."""
    if operation in _forced:
        return _forced[operation]
    tiles, _ = tiles_of(operation, _pretended or names_of(x.device))
    tile = next((t for t in tiles if tokens <= t.tokens), tiles[-1])
    if x.dtype == torch.float32:
        # Tensor cores do not multiply fp32 exactly; without them larger tiles would spill.
        small = {"block_n": min(tile.block_n, 32), "block_m": min(tile.block_m, 16)}
        return replace(tile, form="factored", chunks=1, warps=4, stages=2, **small)
    return tile


def fitted(tile: Tile, block_m: int) -> Tile:
    """The tile for another number of slots."""
    return tile if tile.block_m == block_m else replace(tile, block_m=block_m)


def suited(tile: Tile, bits: int, step: int, rank_bits: int) -> Tile:
    """The tile for codes of so many bits, at most, of which at least `step` columns share a scale.

    Wide words take a stage less, so that shared memory suffices on GPUs with 99 KB. Groups of 32 have twice as many sums
    in flight: half the chunks, or more registers, which compensators (rank_bits > 0) of narrow words need too.
    """
    stages, chunks, registers = tile.stages, tile.chunks, tile.registers
    if bits >= WIDE:
        stages = max(1, stages - 1)
    if tile.form == "factored":
        if step <= 32 and tile.block_m > 8:
            chunks = max(1, chunks // 2)
        elif step <= 32 or (rank_bits and OLD_TRITON):
            registers = max(registers, HALF)
        elif rank_bits and bits < WIDE:
            registers = max(registers, THIRD if tile.warps >= 4 else HALF)
    if (stages, chunks, registers) == (tile.stages, tile.chunks, tile.registers):
        return tile  # mostly so, and this runs before every launch
    return replace(tile, stages=stages, chunks=chunks, registers=registers)


@contextmanager
def pretending(names: tuple[str, ...]) -> Iterator[None]:
    """Use the tables that a GPU of these names would use: to compile for it without having it."""
    global _pretended
    _pretended = names
    try:
        yield
    finally:
        _pretended = None


@contextmanager
def forcing(tiles: dict[str, Tile]) -> Iterator[None]:
    """Use these tiles whatever the tables say: for tuning and tests."""
    before = dict(_forced)
    _forced.update(tiles)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def describe(device: torch.device) -> dict[str, Any]:
    """Where the tiles of every operation come from: for `trilobite doctor`."""
    return {op: tiles_of(op, names_of(device))[1] for op in OPERATIONS}
