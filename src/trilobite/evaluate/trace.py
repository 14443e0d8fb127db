"""Which experts a text uses, layer by layer and token by token, and which ones would have been guessed.

    found = trace(model, windows(tokenize_file(tokenizer, path), 512))
    save_trace(Path("trace.npz"), found)

Of an encoder-decoder, `forced_trace` notes both stacks; their layers are called encoder.1 and decoder.1, as in counts.
Guesses follow arXiv:2312.17238, section 3.2: the routing code of a later layer, applied to the hidden states of
this one; with that layer's own norm, or with its own residual stream, beyond the paper.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trilobite.checkpoint.files import write_whole
from trilobite.checkpoint.layers import layer_key, side_of
from trilobite.errors import DestinationError, EvaluationError
from trilobite.evaluate.forced import check_forced
from trilobite.models.pairs import Pair, forced
from trilobite.models.wide_products import wide_products
from trilobite.runtime.finite import finite, not_finite
from trilobite.runtime.routing import Arguments, MoeLayer, NormListener, index_of, moe_layers

AHEAD = (1, 2, 10)
"""Layers that the paper's figure 2 looks ahead."""
RESIDUAL = "residual"
"""Guesser: the next layer's code on the residual stream that enters it, with its attention left out."""
KIND = "trilobite expert trace"
VERSION = 1


def gate(ahead: int) -> str:
    """Guesser: a later layer's routing code on the hidden states that this layer routes."""
    return f"gate+{ahead}"


def norm(ahead: int) -> str:
    """Guesser: a later layer's norm and routing code on the residual stream that this layer's norm is given."""
    return f"norm+{ahead}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """experts: [L, T, A] int16, the experts of every token in every MoE layer, -1 = none

    Tokens are those of window after window; of pair after pair those of the sentence, which have experts in the encoder
    alone, and then those of its translation, which have experts in the decoder alone.
    experts_of: [L] how many a layer has    names: of the layers    model, text: what was run on what
    guesses: guesser -> [L, T, G] int16, the experts it expects in that layer, likeliest first, -1 = no guess
    """

    experts: np.ndarray
    experts_of: list[int]
    names: list[str]
    model: str = ""
    text: str = ""
    guesses: Mapping[str, np.ndarray] = field(default_factory=dict)


def trace(
    model: PreTrainedModel, ids: Tensor, *, progress: Callable[[int, int], None] | None = None
) -> Trace:
    """Run a text through a model, window by window, and note its routing.

    ids: [W, context] int64    progress: called with (windows done, windows in all)
    Raises EvaluationError for models without MoE layers, encoder-decoders, and numbers that become NaN or infinite.
    """
    if model.config.is_encoder_decoder:
        raise EvaluationError(
            f"{model.name_or_path}: an encoder-decoder model; give the translation of the text too: --target-text FILE"
        )
    steps = ({"input_ids": window[None].to(model.device)} for window in ids)
    return _traced(model, steps, lambda done: progress and progress(done, len(ids)))


def forced_trace(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """The same for an encoder-decoder: sentences in its encoder, given translations in its decoder, pair by pair.

    pairs: token ids    progress: called with (pairs done, pairs in all)
    Raises EvaluationError for a model without MoE layers, for decoder-only ones, and for pairs that it cannot take.
    """
    check_forced(model.name_or_path, model, pairs)
    steps = (forced([pair], model.config).arguments(model.device) for pair in pairs)
    return _traced(model, steps, lambda done: progress and progress(done, len(pairs)))


def _traced(
    model: PreTrainedModel, steps: Iterable[Mapping[str, Tensor]], tell: Callable[[int], object]
) -> Trace:
    layers = moe_layers(model)
    if not layers:
        raise EvaluationError(
            f"{type(model).__name__}: has no layer whose experts are told by index; a trace needs a Mixture-of-Experts "
            "model"
        )
    recorder = _Recorder(layers)
    model.eval()
    try:
        with torch.inference_mode(), wide_products(model.dtype, model.device):
            for done, arguments in enumerate(steps, 1):
                if not finite(model.base_model(**arguments, use_cache=False)[0]):
                    raise not_finite(model, arguments)
                tell(done)
    finally:
        recorder.detach()
    return recorder.trace()


class _Recorder:
    """Hooks in all layers: what is chosen, and what each guesser expects, window after window."""

    def __init__(self, layers: Any) -> None:
        self.layers: list[MoeLayer] = list(layers)
        self.sides = [side_of(layer.name) for layer in self.layers]
        self.asking = False
        self.chosen: list[list[np.ndarray]] = [[] for _ in self.layers]
        self.expected: dict[str, list[list[np.ndarray]]] = {
            name: [[] for _ in self.layers] for name in (*map(gate, AHEAD), *map(norm, AHEAD), RESIDUAL)
        }
        self._norms = NormListener(self.layers)
        self._handles: list[Any] = []
        for i, layer in enumerate(self.layers):
            self._handles.append(
                layer.experts.register_forward_pre_hook(self._on_experts(i), with_kwargs=True)
            )
            self._handles.append(layer.block.register_forward_pre_hook(self._on_block(i), with_kwargs=True))
            self._handles.append(layer.whole.register_forward_pre_hook(self._on_whole(i), with_kwargs=True))

    def detach(self) -> None:
        self._norms.detach()
        for handle in self._handles:
            handle.remove()

    def _on_experts(self, i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.chosen[i].append(_plain(index_of(args, kwargs), self.layers[i].num_experts))

        return hook

    def _on_block(self, i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.asking:
                return
            normed = self._norms.heard((args, kwargs))
            for ahead in AHEAD:
                if self.sides[i + ahead : i + ahead + 1] != [self.sides[i]]:
                    continue  # behind the last layer of its stack
                later = self.layers[i + ahead]
                self._ask(gate(ahead), i + ahead, later.route, (args, kwargs))
                if normed is not None:
                    self._ask(norm(ahead), i + ahead, partial(later.route_normed, normed), (args, kwargs))

        return hook

    def _on_whole(self, i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.asking and i:
                self._ask(RESIDUAL, i, self.layers[i].route_without_attention, (args, kwargs))

        return hook

    def _ask(
        self, guesser: str, i: int, route: Callable[[Arguments, int], Tensor | None], arguments: Arguments
    ) -> None:
        layer = self.layers[i]
        width = min(layer.num_experts, max(8, 4 * (layer.active or 1)))
        self.asking = True
        try:
            found = route(arguments, width)
        finally:
            self.asking = False
        if found is not None:
            self.expected[guesser][i].append(_plain(found, layer.num_experts))

    def trace(self) -> Trace:
        """A guesser that was silent in a layer has -1 there, one that was silent everywhere is left out."""
        return Trace(
            experts=self._laid_out(self.chosen),
            experts_of=[layer.num_experts for layer in self.layers],
            names=[layer_key(layer.name) or layer.name for layer in self.layers],
            guesses={name: self._laid_out(found) for name, found in self.expected.items() if any(found)},
        )

    def _laid_out(self, found: list[list[np.ndarray]]) -> np.ndarray:
        """[T of a window, A] of every layer and window -> [L, T in all, widest A], -1 where there is nothing."""
        places, tokens = self._places()
        width = max(rows.shape[1] for windows in found for rows in windows)
        made = np.full((len(found), tokens, width), -1, np.int16)
        for side, layer, windows in zip(self.sides, made, found, strict=True):
            for place, rows in zip(places[side], windows, strict=False):  # silent layers have no windows
                layer[place : place + len(rows), : rows.shape[1]] = rows
        return made

    def _places(self) -> tuple[dict[str, list[int]], int]:
        """Where each window of a stack begins when stacks take turns, and where the last one ends."""
        lengths = {side: [len(rows) for rows in c] for side, c in zip(self.sides, self.chosen, strict=True)}
        places: dict[str, list[int]] = {side: [] for side in lengths}
        end = 0
        for window in zip(*lengths.values(), strict=True):
            for side, length in zip(lengths, window, strict=True):
                places[side].append(end)
                end += length
        return places, end


def _plain(index: Tensor, experts: int) -> np.ndarray:
    """int16, -1 for an index that is none of the E experts."""
    return np.asarray(index.masked_fill(index >= experts, -1).cpu().numpy(), dtype=np.int16)


def save_trace(path: Path, found: Trace) -> None:
    """Write a trace as npz, all or nothing, without pickles. Raises DestinationError."""
    arrays: dict[str, Any] = {f"guess {name}": guess for name, guess in found.guesses.items()}
    arrays["kind"] = np.array([KIND, str(VERSION), found.model, found.text])
    arrays["names"], arrays["experts"] = np.array(found.names), found.experts
    arrays["experts_of"] = np.array(found.experts_of, dtype=np.int32)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    try:
        write_whole(path, buffer.getvalue())
    except OSError as e:
        raise DestinationError(f"{path}: cannot be written ({e.strerror}); choose another folder") from e


def load_trace(path: Path) -> Trace:
    """Read what `save_trace` wrote. Raises EvaluationError for any other file; never opens a pickle."""
    try:
        with np.load(path, allow_pickle=False) as data:
            kind, version, model, text = data["kind"].tolist()
            found = Trace(
                experts=data["experts"],
                experts_of=data["experts_of"].tolist(),
                names=data["names"].tolist(),
                model=model,
                text=text,
                guesses={n.removeprefix("guess "): data[n] for n in data.files if n.startswith("guess ")},
            )
    except OSError as e:
        raise EvaluationError(
            f"{path}: cannot be read ({e.strerror or 'not an npz file'}); make it with `trilobite trace`"
        ) from e
    except (KeyError, ValueError, AttributeError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise EvaluationError(f"{path}: not a trace; make it with `trilobite trace`") from e
    if kind != KIND or version != str(VERSION) or not _sound(found):
        raise EvaluationError(f"{path}: not a trace of version {VERSION}; make it with `trilobite trace`")
    return found


def _sound(found: Trace) -> bool:
    """Whether shapes fit together and every index is an expert, or -1."""
    shape = found.experts.shape
    arrays = [found.experts, *found.guesses.values()]
    if len(shape) != 3 or 0 in shape or not len(found.experts_of) == len(found.names) == shape[0]:
        return False
    if not all(a.ndim == 3 and a.shape[:2] == shape[:2] and a.dtype == np.int16 for a in arrays):
        return False
    limit = np.array(found.experts_of)[:, None, None]
    return all(bool(((a >= -1) & (a < limit)).all()) for a in arrays)
