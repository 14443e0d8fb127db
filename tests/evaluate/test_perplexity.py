"""Run: python -m pytest tests/test_perplexity.py"""

import copy
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from trilobite.errors import EvaluationError
from trilobite.evaluate import perplexity
from trilobite.evaluate.perplexity import score, tokenize_file, windows

VOCAB, CONTEXT = 40, 12


def tiny_model(seed: int, **changes: object) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = MixtralForCausalLM(MixtralConfig(**{"vocab_size": VOCAB, **sizes, **heads, **changes})).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # an untouched random model is so uniform that every mistake hides
    return model


@pytest.fixture(scope="module")
def model() -> MixtralForCausalLM:
    return tiny_model(0)


@pytest.fixture(scope="module")
def other() -> MixtralForCausalLM:
    return tiny_model(1)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Five windows and a rest of five tokens."""
    return torch.randint(VOCAB, (5 * CONTEXT + 5,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")


@torch.no_grad()
def probabilities(model: MixtralForCausalLM, window: Tensor) -> list[list[float]]:
    """[T][V] float64, one window at a time, by the definition of softmax."""
    rows = []
    for logits in model(window[None]).logits[0].tolist():
        weights = [math.exp(x - max(logits)) for x in logits]
        rows.append([w / sum(weights) for w in weights])
    return rows


def optq_perplexity(model: MixtralForCausalLM, ids: Tensor) -> float:
    """The loop of OPTQ's llama_eval, token by token."""
    nlls = []
    count = len(ids) // CONTEXT
    for i in range(count):
        window = ids[i * CONTEXT : (i + 1) * CONTEXT]
        p = probabilities(model, window)
        losses = [-math.log(p[t][window[t + 1]]) for t in range(CONTEXT - 1)]
        nlls.append(sum(losses) / len(losses) * CONTEXT)
    return math.exp(sum(nlls) / (count * CONTEXT))


def test_perplexity_is_optqs(model, ids):
    result = score({"m": model}, ids, context=CONTEXT, batch=2)["m"]
    assert result.perplexity == pytest.approx(optq_perplexity(model, ids), rel=1e-5)  # float32 softmax
    assert (result.windows, result.tokens, result.context) == (5, 5 * 11, CONTEXT)
    assert result.seconds > 0
    assert result.kl is result.top1 is result.reference_perplexity is None
    assert abs(result.perplexity - VOCAB) > 5, (
        "a uniform model would score its vocabulary: the test proves nothing"
    )


def test_kl_and_agreement_by_hand(model, other, ids):
    kl, same = 0.0, 0
    for window in windows(ids, CONTEXT):
        for p, q in list(zip(probabilities(model, window), probabilities(other, window), strict=True))[:-1]:
            kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            same += p.index(max(p)) == q.index(max(q))
    result = score({"m": other}, ids, context=CONTEXT, batch=3, reference=model)["m"]
    assert result.kl == pytest.approx(kl / 55, rel=1e-5)
    assert result.top1 == same / 55
    assert result.reference_perplexity == pytest.approx(optq_perplexity(model, ids), rel=1e-5)
    assert result.perplexity == pytest.approx(optq_perplexity(other, ids), rel=1e-5)


@pytest.mark.parametrize("elements", [1, 3 * VOCAB, 2**23])
@pytest.mark.parametrize("batch", [1, 2, 5, 100])
def test_batches_and_chunks_change_nothing(model, other, ids, elements, batch, monkeypatch):
    expected = score({"m": other}, ids, context=CONTEXT, batch=1, reference=model)["m"]
    monkeypatch.setattr(perplexity, "CHUNK_ELEMENTS", elements)
    result = score({"m": other}, ids, context=CONTEXT, batch=batch, reference=model)["m"]
    assert result.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
    assert result.kl == pytest.approx(expected.kl, rel=1e-4)
    assert (result.top1, result.tokens) == (expected.top1, expected.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_models_are_exactly_zero_apart(model, ids, dtype):
    original = copy.deepcopy(model).to(dtype)
    twin = copy.deepcopy(original)
    for candidate in (twin, original):
        result = score({"m": candidate}, ids, context=CONTEXT, batch=2, reference=original)["m"]
        assert (result.kl, result.top1) == (0.0, 1.0)
        assert result.perplexity == result.reference_perplexity


def test_one_perturbed_weight_raises_kl(model, ids):
    results = []
    for size in (0.0, 0.5, 4.0):
        broken = copy.deepcopy(model)
        with torch.no_grad():
            broken.model.layers[1].self_attn.o_proj.weight[3, 2] += size
        results.append(score({"m": broken}, ids, context=CONTEXT, batch=5, reference=model)["m"].kl)
    assert results[0] == 0 < results[1] < results[2]


def test_reference_runs_once_per_batch_for_all_models(model, other, ids):
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    steps = []
    try:
        both = {"a": other, "b": other}
        result = score(
            both, ids, context=CONTEXT, batch=2, reference=model, progress=lambda *s: steps.append(s)
        )
    finally:
        hook.remove()
    assert len(calls) == 3
    assert steps == [(2, 5), (4, 5), (5, 5)]
    assert list(result) == ["a", "b"]
    assert result["a"].kl == result["b"].kl > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_logits_name_the_model(model, ids, value):
    broken = copy.deepcopy(model)
    broken.register_forward_hook(lambda _m, _a, out: out.logits[-1, 3, 7].fill_(value) and None)
    with pytest.raises(EvaluationError, match=r"^int2: .*NaN or infinite"):
        score({"fine": model, "int2": broken}, ids, context=CONTEXT, batch=2)
    with pytest.raises(EvaluationError, match=r"^reference: .*NaN or infinite"):
        score({"fine": model}, ids, context=CONTEXT, batch=2, reference=broken)


def test_a_hopeless_model_scores_infinity_rather_than_failing(model):
    assert perplexity.mean_perplexity(5000.0, 1) == math.inf


def test_training_mode_is_left(ids):
    dropping = tiny_model(0, attention_dropout=0.9)
    expected = score({"m": dropping}, ids, context=CONTEXT, batch=5)["m"].perplexity
    assert score({"m": dropping.train()}, ids, context=CONTEXT, batch=5)["m"].perplexity == expected


def test_windows_drop_the_rest(ids):
    result = windows(ids, CONTEXT)
    assert result.shape == (5, CONTEXT)
    assert torch.equal(result.flatten(), ids[: 5 * CONTEXT])
    assert windows(ids[:CONTEXT], CONTEXT).shape == (1, CONTEXT)


def test_limits_are_refused_with_the_flag(model, ids):
    with pytest.raises(EvaluationError, match=r"11 tokens, a window needs 12.*--context"):
        windows(ids[:11], CONTEXT)
    with pytest.raises(EvaluationError, match=r"--context 2"):
        windows(ids, 1)
    with pytest.raises(EvaluationError, match=r"m: made for 64 tokens, got 65; use --context 64"):
        score({"m": model}, ids, context=65, batch=1)
    with pytest.raises(EvaluationError, match=r"m: the text holds token 40, the vocabulary has 40"):
        score({"m": model}, torch.full((CONTEXT,), VOCAB), context=CONTEXT, batch=1)
    with pytest.raises(EvaluationError, match=r"vocabulary of 48, the reference has 40"):
        score({"m": tiny_model(0, vocab_size=48)}, ids, context=CONTEXT, batch=1, reference=model)
    with pytest.raises(EvaluationError, match=r"named 'reference'"):
        score({"reference": model}, ids, context=CONTEXT, batch=1, reference=model)


def test_a_file_is_one_text(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("Zeile eins\r\n\r\nZeile zwei: größer\n".encode())
    ids = tokenize_file(tokenizer, path)
    assert (ids.dtype, ids.shape) == (torch.int64, (len(path.read_bytes()),))
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == path.read_bytes().decode()


def test_lines_joined_as_optq_joins_rows(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" \n = Title = \n \n One . \n Two . \n")
    rows = ["", " = Title = \n", "", " One . \n", " Two . \n"]  # as the data set has them
    ids = tokenize_file(tokenizer, path, rows=True)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == "\n\n".join(rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"", "no text"), (b" \n", "no text"), (b"caf\xe9", "not UTF-8 at byte 3")],
)
def test_unusable_files(tokenizer, tmp_path: Path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EvaluationError, match=message) as e:
        tokenize_file(tokenizer, path)
    assert str(path) in str(e.value)
