"""Speed of transformers alone: this file imports nothing of trilobite, which puts other layers into its models.

    echo '{"batches": [[[5, 6, 1]]], "beams": [1, 5], ...}' | python -m benchmarks.lib.plain_translation MODEL float32

Reads a job from standard input and prints as its last line, in JSON, [seconds, tokens] of each cell, the bytes of the
weights, and the most memory that the process held.
"""

import json
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSeq2SeqLM


def padded(ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids, padded with 0, and where they are: [B, S] int64."""
    rows = [torch.tensor(row) for row in ids]
    return pad_sequence(rows, batch_first=True), pad_sequence(
        [torch.ones_like(r) for r in rows], batch_first=True
    )


def run(model: Any, ids: list[list[int]], beams: int, most: int) -> int:
    """Translate one batch; returns the tokens made, to the end of each sentence."""
    source, mask = padded(ids)
    with torch.inference_mode():
        made = model.generate(
            source, attention_mask=mask, num_beams=beams, do_sample=False, max_new_tokens=most
        )
    eos = model.generation_config.eos_token_id
    texts = [row[1:] for row in made.tolist()]
    return sum(text.index(eos) + 1 if eos in text else len(text) for text in texts)


def main() -> None:
    job = json.loads(sys.stdin.read())
    torch.set_num_threads(job["threads"])
    model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
    found = []
    for beams in job["beams"]:
        for batches in job["batches"]:
            run(model, batches[0][:2], beams, 4)
            best = (float("inf"), 0)
            for _ in range(job["rounds"]):
                started = time.perf_counter()
                tokens = sum(run(model, ids, beams, 3 * max(map(len, ids)) + 10) for ids in batches)
                best = min(best, (time.perf_counter() - started, tokens))
            found.append(best)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cells": found, "bytes": sum(p.nbytes for p in model.parameters()), "peak": peak}))


if __name__ == "__main__":
    main()
