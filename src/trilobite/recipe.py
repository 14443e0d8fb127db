"""The vocabulary of compression: Role, Format, LatticeFormat, Rule, Recipe, presets, and their YAML form.

A recipe is a list of rules from roles, name patterns and layer ranges to a format, a method and a rank; the first rule
that matches a tensor decides. It says nothing about one checkpoint; `quantize.plan` resolves it into a plan.

    name: my-recipe
    rank: dense-h/8+kurtosis-16        # policies of Table 4 of MiLo; h = the hidden size
    compensator: int3                  # int3 | int8 | fp16
    rules:
      - {roles: [head], format: int8-g64, method: search}
      - {names: "*.layers.0.*", format: int4-g64, method: search}
      - {roles: [expert], layers: [1, 30], format: int3-g64, method: hqq, rank: 16}
      - {roles: [attention, shared_expert, dense_mlp, expert], format: int3-g64, method: search}
"""

import difflib
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from trilobite.errors import RecipeError


class Role(str, Enum):
    """What a tensor is. *Dense* roles work on every token, `expert` (routed experts) is *sparse*."""

    ATTENTION = "attention"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    DENSE_MLP = "dense_mlp"
    ROUTER = "router"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    OTHER = "other"


DENSE_ROLES = (Role.ATTENTION, Role.SHARED_EXPERT, Role.DENSE_MLP)
BODY_ROLES = (*DENSE_ROLES, Role.EXPERT)
METHODS = ("rtn", "search", "hqq", "gptq", "gptq-order", "ldlq")
CALIBRATED_METHODS = ("gptq", "gptq-order", "ldlq")
"""Methods that need the Hessian of a layer's inputs, so a calibration text."""
LATTICE_METHODS = ("rtn", "search", "ldlq")
"""Methods that find the codes of a lattice format; the affine formats take rtn and search, and all others."""
COMPENSATORS = {"int3": 3, "int8": 8, "fp16": 16}
"""Compensator formats and their bits."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """What stored codes mean: `int3-g64`, `int4-channel-sym`, `int2-g32-dq`.

    bits: 2, 3, 4 or 8    group: columns that share a scale, 0 = a whole row (per channel)
    symmetric: no offset    double_quant: scales and offsets are themselves 8-bit
    """

    bits: int
    group: int
    symmetric: bool = False
    double_quant: bool = False

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Read a format's name; raises RecipeError with the grammar."""
        m = re.fullmatch(r"int([2348])-(?:g(\d+)|channel)(-sym)?(-dq)?", text)
        group = int(m[2] or 0) if m else -1
        if not m or group % 32:
            raise RecipeError(
                f"format {text!r}: expected int{{2,3,4,8}}-{{g32,g64,g128,channel}}[-sym][-dq], for example int3-g64"
            )
        return cls(bits=int(m[1]), group=group, symmetric=bool(m[3]), double_quant=bool(m[4]))

    def __str__(self) -> str:
        """The name that `parse` reads."""
        size = f"g{self.group}" if self.group else "channel"
        return f"int{self.bits}-{size}{'-sym' if self.symmetric else ''}{'-dq' if self.double_quant else ''}"

    def group_size(self, k: int) -> int:
        """Columns per group in a matrix of K = k columns."""
        return self.group or k


CODEBOOKS = ("e8p", "grid")
"""E8P, the 2-bit lattice codebook of QuIP# and its residual forms for 3 and 4 bits; the half-integer scalar grid."""
TRANSFORMS = ("hadamard", "fourier")


@dataclass(frozen=True, kw_only=True)
class LatticeFormat:
    """What stored codes mean after incoherence processing (QuIP#): `e8p-2`, `e8p-3-fourier`, `grid-4`.

    codebook: `e8p` or `grid`    bits: 2, 3 or 4    transform: the random rotation of both sides of the matrix
    """

    codebook: str
    bits: int
    transform: str = "hadamard"

    @classmethod
    def parse(cls, text: str) -> "LatticeFormat":
        """Read a format's name; raises RecipeError with the grammar."""
        m = re.fullmatch(r"(e8p|grid)-([234])(-fourier)?", text)
        if not m:
            raise RecipeError(
                f"format {text!r}: expected {{e8p,grid}}-{{2,3,4}}[-fourier], for example e8p-2"
            )
        return cls(codebook=m[1], bits=int(m[2]), transform="fourier" if m[3] else "hadamard")

    def __str__(self) -> str:
        """The name that `parse` reads."""
        return f"{self.codebook}-{self.bits}{'-fourier' if self.transform == 'fourier' else ''}"


AnyFormat = Format | LatticeFormat


def parse_format(text: str) -> AnyFormat:
    """Read the name of a format of either kind; raises RecipeError with the grammar."""
    if text.startswith(CODEBOOKS):
        return LatticeFormat.parse(text)
    try:
        return Format.parse(text)
    except RecipeError as e:
        raise RecipeError(f"{e}, or {{e8p,grid}}-{{2,3,4}}[-fourier]") from None


def check_method(fmt: AnyFormat, method: str) -> None:
    """Raise RecipeError when the method cannot find codes of the format."""
    lattice = isinstance(fmt, LatticeFormat)
    known = LATTICE_METHODS if lattice else [m for m in METHODS if m != "ldlq"]
    if method not in known:
        raise RecipeError(f"method {method!r} does not quantize to {fmt}; expected one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a recipe. Empty conditions match everything; `format` None keeps the tensor in 16 bit.

    rank: overrides the recipe's policy: an integer, `h/8` (a fraction of the hidden size), or None
    """

    roles: tuple[Role, ...] = ()
    names: str = "*"
    layers: tuple[int, int] | None = None
    format: AnyFormat | None = None
    method: str = "search"
    rank: str | None = None

    def matches(self, role: Role, name: str, layer: int | None) -> bool:
        """Whether this rule decides about the tensor. Layer ranges include both ends."""
        if self.roles and role not in self.roles:
            return False
        if self.layers and (layer is None or not self.layers[0] <= layer <= self.layers[1]):
            return False
        return fnmatchcase(name, self.names)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the user asks for. See the module docstring for the YAML form.

    rank: sum of policies `uniform-r`, `dense-r`, `sparse-r`, `kurtosis-r`, `frequency-r`; "" = no compensators
    iterations: cap of MiLo's alternation (paper: 20; 1 = quantize, then compensate once)
    cap: no compensator costs more bytes than the next wider format would
    roles: (name pattern, role) for tensors that the built-in table does not know (docs/roles.md)
    """

    name: str
    rules: tuple[Rule, ...]
    rank: str = ""
    compensator: str = "int3"
    iterations: int = 20
    cap: bool = True
    roles: tuple[tuple[str, Role], ...] = ()
    summary: str = field(default="", compare=False)

    def rule_for(self, role: Role, name: str, layer: int | None) -> Rule | None:
        """The first rule that matches, or None."""
        return next((r for r in self.rules if r.matches(role, name, layer)), None)

    def keeping(self, roles: tuple[Role, ...]) -> "Recipe":
        """The same recipe with these roles kept in 16 bit."""
        if not roles:
            return self
        return replace(self, name=f"{self.name}+keep", rules=(Rule(roles=roles), *self.rules))

    def with_group(self, group: int) -> "Recipe":
        """The same recipe with another group size in every rule; lattice formats have no groups."""
        rules = tuple(
            replace(r, format=replace(r.format, group=group)) if isinstance(r.format, Format) else r
            for r in self.rules
        )
        return replace(self, rules=rules)

    def with_method(self, method: str) -> "Recipe":
        """The same recipe with another method in every rule whose format it fits.

        Raises RecipeError when there is none.
        """
        if method not in METHODS:
            raise RecipeError(f"method {method!r}; expected one of {', '.join(METHODS)}")
        rules: list[Rule] = []
        refusals: list[RecipeError] = []
        for r in self.rules:
            try:
                if r.format is not None:
                    check_method(r.format, method)
                rules.append(replace(r, method=method))
            except RecipeError as e:
                rules.append(r)
                refusals.append(e)
        if refusals and not any(r.format is not None and r.method == method for r in rules):
            raise refusals[0]
        return replace(self, rules=tuple(rules))

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what YAML and JSON store. `from_dict` reads it back to an equal recipe."""
        rules = []
        for r in self.rules:
            rule: dict[str, Any] = {"format": str(r.format) if r.format else "keep", "method": r.method}
            if r.roles:
                rule["roles"] = [role.value for role in r.roles]
            if r.names != "*":
                rule["names"] = r.names
            if r.layers:
                rule["layers"] = list(r.layers)
            if r.rank is not None:
                rule["rank"] = r.rank
            rules.append(rule)
        return {
            "name": self.name,
            "rank": self.rank,
            "compensator": self.compensator,
            "iterations": self.iterations,
            "cap": self.cap,
            "roles": {pattern: role.value for pattern, role in self.roles},
            "rules": rules,
        }


def needs_calibration(recipe: Recipe) -> bool:
    """Whether any rule of the recipe names a method that works on a calibration text."""
    return any(r.format is not None and r.method in CALIBRATED_METHODS for r in recipe.rules)


RANK_POLICIES = ("uniform", "dense", "sparse", "kurtosis", "frequency")


def parse_rank(text: str, hidden: int) -> int:
    """`16`, `h/8`, `25h/64` -> a rank. Raises RecipeError."""
    m = re.fullmatch(r"(\d*)h(?:/0*([1-9]\d*))?", text)
    if m and not hidden:
        raise RecipeError(
            f"rank {text!r}: config.json names no hidden_size to take a fraction of; give an integer"
        )
    if m:
        return max(1, round(int(m[1] or 1) * hidden / int(m[2] or 1)))
    if text.isdigit():
        return int(text)
    raise RecipeError(
        f"rank {text!r}: expected an integer or a fraction of the hidden size, for example 16 or h/8"
    )


def parse_policies(text: str, hidden: int) -> list[tuple[str, int]]:
    """`dense-512+kurtosis-16` -> [("dense", 512), ("kurtosis", 16)]. Raises RecipeError."""
    policies = []
    for part in filter(None, (p.strip() for p in text.split("+"))):
        kind, _, rank = part.partition("-")
        if kind not in RANK_POLICIES:
            raise RecipeError(
                f"rank policy {part!r}: expected one of {', '.join(p + '-r' for p in RANK_POLICIES)} "
                "joined by +, for example dense-512+kurtosis-16"
            )
        policies.append((kind, parse_rank(rank, hidden)))
    return policies


def recipe_from_dict(data: Any, name: str) -> Recipe:
    """Read plain data (from YAML or JSON) as a recipe. Raises RecipeError that names the offending key."""
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list) or not data["rules"]:
        raise RecipeError(
            f"recipe {name}: expected a mapping with a non-empty list 'rules' (docs/recipes.md)"
        )
    known = {"name", "rank", "compensator", "iterations", "cap", "roles", "rules", "summary"}
    _reject_unknown(data, known, f"recipe {name}")
    compensator = data.get("compensator", "int3")
    if compensator not in COMPENSATORS:
        raise RecipeError(
            f"recipe {name}: compensator {compensator!r}; expected one of {', '.join(COMPENSATORS)}"
        )
    iterations = data.get("iterations", 20)
    if not isinstance(iterations, int) or iterations < 1:
        raise RecipeError(f"recipe {name}: iterations {iterations!r}; expected an integer of at least 1")
    rank = str(data.get("rank") or "")
    if not rank.startswith("auto:"):
        parse_policies(rank, 4096)
    elif rank.removeprefix("auto:") not in MILO_RANKS:
        raise RecipeError(
            f"recipe {name}: rank {rank!r}; known are {', '.join('auto:' + r for r in MILO_RANKS)}"
        )
    roles = data.get("roles") or {}
    if not isinstance(roles, dict):
        raise RecipeError(f"recipe {name}: roles {roles!r}; expected a mapping from name pattern to role")
    rules = tuple(_rule_from_dict(r, f"recipe {name}, rule {i}") for i, r in enumerate(data["rules"], 1))
    return Recipe(
        name=str(data.get("name", name)),
        rules=rules,
        rank=rank,
        compensator=compensator,
        iterations=iterations,
        cap=bool(data.get("cap", True)),
        roles=tuple((str(pattern), parse_role(str(role))) for pattern, role in roles.items()),
        summary=str(data.get("summary", "")),
    )


def _rule_from_dict(data: Any, where: str) -> Rule:
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: expected a mapping such as {{roles: [expert], format: int3-g64}}")
    _reject_unknown(data, {"roles", "names", "layers", "format", "method", "rank"}, where)
    roles = data.get("roles", [])
    roles = [roles] if isinstance(roles, str) else roles
    layers = data.get("layers")
    if layers is not None and not (
        isinstance(layers, list) and len(layers) == 2 and all(isinstance(v, int) for v in layers)
    ):
        raise RecipeError(f"{where}: layers {layers!r}; expected [first, last], both included")
    method = data.get("method", "search")
    if method not in METHODS:
        raise RecipeError(f"{where}: method {method!r}; expected one of {', '.join(METHODS)}")
    text = data.get("format", "keep")
    fmt = None if text == "keep" else parse_format(str(text))
    if fmt is not None:
        try:
            check_method(fmt, method)
        except RecipeError as e:
            raise RecipeError(f"{where}: {e}") from None
    rank = data.get("rank")
    if rank is not None:
        parse_rank(str(rank), 4096)
    return Rule(
        roles=tuple(parse_role(r) for r in roles),
        names=str(data.get("names", "*")),
        layers=(layers[0], layers[1]) if layers else None,
        format=fmt,
        method=method,
        rank=None if rank is None else str(rank),
    )


def parse_role(text: str) -> Role:
    """A role by its name; raises RecipeError with the list."""
    try:
        return Role(text)
    except ValueError:
        raise RecipeError(f"role {text!r}: expected one of {', '.join(r.value for r in Role)}") from None


def _reject_unknown(data: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(map(str, data)) - known)
    if unknown:
        raise RecipeError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join(sorted(known))}")


def load_recipe(name_or_file: str) -> Recipe:
    """A preset by name, or a YAML file. Raises RecipeError."""
    if name_or_file in PRESETS:
        return PRESETS[name_or_file]
    path = Path(name_or_file)
    if not path.is_file():
        close = difflib.get_close_matches(name_or_file, PRESETS, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise RecipeError(
            f"recipe {name_or_file!r}: no preset and no file{guess}; presets are {', '.join(PRESETS)}"
        )
    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise RecipeError(f"recipe {path}: not valid YAML: {' '.join(str(e).split())}") from e
    return recipe_from_dict(data, path.stem)


HEAD_RULE = Rule(roles=(Role.HEAD,), format=Format(bits=8, group=64))
"""At batch 1 a 16-bit head costs up to a third of the time of a model with few active weights."""


def _preset(name: str, body: str, method: str, summary: str, *, rank: str = "") -> Recipe:
    rules = (Rule(roles=BODY_ROLES, format=parse_format(body), method=method), HEAD_RULE)
    return Recipe(name=name, rules=rules, rank=rank, summary=summary)


def _published(name: str, summary: str) -> Recipe:
    """MiLo as in Table 4: HQQ inside, 16-bit head, and ranks that no cap lowers."""
    rules = (Rule(roles=BODY_ROLES, format=Format(bits=3, group=64), method="hqq"),)
    rank = f"auto:{name.removesuffix('-paper')}"
    return Recipe(name=name, rules=rules, rank=rank, cap=False, summary=summary)


def _mixed(name: str, dense: str, experts: str, summary: str) -> Recipe:
    rules = (
        Rule(roles=(Role.EXPERT,), format=Format.parse(experts)),
        Rule(roles=DENSE_ROLES, format=Format.parse(dense)),
        HEAD_RULE,
    )
    return Recipe(name=name, rules=rules, summary=summary)


MILO_RANKS = {
    "milo-s1": {"coarse": "dense-h/8+kurtosis-h/256", "fine": "dense-25h/64"},
    "milo-s2": {"coarse": "dense-h/4+kurtosis-h/128", "fine": "dense-h/2+frequency-h/64"},
}
"""MiLo Table 4 as fractions of the hidden size: Mixtral-8x7B (few large experts: `coarse`, h = 4096) and
DeepSeek-MoE-16B (many small experts beside shared ones: `fine`, h = 2048). `auto:NAME` in a recipe's rank picks."""


def resolve_auto_rank(rank: str, *, experts: int, shared: bool) -> str:
    """Replace `auto:milo-s1` by the policy of the published model that this architecture resembles.

    Fine-grained: shared experts, or more than 16 routed ones.
    """
    if not rank.startswith("auto:"):
        return rank
    return MILO_RANKS[rank.removeprefix("auto:")]["fine" if shared or experts > 16 else "coarse"]


PRESETS: dict[str, Recipe] = {
    r.name: r
    for r in (
        _preset("rtn3", "int3-g64", "rtn", "3-bit round to nearest: the baseline"),
        _preset("hqq3", "int3-g64", "hqq", "3-bit half-quadratic zero points: MiLo's baseline"),
        _preset("search3", "int3-g64", "search", "3-bit, scale and offset of least error per group"),
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
        _published("milo-s1-paper", "MiLo-s1 with the published quantizer and ranks"),
        _published("milo-s2-paper", "MiLo-s2 with the published quantizer and ranks"),
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
