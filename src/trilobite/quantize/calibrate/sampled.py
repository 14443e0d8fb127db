"""Windows that a model writes itself: a text in its own languages and kinds, where the user has none.

Token by token, all weights would be brought in for each. Here all tokens of all windows are drawn in one pass, each from
what the model expects behind the tokens of the pass before, which began as noise. Whatever is random about a token is
drawn once and stays, so after p passes the first p tokens are what the model would have written one by one; the others
follow on their last p neighbours. A block at a time is in memory.
"""

from functools import partial

import torch
from torch import Tensor

from trilobite.checkpoint.roles import text_config
from trilobite.checkpoint.source import Source
from trilobite.pool import ThreadPool
from trilobite.quantize.calibrate.builtin import check_decoder
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.windows import CONTEXT, Calibration
from trilobite.quantize.threads import single_threaded_torch
from trilobite.quantize.watcher import SILENT, Watcher

PASSES = 4
SAMPLES, LENGTH = 16, 256
"""Windows, and tokens of each."""
FOR_HESSIANS = 128
"""Windows where more than a diagonal is to be told from them."""
BATCH = 4
"""Windows of one forward pass."""


def sampled_calibration(source: Source, *, hessians: bool = False) -> Calibration:
    """Windows of the model's own. Raises RecipeError for an encoder-decoder, which reads pairs."""
    check_decoder(source, "self")
    longest = int(text_config(source).get("max_position_embeddings") or CONTEXT)
    samples = FOR_HESSIANS if hessians else SAMPLES
    return Calibration(sampled=True, samples=samples, context=min(LENGTH, longest), propagate="original")


@torch.no_grad()
def sample_windows(
    model: BlockModel, calibration: Calibration, *, jobs: int = 1, watcher: Watcher = SILENT
) -> Tensor:
    """[S, T] int64, the same ones for the same model and seed. Raises ArchitectureError where blocks cannot run alone.

    calibration: samples, context and seed; both of the former are given
    """
    assert calibration.samples
    shape = calibration.samples, calibration.context
    config = model.model.config.get_text_config()
    generator = torch.Generator().manual_seed(calibration.seed)
    ids = torch.randint(int(config.vocab_size), shape, generator=generator)
    first = config.bos_token_id
    if isinstance(first, int):
        ids[:, 0] = first
    seeds = [int(s) for s in torch.randint(2**62, (len(ids),), generator=generator)]
    model.load("")
    model.load(model.blocks[0])
    model.check_arguments(ids)
    batches = [ids[i : i + BATCH] for i in range(0, len(ids), BATCH)]
    for batch in batches:
        model.learn_arguments(batch)
    steps = PASSES * len(model.blocks)
    with single_threaded_torch(), ThreadPool(jobs, "sample") as pool:
        for p in range(PASSES):
            model.load("")
            hidden = [model.embed(batch) for batch in batches]
            for i, block in enumerate(model.blocks):
                watcher.progress("sample", p * len(model.blocks) + i, steps)
                model.load(block)
                hidden = list(pool.map(partial(model.run, block), hidden))
                model.drop(block)
            parameters = {name: w.float() for name, w in model.parameters("").items()}
            states = torch.cat(hidden)
            for first in range(0, len(ids), jobs):  # logits of so many windows are held at a time
                some = slice(first, first + jobs)
                pairs = zip(ids[some], states[some], strict=True)
                logits = [model.logits(row[None], of_row[None], parameters)[0, :-1] for row, of_row in pairs]
                ids[some, 1:] = torch.stack(list(pool.map(_drawn, logits, seeds[some])))
            model.drop("")
    watcher.progress("sample", steps, steps)
    return ids


def _drawn(logits: Tensor, seed: int) -> Tensor:
    """A token of each distribution, by noise that only the seed decides. logits: [T, V] fp32    returns: [T] int64"""
    noise = torch.empty(logits.shape).exponential_(generator=torch.Generator().manual_seed(seed))
    return (logits.cpu() - noise.log()).argmax(-1)
