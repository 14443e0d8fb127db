"""Steps of models with an encoder, from a list: they read a source, and have the bits of the model's own."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.encoders import KINDS, encoded, held, pack, read, same
from support.steps import plain, step_of, tokens
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from trilobite.kernels.ops import attends
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load
from trilobite.runtime.step.rows import Source
from trilobite.runtime.step.step_list import COMPARED, RECORDED

pytestmark = pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")

STEPS = 30
Packed = Callable[[str], Path]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return cache(lambda kind: pack(kind, tmp_path_factory.mktemp(kind)))


def translations(model: PreTrainedModel) -> list[Tensor]:
    """Of two sources in turns, which are not as long as each other: logits, then what the caches hold."""
    givens = [encoded(model, tokens(length, length)[None]) for length in (9, 23)]
    made = [
        x
        for part in range(3)
        for at, g in enumerate(givens)
        for x in read(model, g, tokens(STEPS // 3, 9 * part + at))
    ]
    return made + [t for given in givens for t in held(given[CACHE])]


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_two_sources_in_turns(kind: str, packed: Packed) -> None:
    """Further than the largest distance that a bias knows, and than the table of positions that one begins with."""
    model = load(str(packed(kind)))
    ours = translations(model)
    step = step_of(model)
    assert step.why is None or kind == "m2m100"
    assert (step.ready is not None and step.compared == COMPARED) or kind == "m2m100"
    assert same(ours, translations(plain(model)))


@pytest.mark.parametrize("kind", ["switch_transformers", "m2m100"])
def test_the_same_translations(kind: str, packed: Packed) -> None:
    """Greedily and with beams, of sources of one batch and of one alone, by `generate`."""
    model = load(str(packed(kind)))

    def made(model: PreTrainedModel) -> list[Any]:
        found = []
        for count, beams in ((1, 1), (1, 3), (3, 1), (1, 1)):
            source = tokens(count * 12, count).view(count, 12)
            asked = {"max_new_tokens": 14, "do_sample": False, "num_beams": beams}
            found.append(model.generate(source, attention_mask=torch.ones_like(source), **asked).tolist())
        return found

    ours = made(model)
    assert step_of(model).ready is not None
    assert ours == made(plain(model))


def test_what_a_step_returns(packed: Packed) -> None:
    """What the model itself returns: with what the encoder made."""
    model = load(str(packed("switch_transformers")))
    given = encoded(model, tokens(9)[None])
    read(model, given, tokens(1 + RECORDED + COMPARED))
    with torch.inference_mode():
        found = model(decoder_input_ids=tokens(1)[None], use_cache=True, **given)
        assert step_of(model).compared == COMPARED
        theirs = plain(model)(decoder_input_ids=tokens(1)[None], use_cache=True, **given)
    assert type(found) is type(theirs)
    assert list(found) == list(theirs)
    assert found.encoder_last_hidden_state is given["encoder_outputs"][0]
    assert vars(found).keys() == vars(theirs).keys()


@pytest.mark.parametrize("kind", ["switch_transformers", "m2m100"])
def test_a_source_with_padding(kind: str, packed: Packed) -> None:
    """At its end, where it is another source's for the list; before its beginning, where it is no step."""
    model = load(str(packed(kind)))

    def made(model: PreTrainedModel) -> list[Tensor]:
        given = encoded(model, tokens(9)[None])
        found = read(model, given, tokens(8))
        for mask in ([1] * 7 + [0] * 2, [0] + [1] * 8):
            given["attention_mask"] = torch.tensor([mask])
            found += read(model, given, tokens(4, 1))
        return found

    assert same(made(model), made(plain(model)))


@pytest.mark.parametrize("kind", ["switch_transformers", "t5"])
def test_caches_that_get_layers_as_they_are_needed(kind: str, packed: Packed) -> None:
    """As `trilobite translate` makes them, and others, with layers for the encoder's, for the same list."""
    model = load(str(packed(kind)))

    def made(model: PreTrainedModel) -> list[Tensor]:
        givens = [encoded(model, tokens(length)[None]) for length in (9, 5)]
        givens[0][CACHE] = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return [x for part in range(2) for given in givens for x in read(model, given, tokens(8, part))]

    ours = made(model)
    assert (step_of(model).why, step_of(model).compared) == (None, COMPARED)
    assert same(ours, made(plain(model)))


def test_tables_that_grow(packed: Packed) -> None:
    """Positions beyond those that there are, of which the model makes more every few steps."""
    model = load(str(packed("m2m100")))
    given, ids = encoded(model, tokens(9)[None]), tokens(40)
    ours = read(model, given, ids[:15])
    step = step_of(model)
    assert step.compared == COMPARED
    ours += read(model, given, ids[15:])
    assert step.failures > 0
    assert same(ours, read(plain(model), encoded(model, tokens(9)[None]), ids))


def biases(model: PreTrainedModel) -> nn.Parameter:
    return next(p for n, p in model.named_parameters() if "decoder" in n and "relative_attention_bias" in n)


@pytest.mark.parametrize("change", ["bias", "source", "strides", "copy"])
def test_what_changes_between_two_steps(change: str, packed: Packed) -> None:
    """Numbers by distance, and keys of the source, in their places or in others; a list has no copies of these."""
    model = load(str(packed("t5")))

    def made(model: PreTrainedModel) -> list[Tensor]:
        given = encoded(model, tokens(9)[None])
        found = read(model, given, tokens(10))
        layer = given[CACHE].cross_attention_cache.layers[1]
        if change == "bias":
            with torch.no_grad():
                biases(model).fill_(1.5)
        elif change == "source":
            layer.keys, layer.values = layer.keys.flip(2), layer.values.flip(2)
        elif change == "strides":
            layer.values = layer.values.transpose(1, 2).contiguous().transpose(1, 2)
            layer.keys = layer.keys.contiguous()
        else:
            given[CACHE] = copy.deepcopy(given[CACHE])
            with torch.inference_mode():
                layer.keys.zero_()
        return found + read(model, given, tokens(10, 1))

    other = load(str(packed("t5")))
    ours = made(model)
    assert (step_of(model).ready is None) == (change == "strides")
    assert same(ours, made(plain(other)))


def test_a_bias_that_is_not_one_of_distances(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that somebody changes before they are added: no list, and the bits of the model's own."""
    model = load(str(packed("t5")))
    owner: Any = next(
        m for n, m in model.named_modules() if "decoder" in n and hasattr(m, "relative_attention_bias")
    )
    real = type(owner).compute_bias

    def alternating(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        bias: Tensor = real(self, *args, **kwargs)
        return bias + (torch.arange(bias.shape[3]) % 2).to(bias.dtype) if self is owner else bias

    monkeypatch.setattr(type(owner), "compute_bias", alternating)
    ours = read(model, encoded(model, tokens(9)[None]), tokens(8))
    step = step_of(model)
    assert step.ready is None
    assert "distances" in str(step.why)
    assert same(ours, read(plain(model), encoded(model, tokens(9)[None]), tokens(8)))


def test_a_planted_fault(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is read from its second row on: comparing finds it."""
    model = load(str(packed("t5")))
    follow = Source.follow

    def late(self: Source, layer: Any, lengths: list[int] | None) -> None:
        follow(self, layer, lengths)
        self.natives[0].first = 1

    monkeypatch.setattr(Source, "follow", late)
    read(model, encoded(model, tokens(9)[None]), tokens(8))
    assert "logits are other ones" in str(step_of(model).why)


def test_caches_of_other_kinds(packed: Packed) -> None:
    """A decoder's cache alone, and one whose source nobody has read yet: the model's own forward."""
    model = load(str(packed("bart")))
    given = encoded(model, tokens(9)[None])
    read(model, given, tokens(8))
    step = step_of(model)
    assert step.ready is not None
    given[CACHE] = EncoderDecoderCache(given[CACHE].self_attention_cache, DynamicCache())
    ours = read(model, given, tokens(3, 2))
    again = encoded(model, tokens(9)[None])
    other = load(str(packed("bart")))
    read(plain(other), again, tokens(8))
    again[CACHE] = EncoderDecoderCache(again[CACHE].self_attention_cache, DynamicCache())
    assert same(ours, read(other, again, tokens(3, 2)))
