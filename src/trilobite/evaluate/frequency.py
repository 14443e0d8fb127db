"""How often each expert is used: the count of tokens that the router sends to it, per MoE layer.

    ids = windows(tokenize_file(tokenizer, path), 512)
    counts = expert_frequency(model, ids, batch=8)
    save_frequency(Path("frequency.json"), counts, model_name=..., text=..., tokens=ids.numel())

The rank policy `frequency-r` of MiLo (arXiv:2504.02658, section 3.2.4) reads such a file.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trilobite.checkpoint.files import write_whole
from trilobite.errors import DestinationError, EvaluationError
from trilobite.runtime.finite import finite, not_finite
from trilobite.runtime.routing import INDEX_NAMES, index_of, routes_by_index


def expert_frequency(
    model: PreTrainedModel, ids: Tensor, *, batch: int, progress: Callable[[int, int], None] | None = None
) -> dict[int, list[int]]:
    """Count the tokens that each expert of each MoE layer receives.

    ids: [W, context] int64, the windows; every token counts A times per layer, once for each of its experts
    batch: windows per forward pass    progress: called with (windows done, windows in all) after every batch
    returns: layer -> E counts, in the order of layers. Raises EvaluationError for a model without MoE layers, and for
    one whose numbers become NaN or infinite.
    """
    layers = _moe_layers(model)
    counts = {layer: torch.zeros(int(m.num_experts), dtype=torch.int64) for layer, m in layers.items()}
    hooks = [
        module.register_forward_pre_hook(partial(_count, counts[layer]), with_kwargs=True)
        for layer, module in layers.items()
    ]
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(ids), max(1, batch)):
                block = ids[start : start + max(1, batch)]
                # the body without the head: nothing here needs the logits
                ids_there = block.to(model.device)
                if not finite(model.base_model(input_ids=ids_there, use_cache=False)[0]):
                    raise not_finite(model, {"input_ids": ids_there})
                if progress:
                    progress(start + len(block), len(ids))
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: c.tolist() for layer, c in sorted(counts.items())}


def _moe_layers(model: PreTrainedModel) -> dict[int, Any]:
    """Layer number -> its experts module; the number is the first one in the module's path."""
    found: dict[int, Any] = {}
    for path, module in model.named_modules():
        if not routes_by_index(module):
            continue
        number = re.search(r"\.(\d+)\.", path)
        if number is None or int(number[1]) in found:
            raise EvaluationError(f"{path}: not the only experts of a numbered layer: not supported")
        found[int(number[1])] = module
    if not found:
        raise EvaluationError(
            f"{type(model).__name__}: no module is called *Experts and takes {' or '.join(INDEX_NAMES)}; "
            "expert frequency needs a decoder-only Mixture-of-Experts model"
        )
    return found


def _count(counts: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook. counts: [E] int64, added to    top_k_index: [T, A] integers, E = "no expert"."""
    experts = len(counts)
    counts += index_of(args, kwargs).flatten().bincount(minlength=experts)[:experts].cpu()


def save_frequency(
    path: Path, counts: dict[int, list[int]], *, model_name: str, text: str, tokens: int
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
        "layers": {str(layer): c for layer, c in counts.items()},
    }
    try:
        write_whole(path, (json.dumps(document) + "\n").encode())
    except OSError as e:
        raise DestinationError(f"{path}: cannot be written ({e.strerror}); choose another folder") from e


def load_frequency(path: Path) -> dict[int, list[int]]:
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
    return {_layer_number(path, key): _layer_counts(path, key, value) for key, value in layers.items()}


def _layer_number(path: Path, key: str) -> int:
    if not re.fullmatch(r"[0-9]+", key):
        raise EvaluationError(f"{path}: layer {key!r} is not a number; measure again")
    return int(key)


def _layer_counts(path: Path, key: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(c) is int and c >= 0 for c in value):
        raise EvaluationError(f"{path}: layer {key} must be a list of counts; measure again")
    return value
