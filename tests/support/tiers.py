"""Instruction sets of this machine."""

import os

from trilobite.kernels.cpu import engine as cpu


def tiers() -> list[str]:
    """Those that the native library can use here, worst first."""
    if not cpu.available():
        return []
    names = [cpu.set_tier(name) for name in cpu.TIERS]
    cpu.set_tier(os.environ.get("TRILOBITE_ISA"))
    return list(dict.fromkeys(names))
