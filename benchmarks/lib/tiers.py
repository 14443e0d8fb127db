"""The instruction sets that this machine has."""

from collections.abc import Iterator

from trilobite.kernels.cpu import engine as cpu


def in_turn() -> Iterator[str]:
    """All but the portable one, the best first: each is in use while it is its turn, and in the end the best."""
    best = cpu.set_tier(None)
    try:
        for tier in reversed(cpu.TIERS[: cpu.TIERS.index(best) + 1]):
            if tier != "scalar" and cpu.set_tier(tier) == tier:
                yield tier
    finally:
        cpu.set_tier(best)
