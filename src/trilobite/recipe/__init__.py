"""The vocabulary of compression: Role, Format, LatticeFormat, Rule, Recipe, presets, and their YAML form.

A recipe is a list of rules from roles, name patterns and layer ranges to a format, a method and a rank; the first rule
that matches a tensor decides. It says nothing about one checkpoint; `quantize.plan` resolves it into a plan.

    name: my-recipe
    rank: dense-h/8+kurtosis-16        # policies of Table 4 of MiLo; h = the hidden size
    compensator: int3                  # int3 | int8 | fp16
    columns: sinkhorn                  # none | sinkhorn
    importance: builtin                # none | weights | builtin | self | text
    rules:
      - {roles: [head], format: int8-g64, method: search}
      - {names: "*.layers.0.*", format: int4-g64, method: search}
      - {roles: [expert], layers: [1, 30], format: int3-g64, method: hqq, rank: 16}
      - {roles: [attention, shared_expert, dense_mlp, expert], format: int3-g64, method: search}
"""

from trilobite.recipe.policies import MILO_RANKS, parse_policies, parse_rank, resolve_auto_rank
from trilobite.recipe.presets import HEAD_RULE, PRESETS
from trilobite.recipe.reading import load_recipe, recipe_from_dict
from trilobite.recipe.rules import Recipe, Rule, needs_calibration
from trilobite.recipe.vocabulary import (
    BODY_ROLES,
    CALIBRATED_METHODS,
    CODEBOOKS,
    COLUMNS,
    COMPENSATORS,
    DENSE_ROLES,
    IMPORTANCES,
    ITERATIONS,
    METHODS,
    PUBLISHED_ITERATIONS,
    TRANSFORMS,
    AnyFormat,
    Format,
    LatticeFormat,
    Role,
    check_method,
    is_group,
    parse_format,
    parse_role,
)

__all__ = [
    "BODY_ROLES",
    "CALIBRATED_METHODS",
    "CODEBOOKS",
    "COLUMNS",
    "COMPENSATORS",
    "DENSE_ROLES",
    "HEAD_RULE",
    "IMPORTANCES",
    "ITERATIONS",
    "METHODS",
    "MILO_RANKS",
    "PRESETS",
    "PUBLISHED_ITERATIONS",
    "TRANSFORMS",
    "AnyFormat",
    "Format",
    "LatticeFormat",
    "Recipe",
    "Role",
    "Rule",
    "check_method",
    "is_group",
    "load_recipe",
    "needs_calibration",
    "parse_format",
    "parse_policies",
    "parse_rank",
    "parse_role",
    "recipe_from_dict",
    "resolve_auto_rank",
]
