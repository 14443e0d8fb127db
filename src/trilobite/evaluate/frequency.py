"""How often each expert is used: the count of tokens that the router sends to it, per MoE layer.

    ids = windows(tokenize_file(tokenizer, path), 512)
    counts = expert_frequency(model, ids, batch=8)
    save_frequency(Path("frequency.json"), counts, model_name=..., text=..., tokens=ids.numel())

The rank policy `frequency-r` of MiLo (arXiv:2504.02658, section 3.2.4) reads such a file.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trilobite.checkpoint.files import write_whole
from trilobite.checkpoint.layers import layer_key
from trilobite.errors import DestinationError, EvaluationError
from trilobite.evaluate.forced import check_forced
from trilobite.models.pairs import NONE, Pair, forced
from trilobite.models.wide_products import wide_products
from trilobite.runtime.finite import finite, not_finite
from trilobite.runtime.routing import INDEX_NAMES, index_of, routes_by_index

Step = tuple[dict[str, Tensor], Mapping[str, Tensor], int]
"""What the model is called with, which tokens are no padding, and how far this goes."""


def expert_frequency(
    model: PreTrainedModel, ids: Tensor, *, batch: int, progress: Callable[[int, int], None] | None = None
) -> dict[str, list[int]]:
    """Count the tokens that each expert of each MoE layer receives.

    ids: [W, context] int64, the windows; every token counts A times per layer, once for each of its experts
    batch: windows per forward pass    progress: called with (windows done, windows in all) after every batch
    returns: layer -> E counts, in the order of layers. Raises EvaluationError for a model without MoE layers, and for
    one whose numbers become NaN or infinite.
    """
    size = max(1, batch)

    def batches() -> Iterator[Step]:
        for start in range(0, len(ids), size):
            yield {"input_ids": ids[start : start + size].to(model.device)}, {}, min(start + size, len(ids))

    return _counted(model, batches(), lambda done: progress and progress(done, len(ids)))


def forced_frequency(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    *,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[int]]:
    """The same for an encoder-decoder: sources in its encoder, given translations in its decoder.

    pairs: token ids; padding is not counted    batch: pairs per forward pass    returns: "encoder.1" -> E counts
    Raises EvaluationError as `expert_frequency` does, and for pairs that the model cannot take.
    """
    check_forced(model.name_or_path, model, pairs)

    def batches() -> Iterator[Step]:
        for start in range(0, len(pairs), batch):
            block = forced(pairs[start : start + batch], model.config)
            real = {"encoder": block.mask.bool().flatten(), "decoder": (block.labels != NONE).flatten()}
            yield block.arguments(model.device), real, min(start + batch, len(pairs))

    return _counted(model, batches(), lambda done: progress and progress(done, len(pairs)))


def _counted(
    model: PreTrainedModel, steps: Iterable[Step], tell: Callable[[int], object]
) -> dict[str, list[int]]:
    """Count in the layers of a model while it runs."""
    layers = _moe_layers(model)
    counts = {layer: torch.zeros(int(m.num_experts), dtype=torch.int64) for layer, m in layers.items()}
    real: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            partial(_count, counts[layer], real, layer.partition(".")[0]), with_kwargs=True
        )
        for layer, module in layers.items()
    ]
    model.eval()
    try:
        with torch.inference_mode(), wide_products(model.dtype, model.device):
            for arguments, tokens, done in steps:
                real.clear()
                real.update(tokens)
                # the body without the head, where there is one: nothing here needs the logits
                if not finite(model.base_model(**arguments, use_cache=False)[0]):
                    raise not_finite(model, arguments)
                tell(done)
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: c.tolist() for layer, c in counts.items()}


def _moe_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Layer -> its experts module, in the order of the model."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if not routes_by_index(module):
            continue
        layer = layer_key(path)
        if layer is None or layer in found:
            raise EvaluationError(f"{path}: not the only experts of a numbered layer: not supported")
        found[layer] = module
    if not found:
        raise EvaluationError(
            f"{type(model).__name__}: no module is called *Experts and takes {' or '.join(INDEX_NAMES)}; "
            "expert frequency needs a Mixture-of-Experts model"
        )
    return found


def _count(
    counts: Tensor,
    real: Mapping[str, Tensor],
    stack: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Forward pre-hook. counts: [E] int64, added to    top_k_index: [T, A] integers, E = "no expert".

    real: stack -> which of its tokens are no padding, [T] bool; all are in a stack that it does not name
    """
    experts, index = len(counts), index_of(args, kwargs)
    if stack in real:
        index = index[real[stack].to(index.device)]
    counts += index.flatten().bincount(minlength=experts)[:experts].cpu()


def save_frequency(
    path: Path, counts: dict[str, list[int]], *, model_name: str, text: str, tokens: int
) -> None:
    """Write counts as JSON, all or nothing; raises DestinationError.

    counts: layer -> E counts    text: name of what was read    tokens: how many were read
    """
    document = {
        "kind": "trilobite expert frequency",
        "version": 1,
        "model": model_name,
        "text": text,
        "tokens": tokens,
        "layers": counts,
    }
    try:
        write_whole(path, (json.dumps(document) + "\n").encode())
    except OSError as e:
        raise DestinationError(f"{path}: cannot be written ({e.strerror}); choose another folder") from e


def load_frequency(path: Path) -> dict[str, list[int]]:
    """Read what `save_frequency` wrote: layer -> E counts. Raises EvaluationError for any other file."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as e:
        raise EvaluationError(f"{path}: cannot be read ({e.strerror}); measure frequencies first") from e
    except ValueError as e:
        raise EvaluationError(f"{path}: not JSON ({e}); measure again") from e
    if not isinstance(document, dict) or document.get("kind") != "trilobite expert frequency":
        raise EvaluationError(f"{path}: not a file of expert frequencies; measure them again")
    if document.get("version") != 1:
        raise EvaluationError(f"{path}: version {document.get('version')!r}, known is 1; measure again")
    layers = document.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise EvaluationError(f"{path}: 'layers' must map layer numbers to counts; measure again")
    return {_layer(path, key): _layer_counts(path, key, value) for key, value in layers.items()}


def _layer(path: Path, key: str) -> str:
    if not re.fullmatch(r"(encoder\.|decoder\.)?[0-9]+", key):
        raise EvaluationError(f"{path}: layer {key!r} is not a number; measure again")
    return key


def _layer_counts(path: Path, key: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(c) is int and c >= 0 for c in value):
        raise EvaluationError(f"{path}: layer {key} must be a list of counts; measure again")
    return value
