"""Sentences in, translations out, whatever batches they fall into."""

from dataclasses import replace

import pytest
from support.architectures import build_model
from support.translators import LONGEST, build, nllb, nllb_tokenizer, switch, tokenizer
from transformers import T5Config, T5ForConditionalGeneration

from trilobite.errors import ArchitectureError, PromptError, SettingError
from trilobite.runtime.translate.batches import batches
from trilobite.runtime.translate.languages import direction
from trilobite.runtime.translate.translator import SPARE, Search, Translator

SENTENCES = ["a cat", "", "the dog sees the cat", "b", "  ", "two dogs and a horse run", "cat and dog"]


def test_batches_hold_sentences_of_about_one_length() -> None:
    lengths = [3, 9, 1, 4, 9, 2]
    assert batches(lengths, most=2) == [[1, 4], [3, 0], [5, 2]]
    assert batches(lengths, most=10, tokens=18) == [[1, 4], [3, 0, 5, 2]]
    assert batches(lengths, most=10, tokens=5) == [[1], [4], [3], [0], [5, 2]]
    assert batches([], most=3) == []


@pytest.mark.parametrize("beams", [1, 4])
def test_the_order_and_the_empty_lines_are_kept(beams: int) -> None:
    model = build(switch, 2)
    search = Search(beams=beams, n_best=beams, batch=3)
    made = Translator(model, tokenizer(), search=search).translate(SENTENCES)
    for sentence, translation in zip(SENTENCES, made, strict=True):
        (alone,) = Translator(model, tokenizer(), search=replace(search, batch=1)).translate([sentence])
        assert translation.texts == alone.texts
        assert translation.scores == pytest.approx(alone.scores, abs=1e-5)
        assert len(translation.texts) == beams
        assert translation.scores == sorted(translation.scores, reverse=True)
        if not sentence.strip():
            assert translation.texts[0] == ""
            assert translation.tokens == 0


def test_max_ratio_bounds_each_translation() -> None:
    model = build(switch, 2)
    model.lm_head.weight.data[1] = 0  # never the end
    translator = Translator(model, tokenizer(), search=Search(beams=1, max_ratio=0.5))
    ids = translator.encode(["a", "the dog sees"])
    made = translator.translate(["a", "the dog sees"])
    for row, translation in zip(ids, made, strict=True):
        assert translation.tokens == min(LONGEST, SPARE + -(-len(row) // 2))


def test_sentences_that_no_model_takes() -> None:
    translator = Translator(build(switch), tokenizer())
    with pytest.raises(PromptError, match=f"line 2: has 52 tokens, the model was made for {LONGEST}; split"):
        translator.encode(["a", "ab" * 25])
    with pytest.raises(ArchitectureError, match="no encoder"):
        Translator(build_model("mixtral"), tokenizer())


@pytest.mark.parametrize(
    "wrong",
    [{"beams": 0}, {"batch": 0}, {"n_best": 6}, {"n_best": 0}, {"max_ratio": 0.0}, {"length_penalty": 1e999}],
)
def test_searches_that_do_not_exist(wrong: dict[str, int]) -> None:
    with pytest.raises(SettingError):
        Search(**wrong)


LANGUAGES = ("eng_Latn", "deu_Latn", "fra_Latn", "zho_Hans", "zho_Hant")


def test_languages_of_the_tokenizer() -> None:
    model, words = build(nllb), nllb_tokenizer(*LANGUAGES)
    for name in ("de", "deu", "deu_Latn", "DEU_LATN"):
        assert direction(model, words, to=name, source=None).first == words.convert_tokens_to_ids("deu_Latn")
    assert direction(model, words, to="de", source="fr").source == "fra_Latn"
    with pytest.raises(SettingError, match="one of zho_Hans, zho_Hant"):
        direction(model, words, to="zh", source=None)
    with pytest.raises(
        SettingError, match="--to dee: this model has no such language; the nearest it has: deu_Latn"
    ):
        direction(model, words, to="dee", source=None)
    with pytest.raises(SettingError, match="--from xx"):
        direction(model, words, to="de", source="xx")
    with pytest.raises(SettingError, match="has 5 languages; say which one with --to"):
        direction(model, words, to=None, source=None)
    model.generation_config.forced_bos_token_id = words.convert_tokens_to_ids("fra_Latn")
    assert direction(model, words, to=None, source=None).first == words.convert_tokens_to_ids("fra_Latn")


def test_a_source_language_changes_what_the_model_reads() -> None:
    model, words = build(nllb), nllb_tokenizer(*LANGUAGES)
    read = {
        name: Translator(model, words, to="de", source=name).encode(["a cat"])[0] for name in ("en", "fr")
    }
    assert read["en"] != read["fr"]
    assert read["fr"][0] == words.convert_tokens_to_ids("fra_Latn")


def test_tasks_in_the_configuration() -> None:
    tasks = {
        "summarization": {"prefix": "summarize: "},
        "translation_en_to_de": {"prefix": "translate English to German: "},
        "translation_en_to_fr": {"prefix": "translate English to French: "},
    }
    config = T5Config(vocab_size=56, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, pad_token_id=0)
    config.task_specific_params = tasks
    model = T5ForConditionalGeneration(config)
    words = tokenizer()
    assert direction(model, words, to="de", source=None).prefix == "translate English to German: "
    with pytest.raises(SettingError, match=r"--to fl: .* nearest it has: fr"):
        direction(model, words, to="fl", source="en")
    with pytest.raises(SettingError, match="translates to de, fr"):
        direction(model, words, to=None, source=None)
    with pytest.raises(SettingError, match="--from de"):
        direction(model, words, to="fr", source="de")
    del tasks["translation_en_to_fr"]
    assert direction(model, words, to=None, source=None).prefix == "translate English to German: "
    config.task_specific_params = None
    assert not direction(model, words, to="de", source=None).declared
