"""Which layer a tensor or a module belongs to, by its name; encoder-decoders have two stacks that both count from 0."""

import re

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)\.")


def layer_number(name: str) -> int | None:
    """In its stack."""
    m = _LAYER.search(name)
    return int(m[1]) if m else None


def stack_of(name: str) -> str:
    """What stands before the layer's number; "" for what is in no layer."""
    m = _LAYER.search(name)
    return name[: m.start()] if m else ""


def side_of(name: str) -> str:
    """encoder or decoder, where the stack is called so; else ""."""
    parts = stack_of(name).split(".")
    return next((side for side in ("encoder", "decoder") if side in parts), "")


def layer_key(name: str) -> str | None:
    """What its layer is called in files and reports: "3", or "encoder.3" and "decoder.3"."""
    number, side = layer_number(name), side_of(name)
    return None if number is None else f"{side}.{number}".removeprefix(".")
