"""What stands beside the packed tensors: config.json for everybody, trilobite.json for us."""

from collections.abc import Mapping
from typing import Any

from trilobite.checkpoint.guard import guarded
from trilobite.checkpoint.packed import FORMAT_VERSION
from trilobite.checkpoint.source import Source
from trilobite.quantize.plan.plan import Plan, describe, tensors_json


def packed_config(source: Source, recipe: str) -> dict[str, Any]:
    """config.json of the packed checkpoint: the original's, quantization_config replaced by ours, and the guard."""
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "auto_map")}
    config["quantization_config"] = {
        "quant_method": "trilobite",
        "format_version": FORMAT_VERSION,
        "recipe": recipe,
    }
    return guarded(config)


def packed_report(
    source: str,
    plan: Plan,
    identity: Mapping[str, Any],
    done: Mapping[str, Mapping[str, Any]],
    tuned: Mapping[str, Mapping[str, Any]],
) -> str:
    """trilobite.json: the plan as executed. Without clocks or paths, so that equal runs give equal bytes.

    source: the original's name    done: records by tensor name    tuned: how fine-tuning went, by part
    """
    head = {
        "format_version": FORMAT_VERSION,
        "identity": dict(identity),
        "source": source,
        "rank": plan.rank,
    }
    if tuned:
        head["finetune"] = {part: dict(record) for part, record in sorted(tuned.items())}
    rows = []
    for line in plan.lines:
        record = {k: v for k, v in done[line.matrix.name].items() if k not in ("name", "seconds")}
        rows.append(describe(line, plan.recipe.compensator) | record)
    return tensors_json(head, rows)
