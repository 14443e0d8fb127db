"""Shapes of real models' experts, for benchmarks and for the choice of tiles."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """The routed experts of a model: E experts, A of them active, hidden size H, intermediate size I."""

    name: str
    experts: int
    active: int
    hidden: int
    intermediate: int


MIXTRAL = ExpertsShape(name="Mixtral-8x7B", experts=8, active=2, hidden=4096, intermediate=14336)
DEEPSEEK = ExpertsShape(name="DeepSeek-MoE-16B", experts=64, active=6, hidden=2048, intermediate=1408)
