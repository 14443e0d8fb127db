"""Layers with experts for text and experts for images, numbered through on disk: the first half is for text."""

import re
from collections.abc import Iterable

EXPERT_INDEX = re.compile(r"\.experts\.(?:expert_)?(\d+)\.")
TWO_KINDS = ("ernie4_5_vl_moe",)
"""Model types that have both."""
KINDS = ("text_moe", "vision_moe")
"""What models call both kinds."""


def experts_of_a_kind(model_type: str, names: Iterable[str]) -> int:
    """How many experts of a layer are for text, of tensors with these names; 0 for models that have one kind."""
    if model_type not in TWO_KINDS:
        return 0
    found = (EXPERT_INDEX.search(name) for name in names)
    return (max((int(index[1]) for index in found if index), default=-1) + 2) // 2


def by_kind(name: str, of_a_kind: int) -> str:
    """`a.mlp.experts.7.b` -> `a.mlp.vision_moe.experts.1.b`, where six experts are for text: as models have them."""
    index = EXPERT_INDEX.search(name)
    assert index is not None
    kind, number = divmod(int(index[1]), of_a_kind)
    return f"{name[: index.start()]}.{KINDS[kind]}.experts.{number}.{name[index.end() :]}"
