"""Run: python -m pytest tests/test_tasks.py

The data files are written here, in the formats that `trilobite.evaluate.task_data` documents. Prompts and
scoring are checked through lm_eval's task objects: a random model scores the same whichever choice is right.
"""

import csv
import json
import logging
import math
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.paths import SHARED
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

pytest.importorskip("lm_eval", reason='lm_eval is not installed: pip install "trilobite[eval]"')

from trilobite.errors import EvaluationError, MissingExtraError
from trilobite.evaluate import tasks as tasks_module
from trilobite.evaluate.tasks import TASK_FILES, TASKS, deviations, load_tasks, run_tasks

ITEMS = 6
PAGES = [
    " = One = \n A small cat , a dog . \n = = Life = = \n It 's 3 @.@ 5 years . \n",
    " = Two = \n Blue sky . \n",
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a task with local data went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def tiny_model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    return MixtralForCausalLM(MixtralConfig(vocab_size=257, **sizes, **heads)).eval()


@pytest.fixture(scope="module")
def model() -> MixtralForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return FastTokenizer(tokenizer_object=bytes_only, eos_token="<eos>")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_mmlu(folder: Path, subject: str, split: str, items: int) -> None:
    path = folder / "mmlu" / split / f"{subject}_{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as f:
        table = csv.writer(f)
        table.writerow(["question", "choice0", "choice1", "choice2", "choice3", "answer"])
        for i in range(items):
            table.writerow([f' {split} {i}, "or"\nso? ', "None", "7", f"c{i}", "d,d", (i + 2) % 4])


def subjects() -> list[str]:
    text = (TASK_FILES / "mmlu.yaml").read_text().replace("!function ", "")
    return [task["dataset_kwargs"]["subject"] for task in yaml.safe_load(text)["task"]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    items = range(ITEMS)
    # U+2028 is a line break to str.splitlines, and may stand unescaped inside a JSON string
    write_lines(
        folder / "piqa.jsonl",
        [
            {"choices": [f"no\u2028{i}", f"yes {i}"], "gold": 1, "query": f"Question: How {i}?\n"}
            for i in items
        ],
    )
    write_lines(
        folder / "arc_easy.jsonl",
        [{"choices": ["a", "b", "c", "d"], "query": f"Question: What {i}?", "gold": i % 4} for i in items],
    )
    write_lines(
        folder / "winogrande.jsonl",
        [
            {"context_options": [f"{i} so Ann", f"{i} so Bo"], "continuation": "won.", "gold": 1}
            for i in items
        ],
    )
    lambada = [{"context": f"The end of {i}, he said", "continuation": "goodbye"} for i in items]
    write_lines(
        folder / "lambada_openai.jsonl", [*lambada[:-1], {"context": "the", "continuation": "\n\nend"}]
    )
    write_lines(
        folder / "triviaqa_sm_sub.jsonl",
        [
            {
                "context": f"Question: Who {i}?\nAnswer:",
                "answer": f"Main {i}",
                "aliases": [f"Al-ias {i}", f"Main {i}"],
            }
            for i in items
        ],
    )
    hellaswag = [
        f"Cats: A cat {i} [here] sits. it and Bob\n2\npurrs.\n[a] barks.\nflies  away.\nsings.\n"
        for i in items
    ]
    (folder / "hellaswag_val.txt").write_text("".join(hellaswag))
    (folder / "wikitext-2").mkdir()
    (folder / "wikitext-2/wiki.test.raw").write_bytes("".join(PAGES).replace("\n", "\r\n").encode())
    for subject in subjects():
        write_mmlu(folder, subject, "dev", 5)
        write_mmlu(folder, subject, "test", 2)
    return folder


def first_task(name: str, data: Path) -> Any:
    """The task (for a group its first member) with the requests of all its items built."""
    task = next(iter(load_tasks([name], data=data)[name]["tasks"].values()))
    task.build_all_requests()
    return task


def requests(task: Any, item: int) -> list[tuple[Any, ...]]:
    return [instance.args for instance in task.instances if instance.doc_id == item]


SHOTS = "\n\n".join(
    f'dev {i}, "or"\nso?\nA. None\nB. 7\nC. c{i}\nD. d,d\nAnswer: {"CDABC"[i]}' for i in range(5)
)
PROMPTS = {
    "piqa": (3, [("Question: How 3?\nAnswer:", " no\u20283"), ("Question: How 3?\nAnswer:", " yes 3")], 1),
    "arc_easy": (3, [("Question: What 3?\nAnswer:", f" {c}") for c in "abcd"], 3),
    "winogrande": (2, [("2 so Ann", " won."), ("2 so Bo", " won.")], 1),
    "hellaswag": (
        1,
        [("Cats: A cat 1 sits. It and bob", f" {e}") for e in ("purrs.", " barks.", "flies away.", "sings.")],
        2,
    ),
    "mmlu": (
        1,
        [
            (
                "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
                + SHOTS
                + '\n\ntest 1, "or"\nso?\nA. None\nB. 7\nC. c1\nD. d,d\nAnswer:',
                f" {letter}",
            )
            for letter in "ABCD"
        ],
        3,
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_choices_and_the_right_one(name, data):
    task = first_task(name, data)
    item, prompts, gold = PROMPTS[name]
    assert requests(task, item) == prompts
    for favourite in range(len(prompts)):
        # answers of a model that prefers one choice: the item counts only for the right one
        likelihoods = [(-1.0 if i == favourite else -50.0, False) for i in range(len(prompts))]
        assert task.process_results(task.eval_docs[item], likelihoods)["acc"] == (favourite == gold)


def test_a_subject_alone_has_its_examples(model, tokenizer, data):
    name = "mmlu_abstract_algebra"
    task = first_task(name, data)
    assert requests(task, 1) == PROMPTS["mmlu"][1]
    assert set(run_tasks(model, tokenizer, load_tasks([name], data=data), limit=2, batch=4)) == {name}
    with pytest.raises(EvaluationError, match="task 'mmlu_algebra': no subject of mmlu; expected one of its"):
        load_tasks(["mmlu_algebra"], data=data)


def test_what_differs_from_lm_eval_is_said(data):
    ready = load_tasks(["piqa", "hellaswag", "triviaqa"], data=data)
    assert set(deviations(ready)) == {"hellaswag", "triviaqa"}


def test_lambada(data):
    task = first_task("lambada_openai", data)
    assert requests(task, 1) == [("The end of 1, he said", " goodbye")]
    assert requests(task, ITEMS - 1) == [("the", "\n\nend")], "no space in front of a line break"
    assert task.process_results(task.eval_docs[1], [(-2.5, True)]) == {"perplexity": -2.5, "acc": 1}


def test_triviaqa(data):
    task = first_task("triviaqa", data)
    shots = [f"Question: Who {i}??\nAnswer: Main {i}\n\n" for i in range(ITEMS)]
    for item in range(ITEMS):
        ((prompt, options),) = requests(task, item)
        others = [shot for i, shot in enumerate(shots) if i != item]
        assert prompt == "".join(others[:5]) + f"Question: Who {item}??\nAnswer:"
    assert options["until"] == ["\n", ".", ","]
    assert options["do_sample"] is False
    for answer, right in (("MAIN 2!", 1), ("alias 2", 1), ("Main 3", 0), ("Main", 0), ("", 0)):
        assert task.process_results(task.eval_docs[2], [answer]) == {"exact_match": right}


@torch.no_grad()
def test_wikitext_against_a_plain_computation(model, tokenizer, data):
    texts = ["= One =\nA small cat, a dog.\n== Life ==\nIt's 3.5 years.\n", "= Two =\nBlue sky.\n"]
    nll, words, size = 0.0, 0, 0
    for page, text in zip(PAGES, texts, strict=True):
        task_text = " " + text  # the page's leading space stays
        ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(task_text).input_ids])
        log_p = model(ids[None]).logits[0].double().log_softmax(-1)
        nll -= sum(log_p[t, ids[t + 1]].item() for t in range(len(ids) - 1))
        words += len(page.split()) + 2  # lm_eval's split counts an empty word at both ends
        size += len(page.encode())
    result = run_tasks(model, tokenizer, load_tasks(["wikitext2"], data=data), limit=None, batch=2)[
        "wikitext2"
    ]
    assert result["n"] == 2
    assert result["word_perplexity"] == pytest.approx(math.exp(nll / words), rel=1e-4)
    assert result["byte_perplexity"] == pytest.approx(math.exp(nll / size), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nll / size / math.log(2), rel=1e-4)


def test_every_task_runs(model, tokenizer, data, capsys):
    results = run_tasks(model, tokenizer, load_tasks(list(TASKS), data=data), limit=4, batch=8)
    json.dumps(results, allow_nan=False)
    assert [name for name in results if not name.startswith("mmlu_")] == list(TASKS)
    assert results["wikitext2"]["n"] == 2
    assert all(results[name]["n"] == 4 for name in TASKS if name not in ("wikitext2", "mmlu"))
    members = {name: r for name, r in results.items() if name.startswith("mmlu_")}
    assert len(members) == 57
    assert results["mmlu"]["n"] == sum(r["n"] for r in members.values()) == 57 * 2
    assert results["mmlu"]["acc"] == pytest.approx(sum(r["acc"] for r in members.values()) / 57)
    assert set(results["piqa"]) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "n"}
    assert set(results["triviaqa"]) == {"exact_match", "exact_match_stderr", "n"}
    assert set(results["lambada_openai"]) == {"perplexity", "perplexity_stderr", "acc", "acc_stderr", "n"}
    assert capsys.readouterr().out == "", "standard output belongs to the caller"
    assert tokenizer.pad_token is None, "the caller's tokenizer was changed"


def test_one_item_has_no_standard_error(model, tokenizer, data):
    result = run_tasks(model, tokenizer, load_tasks(["arc_easy"], data=data), limit=1, batch=1)["arc_easy"]
    assert set(result) == {"acc", "acc_norm", "n"}


def test_broken_logits_are_not_a_result(tokenizer, data):
    broken = tiny_model()
    with torch.no_grad():
        broken.lm_head.weight.fill_(math.nan)
    with pytest.raises(EvaluationError, match="logits are NaN or infinite, which begins in lm_head"):
        run_tasks(broken, tokenizer, load_tasks(["wikitext2"], data=data), limit=1, batch=1)


def test_unknown_task_and_limit(model, tokenizer, data):
    with pytest.raises(EvaluationError, match=r"task 'pica': unknown; known are arc_easy, .*, winogrande$"):
        run_tasks(model, tokenizer, load_tasks(["piqa", "pica"], data=data), limit=1, batch=1)
    with pytest.raises(EvaluationError, match=r"--limit"):
        run_tasks(model, tokenizer, load_tasks(["piqa"], data=data), limit=0, batch=1)
    with pytest.raises(EvaluationError, match=r"not a folder"):
        run_tasks(model, tokenizer, load_tasks(["piqa"], data=data / "piqa.jsonl"), limit=1, batch=1)


@pytest.mark.parametrize("name", TASKS)
def test_missing_file(name, tmp_path):
    with pytest.raises(EvaluationError, match=r"cannot be read.*--data must hold this file") as e:
        load_tasks([name], data=tmp_path)
    assert str(tmp_path) in str(e.value)


HEADER = "question,choice0,choice1,choice2,choice3,answer\n"


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("piqa", "piqa.jsonl", "{}\n", "line 1: expected an object with query, choices, gold"),
        ("piqa", "piqa.jsonl", '{"query": "q", "choices": ["a"], "gold": 0}\n{"que', "line 2: not JSON"),
        ("piqa", "piqa.jsonl", '{"query": "q", "choices": ["a", "b"], "gold": 2}', "line 1: right answer 2"),
        ("piqa", "piqa.jsonl", "", "line 1: not JSON"),
        ("piqa", "piqa.jsonl", "\udcff", "not UTF-8 at byte 0"),
        ("hellaswag", "hellaswag_val.txt", "ctx\n1\na\nb\nc\n", "5 lines; an item is six"),
        ("hellaswag", "hellaswag_val.txt", "ctx\n4\na\nb\nc\nd\n", "line 2: right answer '4'"),
        ("mmlu", "mmlu/dev/abstract_algebra_dev.csv", HEADER + "q,a,b,c,d,0\n" * 4, "4 items, at least 5"),
        (
            "mmlu",
            "mmlu/dev/abstract_algebra_dev.csv",
            HEADER + "q,a,b,c,d,A\n" * 5,
            "line 2: right answer 'A'",
        ),
        ("mmlu", "mmlu/dev/abstract_algebra_dev.csv", HEADER + "q,a,b,c,0\n" * 5, "line 2: 5 columns"),
        ("mmlu", "mmlu/dev/abstract_algebra_dev.csv", "q,a,b,c,d,0\n" * 5, "expected the header"),
        (
            "triviaqa",
            "triviaqa_sm_sub.jsonl",
            '{"context": "q", "answer": "a", "aliases": ["a"]}\n' * 5,
            "5 items, at least 6",
        ),
    ],
)
def test_damaged_file(name, file, content, message, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(EvaluationError, match=message) as e:
        load_tasks([name], data=tmp_path)
    assert str(path) in str(e.value)


def test_without_lm_eval(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(MissingExtraError, match=r'pip install "trilobite\[eval\]"'):
        load_tasks(["piqa"], data=data)


@pytest.mark.long
@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder of shared data beside the checkout")
def test_the_real_files():
    folder = SHARED / "models/tiny-mixtral-outliers"
    real = AutoModelForCausalLM.from_pretrained(folder)
    some = ["hellaswag", "triviaqa", "wikitext2"]
    tasks = load_tasks(some, data=SHARED / "data/eval")
    results = run_tasks(real, AutoTokenizer.from_pretrained(folder), tasks, limit=2, batch=4)
    assert {name: r["n"] for name, r in results.items()} == dict.fromkeys(some, 2)
    # a trained model predicts English better than four bits a byte; noise would need eight
    assert 1 < results["wikitext2"]["bits_per_byte"] < 4
    items = load_tasks(list(TASKS), data=SHARED / "data/eval")
    sizes = {n: sum(len(t.eval_docs) for t in loaded["tasks"].values()) for n, loaded in items.items()}
    assert sizes == {
        "arc_easy": 2376,
        "hellaswag": 10042,
        "lambada_openai": 5153,
        "mmlu": 14042,
        "piqa": 1838,
        "triviaqa": 3000,
        "wikitext2": 62,
        "winogrande": 1267,
    }


def test_attempts_to_reach_the_network_are_not_printed(monkeypatch, caplog):
    logger = logging.getLogger("huggingface_hub.utils._http")
    monkeypatch.setattr(tasks_module, "_manager", lambda data: None)  # that of all tasks takes its time
    monkeypatch.setattr(tasks_module, "_load", lambda *_, **__: logger.warning("Retrying in 1s [Retry 1/5]."))
    logger.addHandler(caplog.handler)
    try:
        load_tasks(["piqa"], data=None)
        assert not caplog.records
        logger.warning("others still see it")
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records
