"""A recipe from YAML or JSON, or by a preset's name; what is wrong in it is named."""

import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trilobite.errors import RecipeError
from trilobite.recipe.policies import MILO_RANKS, parse_policies, parse_rank
from trilobite.recipe.presets import PRESETS
from trilobite.recipe.rules import Recipe, Rule
from trilobite.recipe.vocabulary import (
    COLUMNS,
    COMPENSATORS,
    IMPORTANCES,
    ITERATIONS,
    METHODS,
    check_method,
    parse_format,
    parse_role,
)

T = TypeVar("T")
KINDS = {str: "text", int: "an integer", bool: "true or false"}


def recipe_from_dict(data: Any, name: str) -> Recipe:
    """Read plain data (from YAML or JSON) as a recipe. Raises RecipeError that names the offending key."""
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list) or not data["rules"]:
        raise RecipeError(
            f"recipe {name}: expected a mapping with a non-empty list 'rules' (docs/recipes.md)"
        )
    where = f"recipe {name}"
    known = {
        "name",
        "rank",
        "compensator",
        "iterations",
        "refit",
        "cap",
        "columns",
        "importance",
        "roles",
        "rules",
        "summary",
    }
    _reject_unknown(data, known, where)
    compensator = _get(data, "compensator", str, "int3", where)
    if compensator not in COMPENSATORS:
        raise RecipeError(f"{where}: compensator {compensator!r}; expected one of {', '.join(COMPENSATORS)}")
    columns = _one_of(data, "columns", COLUMNS, where)
    importance = _one_of(data, "importance", IMPORTANCES, where)
    iterations = _get(data, "iterations", int, ITERATIONS, where)
    if iterations < 1:
        raise RecipeError(f"{where}: iterations {iterations!r}; expected an integer of at least 1")
    rank = str(data.get("rank") or "")
    if not rank.startswith("auto:"):
        parse_policies(rank, 4096)
    elif rank.removeprefix("auto:") not in MILO_RANKS:
        raise RecipeError(f"{where}: rank {rank!r}; known are {', '.join('auto:' + r for r in MILO_RANKS)}")
    roles = data.get("roles") or {}
    if not isinstance(roles, dict):
        raise RecipeError(f"{where}: roles {roles!r}; expected a mapping from name pattern to role")
    rules = tuple(_rule_from_dict(r, f"{where}, rule {i}") for i, r in enumerate(data["rules"], 1))
    return Recipe(
        name=str(data.get("name", name)),
        rules=rules,
        rank=rank,
        compensator=compensator,
        iterations=iterations,
        refit=_get(data, "refit", bool, True, where),
        cap=_get(data, "cap", bool, True, where),
        columns=columns,
        importance=importance,
        roles=tuple((str(pattern), parse_role(str(role))) for pattern, role in roles.items()),
        summary=str(data.get("summary", "")),
    )


def _rule_from_dict(data: Any, where: str) -> Rule:
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: expected a mapping such as {{roles: [expert], format: int3-g64}}")
    _reject_unknown(data, {"roles", "names", "layers", "format", "method", "rank"}, where)
    roles = data.get("roles", [])
    roles = [roles] if isinstance(roles, str) else roles
    if not isinstance(roles, list):
        raise RecipeError(f"{where}: roles {roles!r}; expected a role or a list of roles")
    layers = data.get("layers")
    if layers is not None and not (
        isinstance(layers, list) and len(layers) == 2 and all(type(v) is int for v in layers)
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
        names=_get(data, "names", str, "*", where),
        layers=(layers[0], layers[1]) if layers else None,
        format=fmt,
        method=method,
        rank=None if rank is None else str(rank),
    )


def _get(data: dict[str, Any], key: str, kind: type[T], default: T, where: str) -> T:
    """The value of a key; raises RecipeError unless it is exactly of a kind: to Python true is an int."""
    value = data.get(key, default)
    if type(value) is not kind:
        raise RecipeError(f"{where}: {key} {value!r}; expected {KINDS[kind]}")
    return value


def _one_of(data: dict[str, Any], key: str, known: tuple[str, ...], where: str) -> str:
    """The value of a key that names one of several; the first of them where it is absent."""
    value = _get(data, key, str, known[0], where)
    if value not in known:
        raise RecipeError(f"{where}: {key} {value!r}; expected one of {', '.join(known)}")
    return value


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
