"""Bytes of a packed checkpoint's folder that are no tensor data: headers, index, tokenizer, reports."""

import json

from trilobite.checkpoint.layout import ALIGN
from trilobite.checkpoint.packed import SHARD_BYTES
from trilobite.checkpoint.source import Source
from trilobite.quantize.plan.plan import Plan, describe

ENTRY = 110
"""A tensor in a header and in the index, beside its name in both."""
RECORD = 330
"""What a run notes of a matrix beside its plan, its seconds and its line in the account of the planner."""
FIXED = 16 * 2**10
"""config.json, the model card, rules, versions."""


def file_overhead(source: Source, plan: Plan) -> int:
    """At most so many bytes. Some numbers get their digits only when matrices are quantized."""
    total = sum(path.stat().st_size for path in source.companions()) + FIXED
    total += len(json.dumps(source.config, indent=2))
    for line in plan.lines:
        row = json.dumps(describe(line, plan.recipe.compensator))
        # The report, and the seconds; the header and the index.
        total += len(row) + RECORD + len(line.matrix.name)
        total += sum(2 * len(t.name) + ENTRY for t in line.stored)
    return total + ALIGN * (2 + sum(line.nbytes for line in plan.lines) // SHARD_BYTES)
