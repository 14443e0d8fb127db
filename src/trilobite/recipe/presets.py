"""The recipes that come with Trilobite."""

from dataclasses import replace

from trilobite.recipe.rules import Recipe, Rule
from trilobite.recipe.vocabulary import (
    BODY_ROLES,
    DENSE_ROLES,
    PUBLISHED_ITERATIONS,
    Format,
    Role,
    parse_format,
)

HEAD_RULE = Rule(roles=(Role.HEAD,), format=Format(bits=8, group=64))
"""At batch 1 a 16-bit head costs up to a third of the time of a model with few active weights."""


def _preset(name: str, body: str, method: str, summary: str, *, rank: str = "") -> Recipe:
    rules = (Rule(roles=BODY_ROLES, format=parse_format(body), method=method), HEAD_RULE)
    return Recipe(name=name, rules=rules, rank=rank, summary=summary)


def _fine(bits: int, fmt: str, summary: str) -> Recipe:
    """Column scales, and errors weighed by what enters each column."""
    plain = _preset(f"fine{bits}", fmt, "search", summary)
    return replace(plain, columns="sinkhorn", importance="builtin")


def _published(name: str, summary: str) -> Recipe:
    """MiLo as printed: Algorithm 1 with HQQ by eq. 4-9 and eq. 13, a 16-bit head, Table 4's ranks without a cap.

    20 rounds at most: each goes as far as the low rank, not farther, and so it takes more of them.
    """
    rules = (Rule(roles=BODY_ROLES, format=Format(bits=3, group=64), method="hqq-paper"),)
    rank = f"auto:{name.removesuffix('-paper')}"
    return Recipe(
        name=name,
        rules=rules,
        rank=rank,
        iterations=PUBLISHED_ITERATIONS,
        refit=False,
        cap=False,
        summary=summary,
    )


def _experts_only(name: str, experts: str, summary: str) -> Recipe:
    """Symmetric per-channel weights by the largest of each row, of the experts alone (arXiv:2211.10017, section 3.1)."""
    rules = (Rule(roles=(Role.EXPERT,), format=Format.parse(experts), method="rtn"),)
    return Recipe(name=name, rules=rules, summary=summary)


def _mixed(name: str, dense: str, experts: str, summary: str) -> Recipe:
    rules = (
        Rule(roles=(Role.EXPERT,), format=Format.parse(experts)),
        Rule(roles=DENSE_ROLES, format=Format.parse(dense)),
        HEAD_RULE,
    )
    return Recipe(name=name, rules=rules, summary=summary)


PRESETS: dict[str, Recipe] = {
    r.name: r
    for r in (
        _preset("rtn3", "int3-g64", "rtn", "3-bit round to nearest: the baseline"),
        _preset("hqq3", "int3-g64", "hqq", "3-bit half-quadratic zero points: MiLo's baseline"),
        _preset("search3", "int3-g64", "search", "3-bit, scale and offset of least error per group"),
        _preset(
            "super2", "int2-g16-super", "search", "2-bit in groups of 16, 4-bit scales under super-scales"
        ),
        _preset(
            "super3", "int3-g16-super", "search", "3-bit in groups of 16, 4-bit scales under super-scales"
        ),
        _preset(
            "super4", "int4-g32-super", "search", "4-bit in groups of 32, 4-bit scales under super-scales"
        ),
        _fine(2, "int2-g16-super", "super2 with column scales, errors weighed by a text that comes along"),
        _fine(3, "int3-g16-super", "super3 with column scales, errors weighed by a text that comes along"),
        _fine(4, "int4-g32-super", "super4 with column scales, errors weighed by a text that comes along"),
        _preset("gptq2", "int2-g64", "gptq", "2-bit, errors fed back by a Hessian: needs --calibration"),
        _preset("gptq3", "int3-g64", "gptq", "3-bit, errors fed back by a Hessian: needs --calibration"),
        _preset("gptq4", "int4-g64", "gptq", "4-bit, errors fed back by a Hessian: needs --calibration"),
        _preset("int8", "int8-g64", "rtn", "8-bit: near lossless"),
        _preset("int4", "int4-g64", "search", "4-bit, scale and offset of least error per group"),
        _preset(
            "milo-s1", "int3-g64", "search", "3-bit with low-rank compensators, small", rank="auto:milo-s1"
        ),
        _preset(
            "milo-s2", "int3-g64", "search", "3-bit with low-rank compensators, large", rank="auto:milo-s2"
        ),
        _published("milo-s1-paper", "MiLo-s1 as published: quantizer, compensators and ranks"),
        _published("milo-s2-paper", "MiLo-s2 as published: quantizer, compensators and ranks"),
        _experts_only("int8-experts", "int8-channel-sym", "8-bit experts per channel, all else in 16 bit"),
        _experts_only("int4-experts", "int4-channel-sym", "4-bit experts per channel, all else in 16 bit"),
        _mixed("mixed-4-3", "int4-g64", "int3-g64", "4-bit dense parts, 3-bit experts (MoE offloading)"),
        _mixed("mixed-4-2", "int4-g64", "int2-g64", "4-bit dense parts, 2-bit experts (MoE offloading)"),
        _preset("quip2", "e8p-2", "ldlq", "2-bit QuIP#: incoherence, lattice codes, calibrated rounding"),
        _preset("quip3", "e8p-3", "ldlq", "3-bit QuIP#"),
        _preset("quip4", "e8p-4", "ldlq", "4-bit QuIP#"),
        _preset("quip2-free", "e8p-2", "search", "2-bit QuIP# without data: incoherence and lattice codes"),
        _preset("quip3-free", "e8p-3", "search", "3-bit QuIP# without data"),
        _preset("quip4-free", "e8p-4", "search", "4-bit QuIP# without data"),
    )
}
