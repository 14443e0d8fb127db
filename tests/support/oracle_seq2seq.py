"""The sparse layers of NLLB-MoE and Switch as their papers tell, token by token, from the tensors of a checkpoint.

Imports nothing of trilobite and no model of transformers. NLLB-MoE: arXiv 2207.04672, section 6.1, and fairseq's
Top2Gate; Switch: arXiv 2101.03961, section 2. Also says which experts each token went to, for tests to know what they
tried.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
"""Tensors of one sparse layer by their names on disk, without the layer's."""
Choice = list[tuple[int, float]]
"""A token's experts and what each weighs; a dropped one is not among them."""


def nllb_moe(x: Tensor, weights: Weights, config: Any, padding: list[bool]) -> tuple[Tensor, list[Choice]]:
    """x: [T, H] fp32, all tokens of a batch    padding: of each token    returns: y [T, H], choices."""
    probabilities = []
    for token in x:
        logits = weights["router.classifier.weight"] @ token
        if config.router_bias:
            logits = logits + weights["router.classifier.bias"]
        probabilities.append(logits.softmax(0))
    ranked = [p.argsort(descending=True).tolist()[:2] for p in probabilities]
    order = list(range(len(x)))
    if config.batch_prioritized_routing:
        order.sort(key=lambda t: -float(probabilities[t].max()))
    capacity = math.ceil(config.moe_eval_capacity_token_fraction * len(x))
    if config.moe_eval_capacity_token_fraction <= 0:
        capacity = config.expert_capacity
    places: Counter[int] = Counter()
    kept: set[tuple[int, int]] = set()
    for rank in (0, 1):  # all first choices, then all second ones
        for t in order:
            if padding[t] and not config.router_ignore_padding_tokens:
                continue
            if places[ranked[t][rank]] < capacity:
                kept.add((t, rank))
            places[ranked[t][rank]] += 1
    y, choices = torch.zeros_like(x), []
    for t in range(len(x)):
        pair = [float(probabilities[t][e]) for e in ranked[t]]
        counted = [
            p for r, p in enumerate(pair) if config.normalize_router_prob_before_dropping or (t, r) in kept
        ]
        choice = [(e, pair[r] / sum(counted)) for r, e in enumerate(ranked[t]) if (t, r) in kept]
        choices.append(choice)
        for e, share in choice:
            inner = weights[f"experts.expert_{e}.fc1.weight"] @ x[t] + weights[f"experts.expert_{e}.fc1.bias"]
            out = weights[f"experts.expert_{e}.fc2.weight"] @ inner.relu()
            out = out + weights[f"experts.expert_{e}.fc2.bias"]
            y[t] += share * (1 - config.moe_token_dropout) * out
    return y, choices


def switch(x: Tensor, weights: Weights, config: Any) -> tuple[Tensor, list[Choice]]:
    """x: [B, S, H] fp32; every sequence fills its experts anew    returns: y [B, S, H], choices of all tokens."""
    y, choices = torch.zeros_like(x), []
    for b, sequence in enumerate(x):
        places: Counter[int] = Counter()
        for s, token in enumerate(sequence):
            probability = (weights["router.classifier.weight"] @ token).softmax(0)
            e = int(probability.argmax())
            places[e] += 1
            choices.append([(e, float(probability[e]))] if places[e] <= config.expert_capacity else [])
            for expert, share in choices[-1]:
                inner = (weights[f"experts.expert_{expert}.wi.weight"] @ token).relu()
                y[b, s] = share * (weights[f"experts.expert_{expert}.wo.weight"] @ inner)
    return y, choices
