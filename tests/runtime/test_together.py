"""Several models, several Python threads and forked processes at a time: everybody gets what one alone would get."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from torch import Tensor
from transformers import PreTrainedModel

from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load

RECIPES = ("milo-s1", "quip3-free")
PROMPTS = [torch.tensor([[3, 5 + i, 7, 11 * i + 2, 13]]) for i in range(4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[PreTrainedModel]:
    folder = tmp_path_factory.mktemp("together")
    build_checkpoint("mixtral", folder / "original", dtype=torch.bfloat16)
    for name in RECIPES:
        compress(
            str(folder / "original"), folder / name, load_recipe(name), options=Options(jobs=1, device="cpu")
        )
    return [load(str(Path(folder / name)), threads=2) for name in RECIPES]


def told(model: PreTrainedModel, prompt: Tensor) -> list[int]:
    ids: list[int] = model.generate(prompt, max_new_tokens=6, do_sample=False)[0].tolist()
    return ids


def test_threads_that_generate_at_once_get_what_each_alone_gets(models: list[PreTrainedModel]) -> None:
    jobs = [(model, prompt) for model in models for prompt in PROMPTS]
    alone = [told(*job) for job in jobs]
    assert len({tuple(ids) for ids in alone}) > len(PROMPTS)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(lambda job: told(*job), jobs)) == alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_generates_and_so_does_its_parent(models: list[PreTrainedModel]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads do not outlive a fork
    try:
        expected = [told(model, PROMPTS[0]) for model in models]
        children = []
        for _ in range(2):
            if child := os.fork():
                children.append(child)
                continue
            status = 1
            try:
                status = 0 if [told(model, PROMPTS[0]) for model in models] == expected else 2
            finally:
                os._exit(status)
        assert [told(model, PROMPTS[0]) for model in models] == expected
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    finally:
        torch.set_num_threads(threads)
