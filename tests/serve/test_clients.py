"""What real clients get: the openai package and httpx, from a server in a process of its own."""

import json
from pathlib import Path

import httpx
import openai
import pytest

import trilobite
from tools.serving import TEMPLATE, Server
from trilobite.runtime.generate.text import Sampling, generate
from trilobite.runtime.load import load_tokenizer

JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "The sea is"}]
AS_TEXT = "user: The sea is\nassistant:"


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(talking: Path):
    """The text that `trilobite generate` makes."""
    model, tokenizer = trilobite.load(str(talking)), load_tokenizer(str(talking))

    def make(prompt: str, tokens: int, **sampling: object) -> str:
        return generate(model, tokenizer, prompt, tokens=tokens, sampling=Sampling(**sampling)).text

    return make


def test_a_chat_is_what_generate_makes(client: openai.OpenAI, expected) -> None:
    answer = client.chat.completions.create(model="talking", messages=HELLO, max_tokens=24)
    choice = answer.choices[0]
    assert choice.message.content == expected(AS_TEXT, 24)
    assert choice.finish_reason == "length"
    assert (answer.model, answer.usage.completion_tokens) == ("talking", 24)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_stream_says_the_same_in_pieces(client: openai.OpenAI, expected) -> None:
    chunks = list(client.chat.completions.create(model="talking", messages=HELLO, max_tokens=24, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == expected(AS_TEXT, 24)
    assert sum(bool(c.choices[0].delta.content) for c in chunks) > 12
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 24


def test_completions_and_responses(client: openai.OpenAI, expected) -> None:
    completion = client.completions.create(model="talking", prompt="The sea is", max_tokens=12)
    assert completion.choices[0].text == expected("The sea is", 12)
    response = client.responses.create(model="talking", input="The sea is", max_output_tokens=12)
    assert response.output_text == expected(AS_TEXT, 12)
    assert response.usage.output_tokens == 12
    events = list(client.responses.create(model="talking", input=HELLO, max_output_tokens=12, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == response.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, expected, stream: bool) -> None:
    whole = expected("The sea is", 24)
    stop = whole[10:14]
    answer = client.completions.create(
        model="talking", prompt="The sea is", max_tokens=24, stop=[stop, "\0"], stream=stream
    )
    choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    assert "".join(c.text for c in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_a_seed_means_what_it_means_to_generate(client: openai.OpenAI, expected) -> None:
    made = [
        client.completions.create(
            model="talking", prompt="The sea is", max_tokens=16, temperature=0.9, top_p=0.8, seed=seed
        )
        .choices[0]
        .text
        for seed in (5, 5, 6)
    ]
    assert made[0] == made[1] != made[2]
    assert made[0] == expected("The sea is", 16, temperature=0.9, top_p=0.8, seed=5)


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="talking", messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token
        assert 0 > entry.logprob == entry.top_logprobs[0].logprob > entry.top_logprobs[1].logprob


def test_a_bias_forbids_a_token_and_a_penalty_repetition(client: openai.OpenAI, talking: Path) -> None:
    ask = {"model": "talking", "prompt": "The sea is", "max_tokens": 12}
    first = client.completions.create(**ask, logprobs=0).choices[0].logprobs.tokens[0]
    token = load_tokenizer(str(talking))(first).input_ids[-1]
    assert (
        not client.completions.create(**ask, logit_bias={str(token): -100}).choices[0].text.startswith(first)
    )
    plain = client.completions.create(**ask | {"max_tokens": 60}, logprobs=0).choices[0].logprobs.tokens
    varied = client.completions.create(**ask | {"max_tokens": 60}, logprobs=0, presence_penalty=2.0)
    assert len(set(varied.choices[0].logprobs.tokens)) > len(set(plain))


def test_a_second_question_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    said = [{"role": "user", "content": "Once upon a time " * 20}]
    ask = {"model": "talking", "max_tokens": 4}
    first = client.chat.completions.create(messages=said, **ask)
    again = client.chat.completions.create(messages=said, **ask)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    assert again.choices[0].message.content == first.choices[0].message.content


def test_models_health_and_metrics(client: openai.OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert model.id == "talking"
    assert model.meta == {"context": 512, "slots": 4, "chat": True, "tools": True}
    assert client.models.retrieve("talking").id == "talking"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{server.url}/metrics").text
    assert "trilobite_generated_tokens_total " in text
    assert "trilobite_requests_running 0.0" in text


def test_tools_reach_the_template(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    ask = {"model": "talking", "messages": HELLO, "max_tokens": 2}
    with_tool = client.chat.completions.create(**ask, tools=[tool]).usage.prompt_tokens
    assert with_tool > client.chat.completions.create(**ask).usage.prompt_tokens
    assert "tools" in TEMPLATE


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages"),
        ({"messages": []}, "at least one"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "text",
        ),
        ({"messages": [{"role": "nobody", "content": "hello"}]}, "who is that?"),
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "temperature": 1e-9}, "temperature"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_tokens": "many"}, "max_tokens"),
        ({"messages": HELLO, "n": 2}, "n 2"),
        ({"messages": HELLO, "logit_bias": {"99999": 1}}, "vocabulary"),
        ({"messages": HELLO, "surprise": 1}, "surprise"),
        ({"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a " * 2000}]}, "shorter"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "refuses"),
    ],
)
def test_what_is_not_understood_is_refused(server: Server, body: dict[str, object], said: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_other_models_are_not_here(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "gpt-4", "messages": HELLO})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("", "empty"), ("\ud800", "surrogate"), (["a", "b"], "one text"), ("a " * 2000, "shorter")],
)
def test_prompts_that_are_none(server: Server, prompt: object, said: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=json.dumps({"prompt": prompt}), headers=JSON)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_lm_eval_asks_the_chat(server: Server, tmp_path: Path, expected) -> None:
    """As `trilobite-lm-eval --model local-chat-completions` does."""
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="trilobite[eval] is not installed")
    pytest.importorskip("tenacity", reason="lm_eval[api] is not installed")
    from lm_eval.tasks import TaskManager

    (tmp_path / "sea.jsonl").write_text(json.dumps({"question": "The sea is", "answer": "wide"}) + "\n")
    task = {
        "task": "sea",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "sea.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\0"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "sea.yaml").write_text(json.dumps(task))
    found = evaluator.simple_evaluate(
        model="local-chat-completions",
        model_args=f"model=talking,base_url={server.url}/v1/chat/completions,tokenizer_backend=none",
        tasks=["sea"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    (sample,) = found["samples"]["sea"]
    assert sample["resps"][0][0] == expected(AS_TEXT, 12)
