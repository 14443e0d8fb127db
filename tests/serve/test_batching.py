"""Continuous batching in our pages, with our attention: the tokens of `generate`, whatever the kind of attention."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import VOCAB, build_checkpoint
from torch import Tensor
from transformers import PreTrainedModel

import trilobite
from trilobite.errors import ArchitectureError
from trilobite.kernels.ops import attends
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.generate.text import Sampling
from trilobite.runtime.step import texts
from trilobite.runtime.step.lowered import Lowered
from trilobite.runtime.step.replay import Step
from trilobite.runtime.step.step_list import StepList
from trilobite.serve import batching as module
from trilobite.serve.batching import Batching
from trilobite.serve.pages import make_pages
from trilobite.serve.sampler import Draw


def expected(model: PreTrainedModel, ids: list[int], tokens: int) -> list[int]:
    made = model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return made[0, len(ids) :].tolist()


def results(batching: Batching, prompts: list[list[int]], tokens: int) -> list[object]:
    """Outputs of requests that run side by side, in the order of the prompts."""
    for i, ids in enumerate(prompts):
        draw = Draw(sampling=Sampling())
        batching._cb.add_request(ids, request_id=str(i), max_new_tokens=tokens, eos_token_id=[], draw=draw)
    found = [batching._cb.get_result(timeout=120) for _ in prompts]
    return sorted(found, key=lambda output: int(output.request_id))


@pytest.mark.parametrize(
    "name", ["mixtral", "deepseek", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_moe"]
)
def test_texts_side_by_side_are_those_of_generate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts longer than a step, shorter ones, and more of them than slots."""
    build_checkpoint(name, tmp_path / name)
    model = trilobite.load(str(tmp_path / name))
    attention = model.config._attn_implementation
    generator = torch.Generator().manual_seed(3)
    lengths = (3, 90, 17, 1, 40)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    wanted = [expected(model, ids, 10) for ids in prompts]
    monkeypatch.setattr(module, "BATCH_TOKENS", 32)
    batching = Batching(model, None, make_pages(model, 3, 128), 60)
    batching.start()
    try:
        assert [r.generated_tokens for r in results(batching, prompts, 10)] == wanted
        again = results(batching, prompts, 10)  # now the pages of the prompts are there
        assert [r.generated_tokens for r in again] == wanted
        assert batching.texts == 0
    finally:
        batching.stop()
    assert model.config._attn_implementation == attention


@pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")
@pytest.mark.parametrize("name", ["mixtral", "deepseek", "gpt_oss"])
def test_a_text_alone_is_replayed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are `generate`'s list, in pages; behind a prompt of one token, too."""
    build_checkpoint(name, tmp_path / "original", dtype=torch.bfloat16)
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    model = trilobite.load(str(tmp_path / "packed"))
    prompts = [[5, 6, 7], [9]]
    wanted = [expected(model, ids, 70) for ids in prompts]
    batching = Batching(model, None, make_pages(model, 2, 128), 60)
    step, runs = model.forward, []
    assert isinstance(step, Step)
    run = step._run_list
    monkeypatch.setattr(step, "_run_list", lambda *of: (runs.append(1), run(*of))[1])
    batching.start()
    try:
        for ids, text in zip(prompts, wanted, strict=True):
            assert [r.generated_tokens for r in results(batching, [ids], 70)] == [text]
        assert step.compared_in_pages
        assert len(runs) == 2 * 69  # all but the prompts
        assert [r.generated_tokens for r in results(batching, prompts, 70)] == wanted
        step.ready.logits.fill_(0)  # what the list makes counts
        monkeypatch.setattr(step, "_run_list", lambda ready, *_: ready.logits.clone())
        (made,) = results(batching, prompts[:1], 4)
        assert made.generated_tokens[1:] == [0, 0, 0]
    finally:
        batching.stop()


@pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")
@pytest.mark.parametrize("name", ["mixtral", "deepseek", "gpt_oss"])
def test_texts_side_by_side_are_replayed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several texts, of other lengths each, come from the list for so many, and change with what it makes."""
    build_checkpoint(name, tmp_path / "original", dtype=torch.bfloat16)
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    model = trilobite.load(str(tmp_path / "packed"))
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11]]
    wanted = [expected(model, ids, 70) for ids in prompts]
    monkeypatch.setattr(texts, "WORTH", 2)
    ran: Counter[int] = Counter()
    run = StepList._run_list

    def counted(self: StepList, ready: Lowered, *where: Any) -> Tensor:
        if len(ready.rows[0].keys) == 0:  # in pages, it holds nothing of its own
            ran[self.texts] += 1
        return run(self, ready, *where)

    monkeypatch.setattr(StepList, "_run_list", counted)
    batching = Batching(model, None, make_pages(model, 3, 128), 60)
    step = model.forward
    assert isinstance(step, Step)
    batching.start()
    try:
        assert [r.generated_tokens for r in results(batching, prompts, 70)] == wanted
        several = step.others.steps[3]
        assert several.right
        assert several.compared_in_pages
        before = ran[3]
        assert before > 20
        assert [r.generated_tokens for r in results(batching, prompts, 30)] == [t[:30] for t in wanted]
        assert ran[3] > before
        monkeypatch.setattr(StepList, "_run_list", lambda _, ready, *where: run(_, ready, *where) * 0)
        made = [r.generated_tokens for r in results(batching, prompts, 30)]
        assert any(0 in t[-20:] for t in made)
    finally:
        batching.stop()


@pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")
def test_a_list_that_errs_in_pages_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint("mixtral", tmp_path / "original", dtype=torch.bfloat16)
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    model = trilobite.load(str(tmp_path / "packed"))
    wanted = expected(model, [5, 6, 7], 8)
    batching = Batching(model, None, make_pages(model, 2, 64), 60)
    step = model.forward
    monkeypatch.setattr(step, "_run_list", lambda ready, *_: ready.logits + 1)
    batching.start()
    try:
        (made,) = results(batching, [[5, 6, 7]], 8)
        assert made.generated_tokens == wanted
        assert step.compared_in_pages is None
    finally:
        batching.stop()


def test_an_error_in_a_step_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint("mixtral", tmp_path / "model")
    model = trilobite.load(str(tmp_path / "model"))
    wanted = expected(model, [5, 6, 7], 4)
    batching = Batching(model, None, make_pages(model, 2, 64), 60)
    batching.start()
    try:
        monkeypatch.setattr(model, "forward", lambda **_: 1 / 0)
        (failed,) = results(batching, [[5, 6, 7]], 4)
        assert "zero" in failed.error
        monkeypatch.undo()
        batching._cb._generation_thread.join(10)
        assert batching.is_alive()
        (made,) = results(batching, [[5, 6, 7]], 4)
        assert made.generated_tokens == wanted
    finally:
        batching.stop()


def test_logits_that_are_not_finite_say_where_that_begins(tmp_path: Path) -> None:
    """At the first token, and in the middle of a text; other texts of the model go on afterwards."""
    build_checkpoint("mixtral", tmp_path / "model")
    model = trilobite.load(str(tmp_path / "model"))
    wanted = expected(model, [5, 6, 7], 4)
    batching = Batching(model, None, make_pages(model, 2, 64), 60)
    batching.start()
    model.model.embed_tokens.weight.data[9] = torch.nan
    model.model.layers[1].self_attn.o_proj.weight.data[:, 0] = torch.nan
    try:
        (failed,) = results(batching, [[5, 6, 7]], 4)
        assert (
            "model: logits are NaN or infinite, which begins in model.layers.1.self_attn.o_proj"
            in failed.error
        )
        assert not failed.generated_tokens
        model.model.layers[1].self_attn.o_proj.weight.data[:, 0] = 0
        batching._cb._generation_thread.join(10)
        assert batching.is_alive()
        (failed,) = results(batching, [[5, 9, 7]], 4)
        assert "which begins in model.embed_tokens" in failed.error
        batching._cb._generation_thread.join(10)
        assert batching.is_alive()
        (made,) = results(batching, [[5, 6, 7]], 4)
        assert len(made.generated_tokens) == len(wanted)
    finally:
        batching.stop()


def test_states_that_have_no_pages(tmp_path: Path) -> None:
    build_checkpoint("jamba", tmp_path / "model")
    with pytest.raises(ArchitectureError, match="trilobite chat"):
        make_pages(trilobite.load(str(tmp_path / "model")), 2, 64)
