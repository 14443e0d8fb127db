"""Train a small Switch Transformer that translates English into German, and its tokenizer, on a CPU.

The corpus is a folder of sentence pairs, one a line: ``train``, ``val`` and ``test_2016_flickr``, each ``.en``
and ``.de`` (Multi30k). The work folder, one for each run, holds the tokenizer, a checkpoint written every few
minutes and the best weights so far by validation BLEU: the same command run again continues from there.
``--evaluate`` trains nothing: it measures the folder ``--out`` with transformers' own code. Validation needs
``pip install sacrebleu``. It made ``examples/tiny-translator`` (``examples/README.md``).
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")  # a batch has its own shapes: keep them all

import torch
from tokenizers import Tokenizer
from train_tiny_moe import Muon
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from translation import (
    LONGEST,
    Batch,
    Corpus,
    balance_loss,
    bleu,
    build_model,
    expert_counts,
    fast_experts,
    pretrained_tokenizer,
    read_pairs,
    train_tokenizer,
    translate,
    translation_loss,
)

PATIENCE = 1800  # seconds that a process waits for the others before it gives up


SETTINGS: list[tuple[str, int | float, str]] = [
    ("--steps", 6000, "training steps; the learning rate falls to zero there"),
    ("--minutes", 600.0, "training time, all runs together; the learning rate falls to zero there too"),
    ("--batch", 4096, "tokens a step, source and target together, padding included"),
    ("--vocab", 8000, "tokenizer size, both languages together"),
    ("--hidden", 192, "hidden size"),
    ("--intermediate", 384, "width of an expert and of a dense feed-forward layer"),
    ("--encoder-layers", 4, "encoder layers; every second one is sparse"),
    ("--decoder-layers", 2, "decoder layers; every second one is sparse"),
    ("--heads", 3, "attention heads of 64"),
    ("--experts", 8, "experts a sparse layer, one used a token"),
    ("--dropout", 0.15, "dropout"),
    ("--smoothing", 0.1, "label smoothing"),
    ("--lr", 0.02, "peak learning rate of the hidden matrices (Muon)"),
    ("--adam-lr", 0.01, "peak learning rate of embedding, norms, routers and position biases (Adam)"),
    ("--aux", 0.01, "weight of the router load-balancing loss"),
    ("--average", 0.995, "decay of the running average of the weights, which is what is saved"),
    ("--seed", 0, "seed of the initial weights and of the data order"),
    ("--warmup", 100, "steps in which the learning rate rises"),
    ("--processes", 2, "processes of one CPU thread that share a step's work"),
    ("--evaluate-every", 300, "steps between validations"),
    ("--save-every", 90.0, "seconds between checkpoints"),
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    corpus = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"
    parser.add_argument("corpus", type=Path, nargs="?", default=corpus, help="folder of the sentence pairs")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokenizer and checkpoints")
    parser.add_argument(
        "--out", type=Path, required=True, help="Hugging Face folder to write, or to evaluate"
    )
    for name, default, text in SETTINGS:
        parser.add_argument(name, type=type(default), default=default, help=f"{text} (default {default})")
    parser.add_argument("--fp32", action="store_true", help="no bf16 autocast, for a CPU without bf16 units")
    parser.add_argument("--evaluate", action="store_true", help="do not train: measure the folder --out")
    return parser.parse_args()


def load_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer of the work folder, trained on both sides of the training set if there is none yet."""
    file = args.work / "tokenizer.json"
    if not file.exists():
        english, german = read_pairs(args.corpus, "train")
        tokenizer = train_tokenizer(english + german, args.vocab)
        tokenizer.save(str(file.with_suffix(".part")))
        os.replace(file.with_suffix(".part"), file)
    return Tokenizer.from_file(str(file))


def is_matrix(name: str) -> bool:
    """Whether Muon trains the parameter: a matrix of an attention or feed-forward layer."""
    return name.split(".")[-2] in ("q", "k", "v", "o", "wi", "wo")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the processes of a run share, in shared memory; P is the number of parameters.

    gradients: [processes, P]    losses: [processes], the shares of a batch's loss
    control: [2], this step's share of the peak learning rates, and 1 to stop
    """

    model: Any
    average: Any
    momentum: dict[str, torch.Tensor]
    gradients: torch.Tensor
    losses: torch.Tensor
    control: torch.Tensor
    barrier: Any


def share(model: Any, processes: int) -> Shared:
    """Put a model, an average of its weights and Muon's state into shared memory."""
    matrices = {n: p for n, p in model.named_parameters() if is_matrix(n)}
    return Shared(
        model=model.share_memory(),
        average=copy.deepcopy(model).eval().requires_grad_(False).share_memory(),
        momentum={n: torch.zeros_like(p, requires_grad=False).share_memory_() for n, p in matrices.items()},
        gradients=torch.zeros(processes, sum(p.numel() for p in model.parameters())).share_memory_(),
        losses=torch.zeros(processes).share_memory_(),
        control=torch.zeros(2).share_memory_(),
        barrier=torch.multiprocessing.get_context("spawn").Barrier(processes, timeout=PATIENCE),
    )


class Worker:
    """One process: gradients of its rows of each batch, and the optimizer steps of its own parameters.

    Matrices are dealt out among the processes; everything else, which Adam trains, is the first one's. T5's
    attention does not divide its scores by sqrt(d_kv) and draws the query matrices smaller instead: their
    steps are smaller by the same factor.
    """

    def __init__(self, shared: Shared, rank: int, args: argparse.Namespace) -> None:
        self.shared, self.rank, self.args = shared, rank, args
        named = dict(shared.model.named_parameters())
        own = [name for name in named if is_matrix(name)][rank :: args.processes]
        query_lr = args.lr * shared.model.config.d_kv**-0.5
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = []  # each with its peak rate
        for query, peak in ((False, args.lr), (True, query_lr)):
            group = [name for name in own if name.endswith(".q.weight") == query]
            if group:
                muon = Muon([named[name] for name in group], lr=peak)
                for name in group:
                    muon.state[named[name]]["average"] = shared.momentum[name]
                self.optimizers.append((muon, peak))
        self.others = [p for name, p in named.items() if not is_matrix(name)] if rank == 0 else []
        if self.others:
            self.adam = torch.optim.Adam(self.others, lr=args.adam_lr, betas=(0.9, 0.98), fused=True)
            self.optimizers.append((self.adam, args.adam_lr))
            own += [name for name in named if not is_matrix(name)]
        averages, start = dict(shared.average.named_parameters()), 0
        self.own: list[tuple[torch.Tensor, torch.Tensor, slice]] = []  # with its average and its place
        for name, parameter in named.items():
            if name in own:
                self.own.append((parameter, averages[name], slice(start, start + parameter.numel())))
            start += parameter.numel()

    def gradients(self, batch: Batch, step: int) -> None:
        """Leave this process's share of the batch's loss and gradient in shared memory."""
        args, model = self.args, self.shared.model
        torch.manual_seed((args.seed * 1_000_000 + step) * args.processes + self.rank)  # of the dropout
        whole, rows = int((batch.target != 0).sum()), slice(self.rank, None, args.processes)
        batch = Batch(source=batch.source[rows], target=batch.target[rows])
        part = int((batch.target != 0).sum()) / whole
        if part == 0:
            self.shared.gradients[self.rank].zero_()
            self.shared.losses[self.rank] = 0.0
            return
        with torch.autocast("cpu", torch.bfloat16, enabled=not args.fp32):
            loss = translation_loss(model, batch, args.smoothing)
        (part * (loss + args.aux * balance_loss(model, batch))).backward()
        found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        torch.cat([grad.flatten() for grad in found], out=self.shared.gradients[self.rank])
        self.shared.losses[self.rank] = part * loss.item()

    def step(self, done: int) -> None:
        """Step this process's own parameters and their averages; ``done`` steps came before."""
        rate = float(self.shared.control[0])
        for parameter, _, place in self.own:
            parameter.grad = self.shared.gradients[:, place].sum(dim=0).view_as(parameter)
        if self.others:
            torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer, peak in self.optimizers:
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
        decay = min(self.args.average, (1 + done) / (10 + done))
        with torch.no_grad():
            averages, weights = [a for _, a, _ in self.own], [p for p, _, _ in self.own]
            torch._foreach_lerp_(averages, weights, 1 - decay)
        self.shared.model.zero_grad(set_to_none=True)


@dataclass(kw_only=True)
class Progress:
    """How far a run is: steps, seconds of all its parts, and the best validation BLEU."""

    step: int = 0
    seconds: float = 0.0
    best: float = -1.0


def save(worker: Worker, progress: Progress) -> None:
    """Write the checkpoint; an interruption leaves the old one whole."""
    path, shared = worker.args.work / "checkpoint.pt", worker.shared
    state: dict[str, Any] = {"model": shared.model.state_dict(), "average": shared.average.state_dict()}
    state |= {"momentum": shared.momentum, "adam": worker.adam.state_dict(), "progress": asdict(progress)}
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def load(worker: Worker) -> Progress:
    """Continue from the checkpoint of the work folder, if there is one."""
    path, shared = worker.args.work / "checkpoint.pt", worker.shared
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    shared.model.load_state_dict(state["model"])
    shared.average.load_state_dict(state["average"])
    for name, value in state["momentum"].items():
        shared.momentum[name].copy_(value)
    worker.adam.load_state_dict(state["adam"])
    progress = Progress(**state["progress"])
    print(f"continuing at step {progress.step}, after {progress.seconds:,.0f} s", flush=True)
    return progress


def endless(corpus: Corpus, seed: int, first: int) -> Iterator[Batch]:
    """The batches from step ``first`` on."""
    epoch, position = divmod(first, len(corpus))
    while True:
        yield from islice(corpus.batches([seed, epoch]), position, None)
        epoch, position = epoch + 1, 0


def learning_rate(progress: Progress, args: argparse.Namespace) -> float:
    """Share of the peak: a linear warm-up, then a linear fall to zero at the last step or minute."""
    part = max(progress.step / args.steps, progress.seconds / (60 * args.minutes))
    return float(min((progress.step + 1) / args.warmup, 1.0, max(0.0, 1.0 - part) / 0.9))


def finished(progress: Progress, args: argparse.Namespace) -> bool:
    return bool(progress.step >= args.steps or progress.seconds >= 60 * args.minutes)


def end_with_parent() -> None:
    parent = torch.multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def follow(rank: int, shared: Shared, first: int, args: argparse.Namespace) -> None:
    """The loop of every process but the first: the same batches, no reports. It ends when the first one does."""
    prepare_process(args)
    threading.Thread(target=end_with_parent, daemon=True).start()
    corpus = Corpus(args.corpus, "train", load_tokenizer(args), args.batch)
    worker = Worker(shared, rank, args)
    with fast_experts():
        for step, batch in enumerate(endless(corpus, args.seed, first), first):
            worker.gradients(batch, step)
            shared.barrier.wait()
            worker.step(step)
            shared.barrier.wait()
            if shared.control[1]:
                return


def lead(worker: Worker, progress: Progress, tokenizer: Any) -> None:
    """The first process's loop. Work folder: ``checkpoint.pt`` to go on from, ``best.pt`` to ship."""
    args, shared, backend = worker.args, worker.shared, tokenizer.backend_tokenizer
    corpus = Corpus(args.corpus, "train", backend, args.batch)
    heldout = Corpus(args.corpus, "val", backend, args.batch)
    print(f"{len(corpus)} steps an epoch of {sum(map(len, corpus.target)):,} target tokens", flush=True)
    saved = time.monotonic()
    began = saved - progress.seconds
    losses: list[float] = []
    for batch in endless(corpus, args.seed, progress.step):
        shared.control[0] = learning_rate(progress, args)
        worker.gradients(batch, progress.step)
        shared.barrier.wait()
        losses.append(float(shared.losses.sum()))
        worker.step(progress.step)
        progress.step, progress.seconds = progress.step + 1, time.monotonic() - began
        last = finished(progress, args)
        shared.control[1] = float(last)
        shared.barrier.wait()
        if progress.step % 20 == 0 or last:
            mean = sum(losses) / len(losses)
            print(f"step {progress.step} loss {mean:.3f}, {progress.seconds:,.0f} s", flush=True)
            losses = []
        if progress.step % args.evaluate_every == 0 or last:
            loss, score = validate(shared.average, heldout, tokenizer, args)
            print(f"step {progress.step} validation loss {loss:.4f} BLEU {score:.2f}", flush=True)
            if score > progress.best:
                progress.best = score
                torch.save(shared.average.state_dict(), args.work / "best.pt")
        if time.monotonic() - saved > args.save_every or last:
            save(worker, progress)
            saved = time.monotonic()
        if last:
            return


def validate(model: Any, corpus: Corpus, tokenizer: Any, args: argparse.Namespace) -> tuple[float, float]:
    """Loss a token, without label smoothing, and greedy BLEU on the validation set."""
    total, count = 0.0, 0
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=not args.fp32):
        for batch in corpus.batches([0]):
            tokens = int((batch.target != 0).sum())
            total += translation_loss(model, batch, 0.0).item() * tokens
            count += tokens
        answers = translate(model, tokenizer, corpus.english, beams=1)
    return total / count, bleu(answers, corpus.german)


def prepare_process(args: argparse.Namespace) -> None:
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # as in train_tiny_moe.py
        for option, value in ((-4, 0), (-1, 1 << 30), (-2, 1 << 28)):
            libc.mallopt(option, value)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def train(args: argparse.Namespace) -> None:
    """Train to the last step or minute in ``--processes`` processes, then write the folder ``--out``."""
    args.work.mkdir(parents=True, exist_ok=True)
    prepare_process(args)
    tokenizer = pretrained_tokenizer(load_tokenizer(args))
    shared = share(build_model(args).train(), args.processes)
    worker = Worker(shared, 0, args)
    progress = load(worker)
    print(f"{shared.gradients.shape[1]:,} parameters, {args.processes} processes", flush=True)
    if not finished(progress, args):
        context = torch.multiprocessing.get_context("spawn")
        for rank in range(1, args.processes):
            context.Process(target=follow, args=(rank, shared, progress.step, args), daemon=True).start()
        with fast_experts():
            lead(worker, progress, tokenizer)
    weights = torch.load(args.work / "best.pt", weights_only=True)
    export(shared.average, tokenizer, weights, args.out)
    print(f"trained {progress.step} steps in {progress.seconds:,.0f} s; validation BLEU {progress.best:.2f}")


def export(model: Any, tokenizer: Any, weights: dict[str, torch.Tensor], out: Path) -> None:
    """Write the Hugging Face folder, in bf16."""
    model.load_state_dict(weights)
    model.to(torch.bfloat16).eval()
    model.config.task_specific_params = {"translation_en_to_de": {"prefix": ""}}  # how T5 says its languages
    model.generation_config = GenerationConfig(
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, max_new_tokens=LONGEST
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def evaluate(args: argparse.Namespace) -> None:
    """Measure the folder ``--out`` on the test set with transformers' own code."""
    prepare_process(args)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    corpus = Corpus(args.corpus, "test_2016_flickr", tokenizer.backend_tokenizer, 4096)
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForSeq2SeqLM.from_pretrained(args.out, dtype=dtype).eval()
        for beams in (1, 5):
            answers = translate(model, tokenizer, corpus.english, beams)
            print(f"{dtype}, beams {beams}: BLEU {bleu(answers, corpus.german):.2f}", flush=True)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    total = sum(p.numel() for p in model.parameters())
    size = sum(file.stat().st_size for file in args.out.iterdir()) / 1e6
    print(f"{total:,} parameters, {experts:,} of them in routed experts; {size:.1f} MB")
    for name, found in expert_counts(model, corpus).items():
        print(name, " ".join(f"{share:.3f}" for share in (found / found.sum()).tolist()))


def main() -> None:
    args = parse_arguments()
    if args.evaluate:
        evaluate(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
