"""Which tiles are the fastest on this GPU: the search of `trilobite bench --tune`, whose table `tuning` keeps."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from trilobite.errors import DeviceError
from trilobite.kernels.gpu import tuning
from trilobite.kernels.gpu.layout.pack import repack
from trilobite.kernels.gpu.tuning import CANDIDATES, Table, Tile
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
from trilobite.measure.shapes import DEEPSEEK, MIXTRAL
from trilobite.recipe import Format

KINDS = ((8, ("small",)), (32, ("small", "medium")), (math.inf, ("medium", "large")))
"""The `CANDIDATES` that are tried for at most so many rows."""


def tune(device: torch.device, report: Callable[[str], None]) -> None:
    """Find the fastest tiles for this GPU: those of Mixtral's and DeepSeek-MoE's layers in INT3 g64, in sum.

    Each operation's go into the user's file as soon as they are found. Raises DeviceError without a GPU.
    """
    if device.type != "cuda":
        raise DeviceError(
            "tuning measures on a GPU, and there is none; the tables of the package stay in use"
        )
    fmt = Format(bits=3, group=64)
    layers = [(layer, random_layer(layer, fmt, device)) for layer in (MIXTRAL, DEEPSEEK)]
    matrix = copies(repack([[random_weight(4096, 4096, fmt, device=device)]]), ROUTINGS)
    table: Table = {}

    def experts_at(each: int) -> list[list[Callable[[], object]]]:
        tokens = [1 if each == 1 else max(2, each * la.experts // la.active) for la, _ in layers]
        return [expert_calls(la, pack, t) for (la, pack), t in zip(layers, tokens, strict=True)]

    def linear_at(each: int) -> list[list[Callable[[], object]]]:
        return [linear_calls(matrix, each)]

    for operation, sizes, calls_at in (
        ("linear", (1, 2, 4, 8, 16, 32, 64, 256), linear_at),
        ("gate_up", (1, 4, 16, 32, 128), experts_at),
        ("down", (1, 4, 16, 32, 128), experts_at),
    ):
        fastest = []
        for each in sizes:
            best, took = _fastest(operation, each, calls_at(each), _chosen_gate_up(table, each))
            fastest.append(replace(best, tokens=(1 << 30) if each == sizes[-1] else each))
            report(f"{operation}, {each} rows: {took * 1e6:.1f} us with {best}")
        table[operation] = tuple(fastest)
        tuning.remember(torch.cuda.get_device_name(device), table)


def _chosen_gate_up(table: Table, each: int) -> Tile | None:
    """The gate_up tile chosen before for so many rows: the down projection shares its slots a tile and its form."""
    tiles = table.get("gate_up", ())
    return next((t for t in tiles if each <= t.tokens), None)


def _fastest(
    operation: str, each: int, groups: list[list[Callable[[], object]]], gate_up: Tile | None
) -> tuple[Tile, float]:
    """The candidate with the least seconds, summed over the groups' medians, and these. each: rows of an expert."""
    kinds = next(kinds for most, kinds in KINDS if each <= most)
    tiles = [t for kind in kinds for t in CANDIDATES[kind]]
    if operation == "down" and gate_up is not None:
        tiles = list(dict.fromkeys(tuning.fitted(t, gate_up.block_m) for t in tiles))
    timed = []
    for tile in tiles:
        forced = {operation: tile} | ({"gate_up": gate_up} if operation == "down" and gate_up else {})
        with tuning.forcing(forced):
            try:
                timed.append((sum(seconds(calls, 10) for calls in groups), tile))
            except FAILURES:  # more shared memory than this GPU has
                continue
    if not timed:
        raise DeviceError(
            f"{operation}: none of {len(tiles)} tiles runs on this GPU; the tables of the package stay in use"
        )
    took, best = min(timed, key=lambda pair: pair[0])
    return best, took
