"""Which tiles are the fastest on this GPU: the search of `trilobite bench --tune`, whose table `tuning` keeps."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from trilobite.errors import DeviceError
from trilobite.kernels.gpu import tuning
from trilobite.kernels.gpu.layout.pack import repack
from trilobite.kernels.gpu.tuning import Table, Tile
from trilobite.measure.ahead import compile_all, cores, noting
from trilobite.measure.gpu import (
    FAILURES,
    ROUTINGS,
    copies,
    expert_calls,
    linear_calls,
    random_layer,
    random_weight,
    seconds,
)
from trilobite.measure.shapes import DEEPSEEK, MIXTRAL, ExpertsShape
from trilobite.recipe import AnyFormat, Format, parse_format

Calls = Sequence[Callable[[], object]]

NARROW = (
    (32, 4, 4, 3),
    (64, 4, 4, 3),
    (64, 2, 4, 3),
    (64, 2, 2, 4),
    (64, 1, 2, 4),
    (32, 2, 2, 4),
    (32, 1, 1, 4),
)
FACTORED = {8: NARROW, 16: NARROW, 32: ((64, 2, 4, 3), (64, 1, 2, 3), (64, 1, 4, 3))}
"""Tiles by slots: rows, chunks, warps, stages. Those that came first for some rows on an H200, and next to them."""
SCALED = {
    32: ((64, 4, 4), (128, 8, 3)),
    64: ((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3)),
    128: ((64, 4, 3), (128, 8, 3), (128, 8, 4)),
}
"""The same, of one chunk: rows, warps, stages."""
LATTICE = {
    8: ((64, 1, 2, 3), (128, 1, 4, 3), (64, 2, 2, 2), (32, 2, 2, 3)),
    16: ((64, 2, 4, 2), (64, 2, 2, 2), (128, 1, 4, 3), (32, 4, 4, 1)),
    32: ((64, 2, 4, 2), (64, 1, 2, 2), (64, 1, 4, 3)),
    64: ((128, 1, 4, 2), (64, 1, 4, 3), (128, 1, 8, 3)),
}
"""Those of lattice formats, as FACTORED."""
LINEAR_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
EXPERT_ROWS = (1, 4, 8, 16, 24, 32, 64, 256)
LATTICE_ROWS = (1, 4, 8, 16, 32, 64)
"""Rows for which tiles are searched, an expert's or a linear layer's."""


def tune(device: torch.device, report: Callable[[str], None]) -> None:
    """Find the fastest tiles for this GPU, on layers of Mixtral and DeepSeek-MoE: INT3 g64, and E8P of 2 and 3 bits.

    Each operation's go into the user's file as soon as they are found. Raises DeviceError without a GPU.
    """
    if device.type != "cuda":
        raise DeviceError(
            "tuning measures on a GPU, and there is none; the tables of the package stay in use"
        )
    fmt = Format(bits=3, group=64)
    matrices = [
        copies(repack([[random_weight(n, n, fmt, device=device)]]), ROUTINGS)
        for n in (MIXTRAL.hidden, DEEPSEEK.hidden)
    ]

    def experts_in(*formats: AnyFormat) -> Callable[[int], list[Calls]]:
        layers = [(la, random_layer(la, f, device)) for f in formats for la in (MIXTRAL, DEEPSEEK)]
        return lambda each: [expert_calls(la, pack, _tokens(la, each)) for la, pack in layers]

    def linear_at(each: int) -> list[Calls]:
        return [linear_calls(packs, each) for packs in matrices]

    table: Table = {}
    experts_at, rotated_at = experts_in(fmt), experts_in(parse_format("e8p-2"), parse_format("e8p-3"))
    for operation, sizes, calls_at in (
        ("linear", LINEAR_ROWS, linear_at),
        ("gate_up", EXPERT_ROWS, experts_at),
        ("down", EXPERT_ROWS, experts_at),
        ("lattice", LATTICE_ROWS, rotated_at),
    ):
        tried = {each: _tried(operation, each, table) for each in sizes}
        _compile(((calls_at(each), tiles) for each, tiles in tried.items()), report)
        fastest = []
        for each, tiles in tried.items():
            best, took = _fastest(operation, calls_at(each), tiles)
            fastest.append(replace(best, tokens=(1 << 30) if each == sizes[-1] else each))
            report(f"{operation}, {each} rows: {' '.join(f'{t * 1e6:.1f}' for t in took)} us with {best}")
        table[operation] = tuple(fastest)
        tuning.remember(torch.cuda.get_device_name(device), table)


def _tokens(layer: ExpertsShape, each: int) -> int:
    """Tokens of which every expert gets so many; of 1, one token, which has an expert to itself."""
    return 1 if each == 1 else max(2, each * layer.experts // layer.active)


Forced = dict[str, Tile]
"""Tiles to be used whatever the tables say, by operation."""


def _tried(operation: str, each: int, table: Table) -> list[Forced]:
    """What is tried for so many rows; down projections share their slots a tile with the gate_up tile chosen before."""
    tiles = candidates(operation, each)
    if operation != "down":
        return [{operation: tile} for tile in tiles]
    gate_up = next(t for t in table["gate_up"] if each <= t.tokens)
    down = dict.fromkeys(tuning.fitted(t, gate_up.block_m) for t in tiles)
    return [{"gate_up": gate_up, "down": tile} for tile in down]


def candidates(operation: str, each: int) -> list[Tile]:
    """Tiles whose slots are neither many times so many rows nor much fewer."""
    factored, scaled = (LATTICE, {}) if operation == "lattice" else (FACTORED, SCALED)
    found = [
        Tile(tokens=1 << 30, form="factored", block_n=n, block_m=m, chunks=c, warps=w, stages=s)
        for m, tiles in factored.items()
        for n, c, w, s in tiles
    ]
    found += [
        Tile(tokens=1 << 30, form="scaled", block_n=n, block_m=m, warps=w, stages=s)
        for m, tiles in scaled.items()
        for n, w, s in tiles
    ]
    most = max(t.block_m for t in found)
    return [t for t in found if min(each, most) / 2 <= t.block_m <= max(8, 4 * each)]


def _compile(work: Iterable[tuple[list[Calls], list[Forced]]], report: Callable[[str], None]) -> None:
    """Compile what these calls launch under these tiles, on all cores: one by one it would take many minutes."""
    started, capability = time.perf_counter(), torch.cuda.get_device_capability()
    with noting() as wanted:
        for groups, tried in work:
            for forced in tried:
                with tuning.forcing(forced):
                    for calls in groups:
                        calls[0]()
    failed = list[str]()
    count = compile_all(list(wanted), 10 * capability[0] + capability[1], cores(), failed.append)
    report(f"{count} of {len(wanted)} kernels compiled in {time.perf_counter() - started:.0f} s")


def _fastest(operation: str, groups: list[Calls], tried: list[Forced]) -> tuple[Tile, list[float]]:
    """The tile that comes closest to the best of every group, on average, and the seconds of each group with it."""
    timed = []
    for forced in tried:
        with suppress(*FAILURES), tuning.forcing(forced):  # more shared memory than this GPU has
            timed.append(([seconds(calls, 10) for calls in groups], forced[operation]))
    if not timed:
        raise DeviceError(
            f"{operation}: none of {len(tried)} tiles runs on this GPU; the tables of the package stay in use"
        )
    least = [min(times) for times in zip(*(times for times, _ in timed), strict=True)]
    took, best = min(timed, key=lambda pair: sum(t / b for t, b in zip(pair[0], least, strict=True)))
    return best, took
