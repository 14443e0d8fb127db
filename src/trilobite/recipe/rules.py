"""A recipe as data: rules in order, the first that matches a tensor decides."""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from trilobite.errors import RecipeError
from trilobite.recipe.vocabulary import (
    CALIBRATED_METHODS,
    ITERATIONS,
    METHODS,
    AnyFormat,
    Format,
    Role,
    check_method,
)


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
    """What the user asks for. The docstring of `trilobite.recipe` has the YAML form.

    rank: sum of policies `uniform-r`, `dense-r`, `sparse-r`, `kurtosis-r`, `frequency-r`; "" = no compensators
    iterations: cap of MiLo's alternation (1 = quantize, then compensate once)
    refit: codes and compensators are fitted to each other as they are stored, which the paper leaves out
    cap: no compensator costs more bytes than the next wider format would
    columns: `sinkhorn` divides columns by scales that norms and other matrices take over (docs/methods.md), or `none`
    importance: where `search` learns what enters each column, to weigh errors by (docs/methods.md), or `none`
    roles: (name pattern, role) for tensors that the built-in table does not know (docs/roles.md)
    """

    name: str
    rules: tuple[Rule, ...]
    rank: str = ""
    compensator: str = "int3"
    iterations: int = ITERATIONS
    refit: bool = True
    cap: bool = True
    columns: str = "none"
    importance: str = "none"
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
        """The same recipe with another group size in every rule; lattice formats have no groups.

        Raises RecipeError for a group that the bits of a rule do not come in.
        """
        rules = tuple(
            replace(r, format=Format.parse(str(replace(r.format, group=group))))
            if isinstance(r.format, Format)
            else r
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
        """Plain data: what YAML and JSON store. `recipe_from_dict` reads it back to an equal recipe."""
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
        extra = {"columns": self.columns, "importance": self.importance}
        return {
            "name": self.name,
            "rank": self.rank,
            "compensator": self.compensator,
            "iterations": self.iterations,
            "cap": self.cap,
            **({} if self.refit else {"refit": False}),
            **{key: value for key, value in extra.items() if value != "none"},
            "roles": {pattern: role.value for pattern, role in self.roles},
            "rules": rules,
        }


def needs_calibration(recipe: Recipe) -> bool:
    """Whether the recipe works on a calibration text: by the method of a rule, or for importance."""
    return recipe.importance == "text" or any(
        r.format is not None and r.method in CALIBRATED_METHODS for r in recipe.rules
    )
