"""Readers of the data files of `task_files/*.yaml`: a file in, `{split: datasets.Dataset}` out, no network.

A task file names its reader as `custom_dataset`; lm_eval calls it with the task's `dataset_kwargs` and with
its metadata, of which only `data` matters: the folder of `--data DIR`. It holds

    piqa.jsonl, arc_easy.jsonl  {"query": str, "choices": [str, ...], "gold": int} a line
    winogrande.jsonl            {"context_options": [str, ...], "continuation": str, "gold": int} a line
    lambada_openai.jsonl        {"context": str, "continuation": str} a line
    triviaqa_sm_sub.jsonl       {"context": str, "answer": str, "aliases": [str, ...]} a line
    hellaswag_val.txt           six lines an item: context, index of the right ending, four endings
    mmlu/{dev,test}/*.csv       SUBJECT_{dev,test}.csv: question, choice0, ... choice3, answer (an index)
    wikitext-2/wiki.test.raw    articles one after another, each headed ` = Title = `
"""

import csv
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

from trilobite.errors import EvaluationError

SHOTS = 5
"""Worked examples in front of each question of MMLU and TriviaQA, as in MiLo (arXiv:2504.02658)."""

SENTENCE = re.compile(r"(?<=[.!?] )[^.!?]+$")
"""The beginning of a sentence at the end of HellaSwag's contexts, which lm_eval capitalizes."""

Rows = list[dict[str, Any]]


def read_jsonl(*, data: str, file: str, keys: list[str], shots: int = 0, **_: object) -> dict[str, Any]:
    """JSON lines -> {"test"}. keys: what every object must have    shots: rows that a prompt uses up."""
    path = Path(data) / file
    rows: Rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
        except ValueError as e:
            raise EvaluationError(f"{path}, line {number}: not JSON ({e}); copy the file again") from e
        if not isinstance(row, dict) or not set(keys) <= set(row):
            raise EvaluationError(f"{path}, line {number}: expected an object with {', '.join(keys)}")
        choices = row.get("choices", row.get("context_options"))
        if choices is not None:
            _check_gold(path, number, row["gold"], choices)
        rows.append({key: row[key] for key in keys})
    return {"test": _dataset(path, rows, at_least=shots + 1)}


def read_hellaswag(*, data: str, file: str, **_: object) -> dict[str, Any]:
    """Six lines an item -> {"test"} with query, choices and gold."""
    path = Path(data) / file
    lines = [_without_markup(line) for line in _lines(path)]
    if len(lines) % 6:
        raise EvaluationError(
            f"{path}: {len(lines)} lines; an item is six lines: context, index, four endings"
        )
    rows: Rows = []
    for start in range(0, len(lines), 6):
        query, gold, *choices = lines[start : start + 6]
        query = SENTENCE.sub(lambda last: last[0].capitalize(), query)
        _check_gold(path, start + 2, gold, choices)
        rows.append({"query": query, "choices": choices, "gold": int(gold)})
    return {"test": _dataset(path, rows)}


def _without_markup(text: str) -> str:
    """Drop what lm_eval drops from HellaSwag: brackets are left over from the WikiHow pages."""
    return re.sub(r"\[.*?\]", "", text.strip()).replace("  ", " ")


def read_mmlu(*, data: str, subject: str, **_: object) -> dict[str, Any]:
    """One subject -> {"dev", "test"} with subject, question, choices and answer (an index)."""
    return {
        split: _dataset(path, _mmlu_rows(path, subject), at_least=SHOTS if split == "dev" else 1)
        for split in ("dev", "test")
        for path in [Path(data) / "mmlu" / split / f"{subject}_{split}.csv"]
    }


def _mmlu_rows(path: Path, subject: str) -> Rows:
    columns = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]
    reader = csv.reader(StringIO(_text(path), newline=""), strict=True)
    rows: Rows = []
    try:
        if next(reader, None) != columns:
            raise EvaluationError(f"{path}: expected the header {','.join(columns)}")
        for row in reader:
            if len(row) != len(columns):
                raise EvaluationError(
                    f"{path}, line {reader.line_num}: {len(row)} columns, expected {len(columns)}"
                )
            question, *choices, answer = row
            _check_gold(path, reader.line_num, answer, choices)
            rows.append(
                {
                    "subject": subject.replace("_", " "),
                    "question": question,
                    "choices": choices,
                    "answer": int(answer),
                }
            )
    except csv.Error as e:
        raise EvaluationError(f"{path}, line {reader.line_num}: not CSV ({e}); copy the file again") from e
    return rows


def read_wikitext(*, data: str, file: str, **_: object) -> dict[str, Any]:
    """WikiText -> {"test"} with one `page` an article, cut as lm_eval's data set is (62 in WikiText-2)."""
    path = Path(data) / file
    text = _text(path).replace("\r\n", "\n")
    pages = re.split(r"(?m)^(?= = [^=].*[^=] = $)", text)
    return {"test": _dataset(path, [{"page": page} for page in pages if page.strip()])}


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as e:
        raise EvaluationError(f"{path}: cannot be read ({e.strerror}); --data must hold this file") from e
    except UnicodeDecodeError as e:
        raise EvaluationError(f"{path}: not UTF-8 at byte {e.start}; copy the file again") from e


def _lines(path: Path) -> list[str]:
    return _text(path).removesuffix("\n").split("\n")  # splitlines would also cut at U+2028, inside a string


def _check_gold(path: Path, line: int, gold: Any, choices: list[str]) -> None:
    if str(gold) not in map(str, range(len(choices))):
        raise EvaluationError(
            f"{path}, line {line}: right answer {gold!r}, there are {len(choices)} choices from 0"
        )


def _dataset(path: Path, rows: Rows, *, at_least: int = 1) -> Any:
    if len(rows) < at_least:
        raise EvaluationError(
            f"{path}: {len(rows)} items, at least {at_least} are needed; copy the file again"
        )
    from datasets import Dataset  # comes with lm_eval, which is optional

    return Dataset.from_list(rows)
