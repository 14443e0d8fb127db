"""Steps of several texts, from lists by their number: the bits of the model's own, while texts leave and move."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.encoders import KINDS, encoded, held, pack, read, same
from support.steps import plain, step_of, tokens
from torch import Tensor
from transformers import PreTrainedModel

from trilobite.kernels.ops import attends
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.load import load
from trilobite.runtime.step import texts as lists
from trilobite.runtime.step.rows import Source
from trilobite.runtime.step.step_list import COMPARED, RECORDED, WAITS
from trilobite.runtime.translate.decoding import Decoding
from trilobite.runtime.translate.rows import Pruning

pytestmark = pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")

READY = RECORDED + COMPARED
WORTH = 3
Packed = Callable[[str], Path]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return cache(lambda kind: pack(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are made after fewer steps than otherwise."""
    monkeypatch.setattr(lists, "WORTH", WORTH)


def some(texts: int, steps: int, seed: int = 0) -> Tensor:
    return tokens(texts * steps, seed).view(texts, steps)


def padded(texts: int, longest: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sources and masks of texts, each shorter than the one before."""
    mask = torch.arange(longest) < torch.tensor([[max(1, longest - 2 * i)] for i in range(texts)])
    return some(texts, longest, seed), mask.long()


def batches(model: PreTrainedModel) -> list[Tensor]:
    """Batches of two sizes in turns, and one text between them: logits, then what the caches hold."""
    givens = [
        encoded(model, *padded(texts, length, texts)) for texts, length in ((3, 11), (5, 17), (1, 8), (3, 6))
    ]
    made = []
    for part in range(3):
        for given in givens:
            made += read(model, given, some(len(given["attention_mask"]), 8, part))
    return made + [t for given in givens for t in held(given[CACHE])]


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_batches_in_turns(kind: str, packed: Packed) -> None:
    model = load(str(packed(kind)))
    ours = batches(model)
    others = step_of(model).others.steps
    assert sorted(others) == [3, 5]
    assert [(step.why, step.compared) for step in others.values()] == [(None, COMPARED)] * 2
    assert same(ours, batches(plain(model)))


@torch.inference_mode()
def leaving(model: PreTrainedModel) -> list[Tensor]:
    """Texts change places before each step, as beams do, and some leave."""
    given, made = encoded(model, *padded(6, 9)), []
    for part, stay in enumerate(([5, 3, 0, 1, 2, 4], [1, 1, 0, 4], [2, 0, 3, 3], [1], [0])):
        texts = len(given["attention_mask"])
        for step in range(WORTH + READY + 2):
            made += read(model, given, some(texts, 1, 9 * part + step))
            if step % 3 == 0:
                given[CACHE].self_attention_cache.reorder_cache(torch.arange(texts).flip(0))
        rows = torch.tensor(stay)
        given[CACHE].reorder_cache(rows)
        given["attention_mask"] = given["attention_mask"][rows]
        encoder = given["encoder_outputs"]
        given["encoder_outputs"] = type(encoder)(last_hidden_state=encoder.last_hidden_state[rows])
    return made + held(given[CACHE])


@pytest.mark.parametrize("kind", ["switch_transformers", "nllb-moe", "bart"])
def test_texts_that_leave(kind: str, packed: Packed) -> None:
    model = load(str(packed(kind)))
    ours = leaving(model)
    step = step_of(model)
    assert step.ready is not None
    assert sorted(step.others.steps) == [4, 6]
    assert all(other.ready is not None for other in step.others.steps.values())
    assert same(ours, leaving(plain(model)))


@pytest.mark.parametrize("pruning", ["compact", "mask", "off"])
@pytest.mark.parametrize("beams", [1, 3])
def test_the_same_translations(beams: int, pruning: Pruning, packed: Packed) -> None:
    """By the loops of `trilobite translate`, whose masks are hooks: with these there is no list."""
    model = load(str(packed("switch_transformers")))
    source, mask = padded(4, 12)
    limits = torch.tensor([20, 30, 14, 26])

    def made(model: PreTrainedModel) -> Any:
        search = Decoding(source, limits=limits, n_best=1, pruning=pruning)
        asked = {"num_beams": beams, "do_sample": False, "max_new_tokens": 30, "custom_generate": search}
        with torch.inference_mode():
            return [model.generate(source, attention_mask=mask, **asked).best for _ in range(2)]

    ours = made(model)
    steps = step_of(model).others.steps
    assert any(step.ready is not None for step in steps.values()) == (pruning != "mask")
    assert ours == made(plain(model))


def test_lists_that_take_too_much(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not needed for longest goes, and what it held with it; the bits stay."""
    model = load(str(packed("switch_transformers")))
    givens = [encoded(model, *padded(texts, 8)) for texts in (2, 3, 4)]
    for given in givens:
        read(model, given, some(len(given["attention_mask"]), WORTH + READY))
    others = step_of(model).others
    sizes = {texts: step.ready.nbytes for texts, step in others.steps.items() if step.ready is not None}
    assert sorted(sizes) == [2, 3, 4]
    monkeypatch.setattr(lists, "MOST_BYTES", sizes[2] + sizes[4])
    ours = read(model, givens[0], some(2, 5, 1))
    assert sorted(others.steps) == [2, 4]
    resting = others.steps[4].ready
    assert resting is not None
    assert all(rows.views is None and not rows.keys.numel() for rows in resting.rows.values())
    theirs = encoded(model, *padded(2, 8))
    expected = read(plain(model), theirs, some(2, WORTH + READY)) + read(model, theirs, some(2, 5, 1))
    assert same(ours, expected[-5:])


def test_half_a_list_is_none(packed: Packed) -> None:
    """A batch that has gone on to other texts after one recorded step: it is met as often again."""
    model = load(str(packed("switch_transformers")))
    first, second = (encoded(model, *padded(texts, 8)) for texts in (2, 3))
    read(model, first, some(2, 1 + WORTH + 1))  # the first has no cache yet
    others = step_of(model).others
    assert len(others.steps[2].traces) == 1
    read(model, second, some(3, 2 + WORTH))
    assert others.steps[2].traces == []
    assert others.met[2] == 0


def test_a_number_that_is_the_position_by_chance(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written down once, at the position that is NLLB's number for padding, which it adds to others: and later again."""
    monkeypatch.setattr(lists, "WORTH", 0)
    model = load(str(packed("nllb-moe")))
    assert model.config.pad_token_id == 1
    step = step_of(model)

    def made(model: PreTrainedModel) -> list[Tensor]:
        found = read(model, encoded(model, *padded(1, 8)), some(1, 16))
        if model.forward is step:
            assert step.right
        found += read(model, given := encoded(model, *padded(3, 8)), some(3, 3))
        if model.forward is step:
            assert step.others.steps[3].why == "its logits are other ones"
        return found + read(model, given, some(3, WAITS[0] + READY, 1))

    ours = made(model)
    assert step.others.steps[3].right
    assert same(ours, made(plain(model)))


def test_more_texts_than_lists_are_for(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "MOST_TEXTS", 2)
    model = load(str(packed("switch_transformers")))
    read(model, encoded(model, *padded(3, 8)), some(3, WORTH + READY + 1))
    assert not step_of(model).others.steps


def test_a_planted_fault(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that are all as long as the longest: comparing finds it."""
    follow = Source.follow
    monkeypatch.setattr(Source, "follow", lambda self, layer, lengths: follow(self, layer, None))
    model = load(str(packed("m2m100")))
    read(model, encoded(model, *padded(3, 8)), some(3, WORTH + READY + 1))
    assert step_of(model).others.steps[3].why == "its logits are other ones"
