"""What kernels and steps are to reach on any processor, and what the scripts' JSON says of it.

Rates are aimed at in shares of the probe, or of 10 GB/s a core where the memory reads faster than that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.llama import LLAMA
from benchmarks.lib.markdown import table

A_CORE = 10.0
"""GB/s."""
EXACT = {"avx2": 0.65, "avx_vnni": 0.85, "avx512": 0.85}
INT8 = {"avx2": 0.80}
SHARE = 0.90
"""Of one token of Mixtral's layer, by instruction set; SHARE on all others."""
SMALL_EXPERTS = 0.80
SUPER_SCALES = 0.70
MIXTRAL = "Mixtral-8x7B"
SMALL = "DeepSeek-MoE-16B"
OUTSIDE = {MIXTRAL: 0.08}
OUTSIDE_SMALL = 0.15
"""Of a step, outside of packed matrices, at most: of models with large experts, and of all others."""
OF_THE_BOUND = 0.80
OF_LLAMA = 1.5
OF_LLAMA_ALONE = 1.0
MILO_MINUTES = 40.0
SEARCH = 250.0
"""Megaweights a second."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """what: in words, with its unit    wanted, found: in that unit    most: wanted is an upper limit"""

    what: str
    wanted: float
    found: float
    most: bool = False

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.found <= self.wanted if self.most else self.found >= self.wanted


def _under(cap: str) -> str:
    return f"{cap}, " if cap else ""


def of_layers(found: Mapping[str, Any], _: str) -> Iterator[Aim]:
    """Of `benchmarks.speed.cpu --only experts,tiers`."""
    cores = found["info"]["threads"]
    for r in found["tiers"]:
        exact = r["mode"] == "exact"
        share = (EXACT if exact else INT8).get(r["tier"], SHARE)
        if SMALL in r["case"]:
            share = min(share, SMALL_EXPERTS)
        limit = min(r["probe"], A_CORE * cores)
        what = f"one token, {r['case']}, {r['tier']}, {r['mode']}: GB/s, {share:.0%} of {limit:.1f}"
        yield Aim(what=what, wanted=share * limit, found=r["gigabytes"])
    for r in found["experts"]:
        if r["case"].endswith("-super"):
            what = f"one token, {r['case']}, {r['mode']}: share of the probe"
            yield Aim(what=what, wanted=SUPER_SCALES, found=r["share"])


def of_steps(found: Mapping[str, Any], _: str) -> Iterator[Aim]:
    """Of `benchmarks.speed.steps` with one text."""
    for r in found["rows"]:
        name = f"{r['model']}, {r['layers']} layers, {r['mode']}"
        most = OUTSIDE.get(r["model"], OUTSIDE_SMALL)
        outside = 1 - r["matrices"] / r["now"]
        yield Aim(what=f"{name}: share outside of packed matrices", wanted=most, found=outside, most=True)
        if r["mode"] == "exact":
            yield Aim(what=f"{name}: share of its bound", wanted=OF_THE_BOUND, found=r["bound"] / r["now"])


def of_peers(found: Mapping[str, Any], _: str) -> Iterator[Aim]:
    """Of `benchmarks.speed.peers`: texts, for of few layers' prompts others leave one out."""
    for r in found["rows"]:
        for what in (what for what in r["exact"] if what.startswith("tg") and what in r[LLAMA]):
            wanted = OF_LLAMA_ALONE if what == "tg" else OF_LLAMA
            name = f"{r['model']}, {r['tier']}, {what}, exact: of llama.cpp's tokens"
            yield Aim(what=name, wanted=wanted, found=r["exact"][what] / r[LLAMA][what])


def of_prompts(found: Mapping[str, Any], cap: str) -> Iterator[Aim]:
    """Of `benchmarks.speed.prompts`."""
    for name, r in found.items():
        if name != "peaks":
            whole = {program: times["whole"] for program, times in r["seconds"].items()}
            what = f"{_under(cap)}a prompt of all layers, {name}, exact: of llama.cpp's tokens"
            yield Aim(what=what, wanted=OF_LLAMA, found=whole[LLAMA] / whole["exact"])


def of_compression(found: Mapping[str, Any], cap: str) -> Iterator[Aim]:
    """Of `benchmarks.speed.compress`."""
    (mixtral,) = (r for r in found["models"] if r["model"] == MIXTRAL)
    minutes = mixtral["milo-s1 (search)"] / 60
    yield Aim(
        what=f"{_under(cap)}{MIXTRAL} with milo-s1: minutes", wanted=MILO_MINUTES, found=minutes, most=True
    )
    for r in found["speeds"]:
        if r["case"] == "search":
            what = f"{_under(cap)}search, {r['shape'][0]} x {r['shape'][1]}: megaweights a second"
            yield Aim(what=what, wanted=SEARCH, found=r["rate"])


OF: Mapping[str, Callable[[Mapping[str, Any], str], Iterator[Aim]]] = {
    "layers": of_layers,
    "steps": of_steps,
    "peers": of_peers,
    "prompts": of_prompts,
    "compress": of_compression,
}
"""By script: what its JSON says, and the instruction set that it was capped to."""


def aims_table(aims: Sequence[Aim]) -> str:
    """A line that counts, and a markdown table."""
    met = sum(aim.met for aim in aims)
    rows = [
        (
            aim.what,
            f"{'at most' if aim.most else 'at least'} {aim.wanted:.3g}",
            f"{aim.found:.3g}",
            "met" if aim.met else "**missed**",
        )
        for aim in aims
    ]
    return f"{met} of {len(aims)} are met.\n\n{table(('aim', 'wanted', 'found', ''), rows)}"
