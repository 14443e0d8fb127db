"""Train a small Mixtral-architecture language model, and its tokenizer, from plain text files.

This program made ``examples/tiny-moe`` (see ``examples/README.md``). Documents in a text file are separated
by blank lines; one that shares a line of 60 characters or more with the held-out file is not trained on. The
work folder, one for each run, holds the tokenizer, the token stream and a checkpoint written every minute:
the same command run again continues from there. Training uses a GPU where there is one.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

EOS, PAD = "<|endoftext|>", "<|pad|>"  # ids 0 and 1
LOSS_ROWS = 256  # rows of logits computed at a time: they then stay in the processor's cache


SETTINGS: list[tuple[str, int | float, str]] = [
    ("--tokens", 5_000_000, "training tokens; the learning rate falls to zero there"),
    ("--batch", 8, "sequences a step"),
    ("--context", 512, "tokens a sequence"),
    ("--vocab", 4096, "tokenizer size"),
    ("--hidden", 192, "hidden size"),
    ("--intermediate", 256, "width of an expert"),
    ("--layers", 4, "decoder layers"),
    ("--heads", 6, "attention heads; half as many key/value heads"),
    ("--experts", 8, "experts a layer, two used a token"),
    ("--lr", 0.02, "peak learning rate of the hidden matrices (Muon)"),
    ("--adam-lr", 0.004, "peak learning rate of embedding, head, norms and routers (Adam)"),
    ("--aux", 0.01, "weight of the router load-balancing loss"),
    ("--seed", 0, "seed of the initial weights and of the data order"),
    ("--threads", 1, "CPU threads"),
    ("--save-every", 60.0, "seconds between checkpoints"),
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("texts", type=Path, nargs="+", help="training text files")
    parser.add_argument("--heldout", type=Path, required=True, help="text for the perplexity, not trained on")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokens and checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="Hugging Face folder to write at the end")
    for name, default, text in SETTINGS:
        parser.add_argument(name, type=type(default), default=default, help=f"{text} (default {default})")
    parser.add_argument("--joint-balance", action="store_true", help="balance all layers together")
    parser.add_argument("--fp32", action="store_true", help="no bf16 autocast, for a CPU without bf16 units")
    return parser.parse_args()


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: cannot read the text file {path}: {getattr(error, 'strerror', None) or error}")


def prepare_text(args: argparse.Namespace) -> tuple[Tokenizer, np.ndarray]:
    """Train the byte-level BPE tokenizer and tokenize the text, or load both from the work folder."""
    tokenizer_file, token_file = args.work / "tokenizer.json", args.work / "tokens.npy"
    if token_file.exists():
        return Tokenizer.from_file(str(tokenizer_file)), np.load(token_file)
    held = {line for line in read_text(args.heldout).splitlines() if len(line) >= 60}
    found = [doc.strip() for path in args.texts for doc in read_text(path).split("\n\n") if doc.strip()]
    docs = [doc for doc in found if held.isdisjoint(doc.splitlines())]
    print(f"{len(docs):,} documents; {len(found) - len(docs)} left out, in {args.heldout}", flush=True)
    np.random.default_rng(args.seed).shuffle(docs)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=args.vocab, special_tokens=[EOS, PAD], show_progress=False)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(docs[: len(docs) // 4 + 1], trainer)  # a quarter is plenty for the merges
    stream: list[np.ndarray] = []
    for start in range(0, len(docs), 500):
        for encoding in tokenizer.encode_batch([doc + "\n\n" + EOS for doc in docs[start : start + 500]]):
            stream.append(np.array(encoding.ids, dtype=np.uint16))
    tokens = np.concatenate(stream)
    tokenizer.save(str(tokenizer_file))
    np.save(token_file.with_suffix(".part.npy"), tokens)
    os.replace(token_file.with_suffix(".part.npy"), token_file)
    print(f"{len(tokens):,} tokens, vocabulary {tokenizer.get_vocab_size():,}", flush=True)
    return tokenizer, tokens


def get_batch(tokens: np.ndarray, step: int, args: argparse.Namespace) -> torch.Tensor:
    """The sequences of a step, a function of seed and step alone: a new random order each epoch."""
    count = len(tokens) // args.context
    if count < args.batch:
        sys.exit(f"error: the text has {len(tokens):,} tokens, fewer than one batch")
    epoch, position = divmod(step, count // args.batch)
    order = np.random.default_rng([args.seed, epoch]).permutation(count)
    rows = order[position * args.batch : (position + 1) * args.batch]
    return torch.from_numpy(tokens[: count * args.context].reshape(count, -1)[rows].astype(np.int64))


def sorted_experts(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Experts over tokens sorted by expert: about a quarter faster than ``grouped_mm`` on one CPU thread.

    Row counts are padded to multiples of 128: oneDNN compiles a kernel for each new shape that it meets.
    """
    flat, per_token = index.reshape(-1), index.shape[-1]
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=self.num_experts).tolist()
    outputs = []
    for expert, rows in enumerate((order // per_token).split(counts)):
        states = hidden[F.pad(rows, (0, -len(rows) % 128))]
        gate, up = F.linear(states, self.gate_up_proj[expert]).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, self.down_proj[expert])[: len(rows)])
    unsorted = torch.cat(outputs)[order.argsort()].view(*index.shape, -1)
    return (unsorted * weight.to(unsorted.dtype).unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


def build_model(args: argparse.Namespace) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 2),
        num_local_experts=args.experts,
        num_experts_per_tok=2,
        max_position_embeddings=args.context,
        router_aux_loss_coef=args.aux,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(args.seed)
    ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts)
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("sorted")
    return model


def losses(
    model: MixtralForCausalLM, batch: torch.Tensor, aux: float = 0.0, joint: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean next-token cross entropy, without and with the router load-balancing loss.

    transformers balances the experts of all layers together (``joint``), which leaves a single layer free to
    use two experts only; here each layer is balanced by itself unless that is asked for.
    """
    output = model.model(batch, use_cache=False, output_router_logits=aux > 0)
    hidden, target = output.last_hidden_state[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
    total = torch.zeros((), device=batch.device)
    for rows, labels in zip(hidden.split(LOSS_ROWS), target.split(LOSS_ROWS), strict=True):
        total = total + F.cross_entropy(model.lm_head(rows).float(), labels, reduction="sum")
    loss = total / len(target)
    if aux == 0:
        return loss.detach(), loss
    logits, experts = output.router_logits, model.config.num_local_experts
    groups = [logits] if joint else [(layer,) for layer in logits]
    balance = sum(load_balancing_loss_func(group, experts, top_k=2) for group in groups) / len(groups)
    return loss.detach(), loss + aux * balance


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalised step (five Newton-Schulz iterations), for (stacks of) matrices."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "average" not in state:
                    state["average"] = torch.zeros_like(param)
                average = state["average"].lerp_(param.grad, 1 - group["momentum"])
                x = param.grad.lerp(average, group["momentum"]).bfloat16()
                rows, columns = x.shape[-2:]
                x = x.mT if rows > columns else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    gram = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                x = x.mT if rows > columns else x
                param.add_(x.to(param.dtype), alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def perplexity(model: MixtralForCausalLM, ids: list[int], context: int, device: str) -> float:
    """Perplexity over windows without overlap; the short last window counts too."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in torch.tensor(ids, device=device).split(context):
            if len(window) > 1:
                total += losses(model, window[None])[0].item() * (len(window) - 1)
                count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    args = parse_arguments()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc: keep freed memory,
        for option, value in ((-4, 0), (-1, 1 << 30), (-2, 1 << 28)):  # (mmap max, trim threshold, top pad)
            libc.mallopt(option, value)  # as fresh pages every step cost about a tenth of the speed
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # denormal numbers in a softmax can be slow
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heldout = read_text(args.heldout)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer, tokens = prepare_text(args)

    model = build_model(args).to(device).train()
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim >= 2 and "layers" in n and ".gate.weight" not in n]
    others = [p for p in named.values() if not any(p is m for m in matrices)]
    adam = torch.optim.Adam(others, lr=args.adam_lr, betas=(0.9, 0.95), eps=1e-10, fused=True)
    optimizers = [(Muon(matrices, lr=args.lr), args.lr), (adam, args.adam_lr)]  # each with its peak rate
    steps, first, before = math.ceil(args.tokens / (args.batch * args.context)), 0, 0.0
    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for (optimizer, _), optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        torch.set_rng_state(state["rng"].cpu())
        first, before = state["step"], state["seconds"]
        print(f"continuing at step {first} of {steps}", flush=True)
    print(f"{sum(p.numel() for p in named.values()):,} parameters, {steps} steps, {device}", flush=True)

    began = saved = time.monotonic()
    warmup, recent = max(1, steps // 40), []  # recent: the losses since the last progress line
    for step in range(first, steps):
        rate = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        with torch.autocast(device, torch.bfloat16, enabled=not args.fp32):
            plain, loss = losses(
                model, get_batch(tokens, step, args).to(device), args.aux, args.joint_balance
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent.append(plain)
        done, now = step + 1, time.monotonic()
        if done % 10 == 0 or done == steps:
            mean, pace = torch.stack(recent).mean().item(), (now - began) / (done - first)
            speed, left = args.batch * args.context / pace, (steps - done) * pace / 60
            print(f"step {done}/{steps} loss {mean:.3f} {speed:,.0f} tokens/s ETA {left:.1f} min", flush=True)
            recent = []
        if now - saved > args.save_every or done == steps:
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o, _ in optimizers]}
            state |= {"step": done, "seconds": before + now - began, "rng": torch.get_rng_state()}
            torch.save(state, checkpoint.with_suffix(".part"))
            os.replace(
                checkpoint.with_suffix(".part"), checkpoint
            )  # an interruption leaves the old one whole
            saved = now
    seconds = before + time.monotonic() - began

    model.to(torch.bfloat16).eval()
    model.set_experts_implementation("eager")
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    model.save_pretrained(args.out)
    names = {"bos_token": EOS, "eos_token": EOS, "pad_token": PAD, "model_max_length": args.context}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(args.out)
    ids = tokenizer.encode(heldout).ids
    heldout_perplexity = perplexity(model, ids, args.context, device)
    read = steps * args.batch * args.context
    size = sum(file.stat().st_size for file in args.out.iterdir()) / 1e6
    print(f"trained on {read:,} tokens in {seconds:,.0f} s; wrote {args.out} ({size:.1f} MB)")
    nats = math.log(heldout_perplexity)
    print(f"held-out text: {len(ids):,} tokens, loss {nats:.4f}, perplexity {heldout_perplexity:.2f}")


if __name__ == "__main__":
    main()
