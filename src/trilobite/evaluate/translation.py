"""BLEU and chrF of translations, as sacrebleu counts them.

score_translations(translator, *read_parallel(Path("src.en"), Path("ref.de"), EvaluationError)).bleu
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from transformers import PreTrainedModel

from trilobite.errors import MissingExtraError
from trilobite.evaluate.forced import ForcedScore, forced_score
from trilobite.models.pairs import encode_pairs
from trilobite.runtime.translate.translator import Translator


@dataclass(frozen=True, kw_only=True)
class TranslationScore:
    """How near a model's translations come to the references: 0 to 100.

    bleu: of the whole text, cased, tokenized by sacrebleu's 13a    chrf: character n-grams up to 6
    tokens: made by the model    seconds: of translating alone
    """

    bleu: float
    chrf: float
    sentences: int
    tokens: int
    seconds: float


def score_translations(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> TranslationScore:
    """Translate, and compare with one reference each. Raises MissingExtraError without sacrebleu, PromptError."""
    check_scorer()
    ids = translator.encode(sources)
    started = perf_counter()
    texts, tokens, done = [""] * len(ids), 0, 0
    for places, translations in translator.run(ids):
        for place, translation in zip(places, translations, strict=True):
            texts[place] = translation.texts[0]
            tokens += translation.tokens
        done += len(places)
        if progress:
            progress(done, len(ids))
    seconds = perf_counter() - started
    bleu, chrf = corpus_scores(texts, references)
    return TranslationScore(bleu=bleu, chrf=chrf, sentences=len(ids), tokens=tokens, seconds=seconds)


def score_forced(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    original: PreTrainedModel,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ForcedScore:
    """How far the model is from its original on the references, word by word behind what they say before.

    Raises EvaluationError.
    """
    towards = translator.direction
    lines = [
        (towards.prefix + a, b) for a, b in zip(sources, references, strict=True) if a.strip() and b.strip()
    ]
    pairs = encode_pairs(
        translator.tokenizer, [a for a, _ in lines], [b for _, b in lines], first=towards.first
    )
    batch = translator.search.batch
    return forced_score(translator.model, pairs, batch=batch, reference=original, progress=progress)


def corpus_scores(texts: Sequence[str], references: Sequence[str]) -> tuple[float, float]:
    """BLEU and chrF of texts against one reference each. Raises MissingExtraError without sacrebleu."""
    sacrebleu = check_scorer()
    return (
        float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score),
        float(sacrebleu.corpus_chrf(list(texts), [list(references)]).score),
    )


def check_scorer() -> Any:
    """The module sacrebleu. Raises MissingExtraError where it is not installed: before anything slow is done."""
    try:
        import sacrebleu
    except ImportError as e:
        raise MissingExtraError("BLEU needs sacrebleu; install it: pip install 'trilobite[eval]'") from e
    return sacrebleu
