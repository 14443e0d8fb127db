"""What this machine offers: versions, processor, memory, kernels and measured bandwidth, as plain data."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import trilobite
from trilobite.errors import DeviceError, OffloadError
from trilobite.kernels import ops
from trilobite.kernels.cpu import engine
from trilobite.runtime.offload.disk import measure_disk

PACKAGES = ("torch", "triton", "transformers", "safetensors", "huggingface_hub", "tokenizers", "numpy")
EXTRAS = {"eval": "lm_eval", "plot": "matplotlib", "gpu": "triton"}
FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_vbmi",
    "gfni",
    "avx512_bf16",
    "amx_bf16",
)
FLAGS_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve")
PROBE_BYTES = 256 * 2**20
"""Far more than any cache holds."""
PROBE_ROUNDS = 5


def examine() -> dict[str, Any]:
    """Everything `trilobite doctor` prints; reads much memory a few times to measure bandwidth."""
    return {
        "versions": _versions(),
        "cpu": _cpu(),
        "memory": _memory(),
        "kernels": _kernels(),
        "torch_threads": torch.get_num_threads(),
        "read_bandwidth": _bandwidth(),
        "gpu": _gpus(),
        "gpu_kernels": _gpu_kernels(),
        "extras": {name: importlib.util.find_spec(module) is not None for name, module in EXTRAS.items()},
        "disk": _disk(),
    }


def _versions() -> dict[str, str]:
    found = {"trilobite": trilobite.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    words = set(fields.get("flags", fields.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "flags": [f for f in (*FLAGS, *FLAGS_ARM) if f in words],
        "cores": os.cpu_count(),
        "cores_usable": usable,
    }


def _memory() -> dict[str, float]:
    """Gigabytes in all and available; empty where the system has no /proc/meminfo."""
    kib = {
        key: value.split()[0] for key, _, value in (line.partition(":") for line in _lines("/proc/meminfo"))
    }
    wanted = {"total_GB": "MemTotal", "available_GB": "MemAvailable"}
    return {name: round(int(kib[key]) * 1024 / 1e9, 1) for name, key in wanted.items() if key in kib}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _kernels() -> dict[str, Any]:
    """Which operators run packed weights on the CPU, and why."""
    info: dict[str, Any] = engine.info()
    backend = "compiled" if info.pop("available") else "reference operators (PyTorch)"
    return {"backend": backend, **info}


def _bandwidth() -> dict[str, Any]:
    """How fast memory is read, by the kernels' threads or by torch's: the limit of token generation."""
    if engine.available():
        return {"GB_per_s": round(engine.measure_read_bandwidth(), 1), "read_by": "compiled kernels"}
    return {"GB_per_s": round(_torch_bandwidth() / 1e9, 1), "read_by": "torch"}


def _torch_bandwidth() -> float:
    """Bytes per second that a sum over a large tensor reads: the best of a few rounds."""
    data = torch.ones(PROBE_BYTES // 8, dtype=torch.float64)
    best = 0.0
    for _ in range(PROBE_ROUNDS):
        started = perf_counter()
        data.sum()
        best = max(best, data.nbytes / (perf_counter() - started))
    return best


def _disk() -> dict[str, Any]:
    """Of the folder one stands in: what is free, and how fast experts would stream from it."""
    found: dict[str, Any] = {
        "folder": os.getcwd(),
        "free_GB": round(shutil.disk_usage(".").free / 1e9, 1),
    }
    try:
        speed, direct = measure_disk(Path("."))
    except (OSError, OffloadError) as e:
        return found | {"read_speed": f"not measured: {e}"}
    return found | {
        "read_GB_per_s": round(speed / 1e9, 2),
        "read_by": "O_DIRECT" if direct else "the page cache",
    }


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": p.name,
            "memory_GB": round(p.total_memory / 1e9, 1),
            "compute_capability": f"{p.major}.{p.minor}",
        }
        for p in properties
    ]


def _gpu_kernels() -> dict[str, Any]:
    """Which operators run packed weights on the first GPU, where their tiles come from, and why."""
    reference = "reference operators (PyTorch): slow"
    if not torch.cuda.is_available():
        return {"backend": "none", "reason": "torch sees no CUDA device"}
    if missing := ops.missing_triton():
        return {"backend": reference, "reason": missing}
    from trilobite.kernels.gpu import launch, tuning

    device = torch.device("cuda", 0)
    try:
        launch.check_device(device)
    except DeviceError as e:
        return {"backend": "none", "reason": str(e)}
    return {"backend": "Triton", "tiles": tuning.describe(device), "reason": "Triton and a GPU found"}
