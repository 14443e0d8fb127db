"""Our loops beside transformers' own: the same tokens, with finished sentences in the batch and without."""

from collections.abc import Callable

import pytest
import torch
from support.translators import Noise, build, nllb, sources, switch, t5
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessorList, PreTrainedModel

from trilobite.errors import EvaluationError
from trilobite.runtime.translate.decoding import Decoded, Decoding
from trilobite.runtime.translate.rows import Pruning, rows_are_coupled

MOST = 16
SEED: dict[Callable[[], PreTrainedModel], int] = {switch: 3, nllb: 2, t5: 2}  # early and late finishers
EOS = 1


def settings(beams: int, **others: object) -> dict[str, object]:
    chosen = {"num_beams": beams, "do_sample": False, "max_new_tokens": MOST, "use_cache": True}
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())  # theirs has as many layers as the encoder
    return chosen | {"logits_processor": LogitsProcessorList([Noise()]), "past_key_values": cache} | others


def ours(
    model: PreTrainedModel,
    source: Tensor,
    mask: Tensor,
    beams: int,
    pruning: Pruning = "compact",
    limits: Tensor | None = None,
    **others: object,
) -> Decoded:
    limits = torch.full((len(source),), MOST) if limits is None else limits
    search = Decoding(source, limits=limits, n_best=beams, pruning=pruning)
    with torch.inference_mode():
        return model.generate(
            source, attention_mask=mask, custom_generate=search, **settings(beams, **others)
        )


def theirs(
    model: PreTrainedModel, source: Tensor, mask: Tensor, beams: int, **others: object
) -> tuple[list[list[list[int]]], Tensor | None]:
    """transformers' own hypotheses [B][beams], cut behind the first EOS, and their scores [B, beams]."""
    more = {"num_return_sequences": beams, "return_dict_in_generate": True, "output_scores": True}
    with torch.inference_mode():
        made = model.generate(source, attention_mask=mask, **settings(beams, **more, **others))
    texts = [row[1 : row.index(EOS, 1) + 1 if EOS in row[1:] else None] for row in made.sequences.tolist()]
    scores = made.sequences_scores.view(-1, beams) if beams > 1 else None
    return [texts[i : i + beams] for i in range(0, len(texts), beams)], scores


def tokens(decoded: Decoded) -> list[list[list[int]]]:
    return [[h.tokens for h in found] for found in decoded.best]


@pytest.mark.parametrize("beams", [1, 4, 5])
@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("make", [switch, nllb, t5])
def test_the_same_tokens_as_transformers(
    make: Callable[[], PreTrainedModel], early: bool | str, beams: int
) -> None:
    model = build(make, SEED[make])
    source, mask = sources(9)
    more = {"early_stopping": early, "length_penalty": 0.8} if beams > 1 else {}
    expected, scores = theirs(model, source, mask, beams, **more)
    lengths = {len(found[0]) for found in expected}
    assert len(lengths) > 2, "early and late finishers"
    for pruning in ("off", "compact"):
        made = ours(model, source, mask, beams, pruning, **more)
        assert tokens(made) == expected
        if scores is not None:
            found = torch.tensor([[h.score for h in best] for best in made.best])
            torch.testing.assert_close(found, scores)


@pytest.mark.parametrize("beams", [1, 4])
def test_finished_sentences_leave_the_batch(beams: int) -> None:
    model = build(nllb, 1)
    source, mask = sources(9)
    early = {"early_stopping": True} if beams > 1 else {}
    whole, pruned = (ours(model, source, mask, beams, pruning, **early) for pruning in ("off", "compact"))
    assert tokens(whole) == tokens(pruned)
    steps = whole.row_steps // (9 * beams)
    assert whole.row_steps == 9 * beams * steps
    assert pruned.row_steps < whole.row_steps
    if beams == 1:
        assert pruned.row_steps == sum(len(found[0].tokens) for found in pruned.best)


@pytest.mark.parametrize("beams", [1, 5])
def test_a_sentence_alone_and_in_a_batch(beams: int) -> None:
    model = build(switch, 2)
    source, mask = sources(7, seed=3)
    together = ours(model, source, mask, beams)
    for row in range(len(source)):
        length = int(mask[row].sum())
        alone = ours(model, source[row : row + 1, :length], mask[row : row + 1, :length], beams)
        assert tokens(alone)[0] == tokens(together)[row]


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("pruning", ["off", "compact"])
def test_each_sentence_has_its_own_limit(beams: int, pruning: Pruning) -> None:
    model = build(nllb, 0)
    source, mask = sources(6, seed=1)
    limits = torch.tensor([3, MOST, 1, 5, 9, MOST])
    made = tokens(ours(model, source, mask, beams, pruning, limits=limits))
    for row, limit in enumerate(limits.tolist()):
        one = slice(row, row + 1)
        expected, _ = theirs(model, source[one], mask[one], beams, max_new_tokens=limit)
        assert made[row] == expected[0]


def test_the_first_token_is_forced() -> None:
    model = build(nllb, 0)
    source, mask = sources(4)
    for beams in (1, 4):
        made = ours(model, source, mask, beams, forced_bos_token_id=7)
        assert tokens(made) == theirs(model, source, mask, beams, forced_bos_token_id=7)[0]
        assert all(h.tokens[0] == 7 for found in made.best for h in found)


def test_weights_that_are_not_finite() -> None:
    model = build(t5)
    model.decoder.block[1].layer[-1].DenseReluDense.wo.weight.data[0, 0] = torch.nan
    with pytest.raises(EvaluationError, match=r"begins in decoder\.block\.1"):
        ours(model, *sources(3), beams=4)


def test_rows_that_depend_on_each_other_stay_together() -> None:
    model = build(nllb)
    assert not rows_are_coupled(model)
    model.config.moe_eval_capacity_token_fraction = 0.5
    assert rows_are_coupled(model)
    model = build(switch)
    assert not rows_are_coupled(model)
    model.generation_config.encoder_no_repeat_ngram_size = 3
    assert rows_are_coupled(model)
