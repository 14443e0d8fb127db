"""Steps of several texts, the shorter of them filled up in front, have the bits of the model's own."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from support.every_architecture import build
from support.steps import assert_same, plain, step_of, tokens
from torch import Tensor
from transformers import DynamicCache, MixtralForCausalLM, PreTrainedModel

from trilobite.kernels.ops import attends
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.step import texts as lists
from trilobite.runtime.step.rows import Rows
from trilobite.runtime.step.step_list import COMPARED, RECORDED

pytestmark = pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")

KINDS = ("mixtral", "deepseek", "deepseek_v2", "qwen3_moe", "gpt_oss")
OTHERS: dict[str, dict[str, Any]] = {
    "llama4_text": {"attention_chunk_size": 16},
    "qwen3_next": {},  # convolutions and the delta rule
    "granitemoehybrid": {},  # state spaces
    "deepseek_v32": {"index_topk": 24},  # an index of keys
}
PROMPT, WORTH = 6, 2
READY = WORTH + RECORDED + COMPARED
Packed = Callable[[str], Path]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        if kind in OTHERS:
            build(kind, folder / "original", OTHERS[kind])
        else:
            build_checkpoint(kind, folder / "original", dtype=torch.bfloat16)
        compress(str(folder / "original"), folder / "packed", load_recipe("rtn3"))
        return folder / "packed"

    return cache(make)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are made after fewer steps than otherwise."""
    monkeypatch.setattr(lists, "WORTH", WORTH)


class Batch:
    """Texts that go on together: each but the first is filled up in front, by one token more than the one before."""

    def __init__(
        self, model: PreTrainedModel, texts: int, *, filled: bool = True, prompt: int = PROMPT
    ) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.before = torch.arange(texts)[:, None] * int(filled)
        self.made: list[Tensor] = []
        self.go(prompt)

    @torch.inference_mode()
    def go(self, new: int, seed: int = 0, **changes: Any) -> "Batch":
        """Some tokens more, all at once."""
        first, texts = self.cache.get_seq_length(), len(self.before)
        places = torch.arange(first + new) - self.before
        given = {"attention_mask": (places >= 0).long(), "position_ids": places[:, first:].clamp_min(0)}
        if not bool(self.before.any()):
            given = {}
        ids = tokens(texts * new, seed).view(texts, new)
        made = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **(given | changes))
        self.made.append(made.logits[:, -1:])
        return self

    def steps(self, count: int, seed: int = 0) -> "Batch":
        """Some tokens more, one after the other."""
        for i in range(count):
            self.go(1, 100 * seed + i)
        return self

    def told(self) -> tuple[list[Tensor], DynamicCache]:
        return self.made, self.cache


def compared(kind: str, packed: Packed, tell: Callable[[PreTrainedModel], list[Batch]]) -> Any:
    """What a model has for its lists, after batches had the bits of its own forward."""
    model = load(str(packed(kind)))
    ours = tell(model)
    step = step_of(model)
    for made, expected in zip(ours, tell(plain(model)), strict=True):
        assert_same(made.told(), expected.told())
    return step


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_bits_of_batches(kind: str, packed: Packed) -> None:
    """Of two sizes in turns, filled up and not, and of one text between them; longer than chunks are, and than what an
    index of keys chooses."""

    def tell(model: PreTrainedModel) -> list[Batch]:
        three, five, two = Batch(model, 3), Batch(model, 5), Batch(model, 2, filled=False)
        one = Batch(model, 1)
        for turn in range(3):
            three.steps(READY + 1, turn)
            one.steps(3, turn)
            five.steps(READY + 1, turn)
            two.steps(READY + 1, turn)
        return [three, five, two, one]

    others = compared(kind, packed, tell).others.steps
    assert sorted(others) == [2, 3, 5]
    assert all(step.right for step in others.values())
    assert [others[texts].compared_padded for texts in (2, 3, 5)] == [False, True, True]


def test_windows_beside_what_fills_up(packed: Packed) -> None:
    def tell(model: PreTrainedModel) -> list[Batch]:
        model.config.sliding_window = 16
        return [Batch(model, 8, prompt=9).steps(40)]

    assert compared("mixtral", packed, tell).others.steps[8].right


def test_texts_that_a_batch_loses(packed: Packed) -> None:
    """As in a search: a cache of fewer texts, which were others' places before, goes on from the list of so many."""

    def tell(model: PreTrainedModel) -> list[Batch]:
        batch = Batch(model, 4).steps(READY)
        rows = torch.tensor([3, 1, 3])
        batch.cache.reorder_cache(rows)
        batch.before = batch.before[rows]
        return [batch.steps(READY + 2, 1)]

    others = compared("deepseek", packed, tell).others.steps
    assert sorted(others) == [3, 4]
    assert all(step.right for step in others.values())


def test_batches_of_generate(packed: Packed) -> None:
    """By a tokenizer that fills up on the left, as transformers wants it of whoever generates."""
    model = load(str(packed("qwen3_moe")))
    ids = tokens(24).view(3, 8)
    mask = torch.ones_like(ids)
    ids[1, :5] = mask[1, :5] = ids[2, :1] = mask[2, :1] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    ours = model.generate(ids, **asked)
    step = step_of(model)
    assert step.others.steps[3].right
    assert torch.equal(ours, plain(model).generate(ids, **asked))


def test_filled_up_later(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that texts of one length made is compared once more, with what skips rows; a planted fault is found."""
    model = load(str(packed("mixtral")))
    Batch(model, 3, filled=False).steps(READY + 1)
    step = step_of(model).others.steps[3]
    assert step.right
    assert not step.compared_padded
    ours = Batch(model, 3).steps(4)
    assert step.right
    follow = Rows.follow
    monkeypatch.setattr(Rows, "follow", lambda self, layer, padding=None: follow(self, layer))
    step.compared_padded = False
    wrong = Batch(model, 3).steps(4)
    assert step.why == "its logits are other ones"
    monkeypatch.undo()
    expected = Batch(plain(model), 3).steps(4)
    assert_same(ours.told(), expected.told())
    assert_same(wrong.told(), expected.told())


@pytest.mark.parametrize("asked", ["holes", "behind", "positions", "one"])
def test_what_is_no_step_of_a_batch(asked: str, packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes, texts that are filled up behind or have no positions, and one text that is filled up."""
    model = load(str(packed("mixtral")))
    batch = Batch(model, 3).steps(READY)
    step = step_of(model)
    several = step.others.steps[3]
    assert several.right
    if asked == "one":
        batch = Batch(model, 2)
        batch.cache.reorder_cache(torch.tensor([1]))
        batch.before = batch.before[1:]
    for each in (step, several):
        monkeypatch.setattr(each, "step", None)
    mask = (torch.arange(batch.cache.get_seq_length() + 1) - batch.before >= 0).long()
    changes: dict[str, Any] = {}
    if asked == "holes":
        mask[0, 2] = 0
    if asked == "behind":
        mask[0, -2:] = 0
    if asked == "positions":
        changes["position_ids"] = None
    expected = copy.deepcopy(batch)
    expected.model = batch.model
    batch.go(1, 5, attention_mask=mask, **changes)
    plain(model)
    assert_same(batch.told(), expected.go(1, 5, attention_mask=mask, **changes).told())


def test_a_mask_that_goes_elsewhere(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model computes from its mask, beside its attention, is no part of a list."""
    forward = MixtralForCausalLM.forward

    def reads_it(self: Any, **kwargs: Any) -> Any:
        made = forward(self, **kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None:
            made.logits = made.logits * mask[:, -1:, None]
        return made

    monkeypatch.setattr(MixtralForCausalLM, "forward", reads_it)

    def tell(model: PreTrainedModel) -> list[Batch]:
        one = Batch(model, 1).steps(READY)  # of whose list more is known
        return [one, Batch(model, 3).steps(WORTH + 2)]

    step = compared("mixtral", packed, tell).others.steps[3]
    assert step.ready is None
    assert "a mask, outside of the engine's attention" in step.why
