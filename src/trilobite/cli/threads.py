"""How OpenMP's threads wait, which torch starts: said in the environment, before torch is imported."""

import os

BRIEFLY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""Awake for about a tenth of a millisecond, then asleep."""


def sleep_at_once() -> None:
    """For all that runs in the CPU engine: torch's idle threads would spin for milliseconds on its cores."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def wait_briefly() -> None:
    """For what is mostly torch's small operators: to wake a thread takes longer than one of them."""
    for name, value in BRIEFLY.items():
        os.environ.setdefault(name, value)
