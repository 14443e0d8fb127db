"""Score packed checkpoints against their original in float32, decoded once.

The operators decode packed weights on every call. So that 20 recipes x 300,000 tokens take minutes, each packed model is
decoded once into a float32 model; on the first window it must agree with the operators (KL < 1e-6).
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

import trilobite.integrations.transformers  # noqa: F401  (registers the plugin)
from trilobite.checkpoint.packed import read_report
from trilobite.checkpoint.source import open_source
from trilobite.evaluate.perplexity import Score, score, tokenize_file
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.runtime.load import load, load_tokenizer
from trilobite.runtime.mapped import map_files
from trilobite.runtime.modules.swap import group_parts

AGREEMENT = 1e-6
"""Largest KL divergence between the operators and the decoded model: float32 rounding, nothing else."""


def unpacked(folder: Path, original: Path) -> PreTrainedModel:
    """A packed model as an ordinary float32 one: every matrix decoded once."""
    return build(decoded(folder), original)


def decoded(folder: Path) -> dict[str, Tensor]:
    """The tensors of a packed model by the original's names, every matrix decoded."""
    tensors = map_files(open_source(str(folder))).tensors
    rows = {t["name"].removesuffix(".weight"): t for t in read_report(folder)["tensors"]}
    for path, parts in group_parts(tensors).items():
        (n, k), exponent = rows[path]["shape"], rows[path].get("exponent", 0)
        for suffix in parts:
            del tensors[f"{path}.weight_{suffix}"]
        tensors[f"{path}.weight"] = dequantize(PackedWeight(shape=(n, k), exponent=exponent, **parts))
    return tensors


def build(tensors: dict[str, Tensor], original: Path) -> PreTrainedModel:
    """An ordinary float32 model of the original's architecture with these weights."""
    kind = type(load(str(original)))
    model: PreTrainedModel = kind.from_pretrained(
        None,
        config=AutoConfig.from_pretrained(original, trust_remote_code=False),
        state_dict=tensors,
        dtype=torch.float32,
    )
    return model.eval()


def disagreement(folder: Path, decoded: PreTrainedModel, window: Tensor) -> float:
    """KL divergence between decoded model and operators on one window; SystemExit when more than rounding."""
    packed = load(str(folder), dtype=torch.float32)
    kl = score({"operators": packed}, window, context=len(window), batch=1, reference=decoded)["operators"].kl
    assert kl is not None
    if not kl < AGREEMENT:
        raise SystemExit(
            f"error: {folder}: the operators differ from the decoded weights by KL {kl:.3g} on one window"
        )
    return kl


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to measure on. memory: GB for decoded models, which are measured together while they fit."""

    model: Path
    ids: Tensor
    context: int
    batch: int = 16
    memory: float = 8.0

    def scores(self, packed: Mapping[str, Path]) -> dict[str, Score]:
        """Score packed checkpoints against the original."""
        reference = load(str(self.model), dtype=torch.float32)
        found: dict[str, Score] = {}
        for names in self._chunks(list(packed), reference):
            models = {name: unpacked(packed[name], self.model) for name in names}
            for name, model in models.items():
                disagreement(packed[name], model, self.ids[: self.context])
            found |= score(
                models,
                self.ids,
                context=self.context,
                batch=self.batch,
                reference=reference,
                progress=_progress,
            )
            del models
            gc.collect()
        return found

    def _chunks(self, names: Sequence[str], model: PreTrainedModel) -> Iterator[Sequence[str]]:
        size = max(1, int(self.memory * 1e9 / (4 * model.num_parameters())) - 1)
        for start in range(0, len(names), size):
            yield names[start : start + size]


def open_bench(
    model: Path, text: Path, *, context: int, tokens: int = 0, batch: int = 16, memory: float = 8.0
) -> Bench:
    """Tokenise the text (its first `tokens` tokens, 0 = all) for a model."""
    transformers_logging.disable_progress_bar()
    ids = tokenize_file(load_tokenizer(str(model)), text)
    return Bench(model=model, ids=ids[: tokens or len(ids)], context=context, batch=batch, memory=memory)


def _progress(done: int, total: int) -> None:
    print(f"\r{done}/{total} windows ", end="" if done < total else "\n", flush=True)
