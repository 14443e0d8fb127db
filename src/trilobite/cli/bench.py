"""bench: how fast this machine runs packed layers, and tuning of the GPU kernels."""

from typing import Annotated, Any

import typer

from trilobite.cli.console import note, print_json, print_table
from trilobite.cli.options import JsonOption
from trilobite.errors import DeviceError, MissingExtraError


def bench(
    tune: Annotated[
        bool, typer.Option("--tune", help="Choose the fastest tiles for this GPU and remember them.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure memory bandwidth, and what share of it the operators use.

    One token through a layer of random INT3 experts: Mixtral's and DeepSeek-MoE's on a GPU, a slice of
    DeepSeek-MoE's on the CPU. With --tune, try the GPU kernels' tiles instead (minutes) and write the fastest to the
    user's cache folder, where they are found from then on.

    \b
    Example: trilobite bench
    """
    import torch

    if tune:
        _tune(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return
    rows = _on_gpu() if torch.cuda.is_available() else _on_cpu()
    if json:
        print_json({"bench": rows})
        return
    table = [
        (
            r["layer"],
            f"{r['us']:.1f}",
            f"{r['GB_per_s']:.1f}",
            f"{r['limit_GB_per_s']:.1f}",
            f"{r['share']:.0%}",
        )
        for r in rows
    ]
    print_table(("one token", "us", "GB/s", "memory GB/s", "share"), table)


def _row(layer: str, seconds: float, nbytes: float, limit: float) -> dict[str, Any]:
    rate = nbytes / seconds
    return {
        "layer": layer,
        "us": seconds * 1e6,
        "GB_per_s": rate / 1e9,
        "limit_GB_per_s": limit / 1e9,
        "share": rate / limit,
    }


def _on_gpu() -> list[dict[str, Any]]:
    import torch

    _require_triton()
    from trilobite.measure import gpu
    from trilobite.measure.shapes import DEEPSEEK, MIXTRAL
    from trilobite.recipe import Format

    device = torch.device("cuda")
    limit, rows = gpu.copy_bandwidth(device), []
    for layer in (MIXTRAL, DEEPSEEK):
        pack = gpu.random_layer(layer, Format(bits=3, group=64), device)
        took = gpu.seconds(gpu.expert_calls(layer, pack, 1))
        rows.append(_row(f"{layer.name} INT3 g64", took, gpu.hit_bytes(layer, pack, 1), limit))
    return rows


def _on_cpu() -> list[dict[str, Any]]:
    import statistics
    import time

    import torch

    from trilobite.formats.affine import packed_shape
    from trilobite.formats.weight import PackedWeight
    from trilobite.kernels import ops
    from trilobite.kernels.cpu import engine
    from trilobite.kernels.expert_table import build
    from trilobite.kernels.layer import ExpertsLayer
    from trilobite.recipe import Format

    if not engine.available():
        raise DeviceError("no GPU, and no native CPU engine to measure: run `trilobite doctor`")
    count, active, hidden, inner = 32, 6, 2048, 1408  # 123 MB: more than caches hold
    fmt = Format(bits=3, group=64)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    experts = [
        tuple(
            PackedWeight(shape=s, packed=torch.zeros(packed_shape(fmt, *s), dtype=torch.uint8))
            for s in shapes
        )
        for _ in range(count)
    ]
    slab, table = build(experts)  # type: ignore[arg-type]
    layer = ExpertsLayer(slab=slab, table=table, hidden=hidden, intermediate=inner, activation="silu")
    times = []
    for _ in range(15):
        index, x = torch.randperm(count)[None, :active], torch.randn(1, hidden, dtype=torch.bfloat16)
        start = time.perf_counter()
        ops.experts(x, index, torch.ones(1, active), layer)
        times.append(time.perf_counter() - start)
    limit = 1e9 * engine.measure_read_bandwidth(slab)
    return [_row("32 experts INT3 g64 (CPU)", statistics.median(times), slab.nbytes * active / count, limit)]


def _require_triton() -> None:
    from trilobite.kernels.ops import missing_triton

    if missing := missing_triton():
        raise MissingExtraError(f"the GPU kernels need Triton. {missing}")


def _tune(device: Any) -> None:
    _require_triton()
    from trilobite.kernels.gpu import tuning
    from trilobite.measure import tiles

    tiles.tune(device, note)
    print(f"wrote {tuning.user_file()}")
