"""KL divergence of many variants of one model from the original, kept as it is found: a run that is stopped goes on."""

import gc
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.lib.packed import pack
from benchmarks.lib.scoring import Bench, build, disagreement, unpacked
from trilobite.evaluate.perplexity import score
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.recipe import Recipe
from trilobite.runtime.load import load

TOGETHER = 6
"""Models that are scored at a time: the original's part of the work is done once for them."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one variant. bits: of a weight of the body, all that is stored counted    kl: nats per token"""

    bits: float
    kl: float


Variant = Callable[[], tuple[PreTrainedModel, float]]
"""Makes the model in fp32, and says what a weight of the body takes."""


def divergences(
    bench: Bench, variants: Mapping[str, Variant], kept: Path, *, fresh: bool = False
) -> dict[str, Found]:
    """By name, in their order. kept: a file of what earlier runs found; fresh: find it again"""
    key = f"{hashlib.sha256(bench.ids.numpy().tobytes()).hexdigest()[:12]} {bench.context}"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    found: dict[str, dict[str, float]] = known.setdefault(key, {})
    todo = [name for name in variants if fresh or name not in found]
    reference = load(str(bench.model), dtype=torch.float32) if todo else None
    for start in range(0, len(todo), TOGETHER):
        names = todo[start : start + TOGETHER]
        made = {name: variants[name]() for name in names}
        models = {name: model for name, (model, _) in made.items()}
        scores = score(models, bench.ids, context=bench.context, batch=bench.batch, reference=reference)
        for name in names:
            kl = scores[name].kl
            assert kl is not None
            found[name] = asdict(Found(bits=made[name][1], kl=kl))
            print(f"{bench.model.name} {name}: {made[name][1]:.2f} bits, KL {kl:.4f}", flush=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        whole = kept.with_suffix(".new")
        whole.write_text(json.dumps(known, indent=1))
        whole.replace(kept)
        del made, models
        gc.collect()
    return {name: Found(**found[name]) for name in variants}


def of_decoded(
    bench: Bench, ways: Mapping[str, Mapping[str, Tensor]], bits: float, kept: Path
) -> dict[str, Found]:
    """Of the model with other tensors, all of them, by the name of the way; found anew. bits: of a weight of the body"""
    variants: dict[str, Variant] = {
        way: lambda tensors=tensors: (build(tensors, bench.model), bits)  # type: ignore[misc]
        for way, tensors in ways.items()
    }
    return divergences(bench, variants, kept, fresh=True)


def packed_variant(
    bench: Bench, recipe: Recipe | Budget, work: Path, calibration: Calibration | None = None
) -> Variant:
    """A model packed by a recipe or for a budget, whose decoded weights agree with the operators."""

    def make() -> tuple[PreTrainedModel, float]:
        name = recipe.name
        if isinstance(recipe, Budget):
            name += "-text" if calibration and calibration.brought else f"-{recipe.importance}"
        packed = pack(
            bench.model, recipe, work, frequency=None, calibration=calibration, fresh=True, name=name
        )
        model = unpacked(packed.path, bench.model)
        disagreement(packed.path, model, bench.ids[: bench.context])
        return model, packed.body

    return make
