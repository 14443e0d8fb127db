from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trilobite.errors import RecipeError
from trilobite.recipe import (
    BODY_ROLES,
    CODEBOOKS,
    COLUMNS,
    COMPENSATORS,
    DENSE_ROLES,
    IMPORTANCES,
    METHODS,
    MILO_RANKS,
    PRESETS,
    TRANSFORMS,
    AnyFormat,
    Format,
    LatticeFormat,
    Recipe,
    Role,
    Rule,
    check_method,
    load_recipe,
    parse_format,
    parse_policies,
    parse_rank,
    parse_role,
    recipe_from_dict,
    resolve_auto_rank,
)

ISSUE_PRESETS = {"rtn3", "hqq3", "search3", "int8", "int4", "milo-s1", "milo-s2", "mixed-4-3", "mixed-4-2"}

formats = st.builds(
    Format,
    bits=st.sampled_from((2, 3, 4, 8)),
    group=st.sampled_from((0, 32, 64, 96, 128)),
    symmetric=st.booleans(),
    double_quant=st.booleans(),
)
lattices = st.builds(
    LatticeFormat,
    codebook=st.sampled_from(CODEBOOKS),
    bits=st.sampled_from((2, 3, 4)),
    transform=st.sampled_from(TRANSFORMS),
)


def fits(rule: Rule) -> bool:
    """Whether the rule's method finds codes of its format."""
    try:
        if rule.format is not None:
            check_method(rule.format, rule.method)
    except RecipeError:
        return False
    return True


rules = st.builds(
    Rule,
    roles=st.lists(st.sampled_from(list(Role)), max_size=3).map(tuple),
    names=st.sampled_from(("*", "*.layers.0.*", "lm_head.weight")),
    layers=st.sampled_from((None, (0, 3), (5, 5))),
    format=st.none() | formats | lattices,
    method=st.sampled_from(METHODS),
    rank=st.sampled_from((None, "0", "16", "h/8")),
).filter(fits)
recipes = st.builds(
    Recipe,
    name=st.sampled_from(("mine", "a b", "3")),
    rules=st.lists(rules, min_size=1, max_size=4).map(tuple),
    rank=st.sampled_from(("", "uniform-8", "dense-h/8+kurtosis-16", "auto:milo-s1")),
    compensator=st.sampled_from(tuple(COMPENSATORS)),
    iterations=st.integers(1, 40),
    cap=st.booleans(),
    columns=st.sampled_from(COLUMNS),
    importance=st.sampled_from(IMPORTANCES),
    roles=st.sampled_from(((), (("*.foo", Role.EXPERT), ("*.bar", Role.NORM)))),
)


@given(formats | lattices)
def test_formats_have_names(fmt: AnyFormat) -> None:
    assert parse_format(str(fmt)) == fmt
    assert type(fmt).parse(str(fmt)) == fmt


@pytest.mark.parametrize(
    "text", ["e8p", "e8p-5", "e8p-0", "grid-1", "e8p-2-g64", "grid-8", "e8p-2-hadamard", "grid-2-sym", "int3"]
)
def test_names_of_no_format_are_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(RecipeError, match=r"expected .*e8p"):
        parse_format(text)


@pytest.mark.parametrize(
    ("fmt", "method"), [("e8p-2", "hqq"), ("grid-3", "hqq"), ("int3-g64", "ldlq"), ("e8p-2", "magic")]
)
def test_a_method_that_does_not_fit_the_format_is_refused(fmt: str, method: str) -> None:
    with pytest.raises(RecipeError, match=f"rule 1: method '{method}'"):
        recipe_from_dict({"rules": [{"format": fmt, "method": method}]}, "mine")


def test_a_method_changes_only_the_rules_it_fits() -> None:
    recipe = PRESETS["quip2-free"].with_method("ldlq")
    assert [r.method for r in recipe.rules] == ["ldlq", "search"]
    with pytest.raises(RecipeError, match="does not quantize to int3-g64"):
        PRESETS["search3"].with_method("ldlq")


def test_lattice_formats_have_no_groups() -> None:
    body, head = PRESETS["quip2-free"].with_group(128).rules
    assert (str(body.format), str(head.format)) == ("e8p-2", "int8-g128")


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_quip_presets_differ_by_method(bits: int) -> None:
    calibrated, free = PRESETS[f"quip{bits}"], PRESETS[f"quip{bits}-free"]
    assert calibrated.with_method("search").rules == free.rules
    assert str(calibrated.rules[0].format) == f"e8p-{bits}"
    assert (calibrated.rules[0].method, calibrated.rules[1]) == ("ldlq", free.rules[1])


@pytest.mark.parametrize(
    "text",
    [
        "int3",
        "int5-g64",
        "int3-g48",
        "int3-g16",
        "int2-g8",
        "int3-g64-dq-sym",
        "INT3-g64",
        "int3-g64 ",
        "",
        "e8p",
    ],
)
def test_unknown_formats_show_the_grammar(text: str) -> None:
    with pytest.raises(RecipeError, match="for example int3-g64"):
        Format.parse(text)


@given(recipes)
@settings(deadline=None, max_examples=25)
def test_recipes_survive_yaml(recipe: Recipe) -> None:
    data = yaml.safe_load(yaml.safe_dump(recipe.to_dict(), sort_keys=False))
    assert recipe_from_dict(data, "other name") == recipe


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_yaml_files(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.summary
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False))
    assert load_recipe(str(path)) == recipe


def test_presets_are_those_promised() -> None:
    assert set(PRESETS) >= ISSUE_PRESETS
    for name, recipe in PRESETS.items():
        head = recipe.rule_for(Role.HEAD, "lm_head.weight", None)
        if name.endswith(("-paper", "-experts")):
            assert head is None
        else:
            assert head is not None
            assert str(head.format) == "int8-g64"
        for role in (Role.EMBEDDING, Role.NORM, Role.ROUTER, Role.OTHER):
            assert recipe.rule_for(role, "x.weight", 0) is None
        for role in BODY_ROLES:
            kept = name.endswith("-experts") and role is not Role.EXPERT
            assert (recipe.rule_for(role, "x.weight", 0) is None) == kept


@pytest.mark.parametrize(("name", "experts"), [("mixed-4-3", "int3-g64"), ("mixed-4-2", "int2-g64")])
def test_mixed_presets(name: str, experts: str) -> None:
    recipe = load_recipe(name)
    assert str(recipe.rule_for(Role.EXPERT, "x", 0).format) == experts
    assert {str(recipe.rule_for(role, "x", 0).format) for role in DENSE_ROLES} == {"int4-g64"}


def test_example_of_the_documentation(tmp_path: Path) -> None:
    import trilobite.recipe

    text = trilobite.recipe.__doc__.split("\n\n")[-1]
    path = tmp_path / "my.yaml"
    path.write_text(text)
    recipe = load_recipe(str(path))
    assert recipe.name == "my-recipe"
    found = recipe.rule_for(Role.EXPERT, "model.layers.1.x", 1)
    assert (str(found.format), found.method, found.rank) == ("int3-g64", "hqq", "16")
    assert str(recipe.rule_for(Role.EXPERT, "model.layers.0.x", 0).format) == "int4-g64"
    assert recipe.rule_for(Role.EXPERT, "model.layers.31.x", 31).method == "search"


def test_name_of_the_file_is_the_name_of_a_nameless_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rules: [{format: int3-g64}]")
    assert load_recipe(str(path)).name == "mine"


GOOD: dict[str, Any] = {"rules": [{"roles": ["expert"], "format": "int3-g64"}]}
BAD: dict[str, tuple[Any, list[str]]] = {
    "no mapping": ([1, 2], ["expected a mapping", "rules"]),
    "no rules": ({"name": "x"}, ["non-empty list 'rules'"]),
    "empty rules": ({"rules": []}, ["non-empty list 'rules'"]),
    "rules as mapping": ({"rules": {"format": "int3-g64"}}, ["non-empty list 'rules'"]),
    "typo in a key": (GOOD | {"compensators": "int3"}, ["unknown key 'compensators'", "compensator"]),
    "typo in a rule": ({"rules": [{"role": ["expert"]}]}, ["rule 1", "unknown key 'role'", "roles"]),
    "second rule": ({"rules": [*GOOD["rules"], {"formt": "int3-g64"}]}, ["rule 2", "'formt'", "format"]),
    "rule as text": ({"rules": ["int3-g64"]}, ["rule 1", "expected a mapping"]),
    "compensator": (GOOD | {"compensator": "int4"}, ["'int4'", "int3, int8, fp16"]),
    "iterations": (GOOD | {"iterations": 0}, ["iterations 0", "at least 1"]),
    "iterations as text": (GOOD | {"iterations": "20"}, ["iterations '20'", "integer"]),
    "iterations as truth": (GOOD | {"iterations": True}, ["iterations True", "an integer"]),
    "columns": (GOOD | {"columns": "sinq"}, ["columns 'sinq'", "none, sinkhorn"]),
    "importance": (GOOD | {"importance": "guess"}, ["importance 'guess'", "none, weights, builtin"]),
    "cap as text": (GOOD | {"cap": "false"}, ["cap 'false'", "true or false"]),
    "compensator as list": (GOOD | {"compensator": ["int3"]}, ["compensator ['int3']", "text"]),
    "policy": (GOOD | {"rank": "dens-512"}, ["'dens-512'", "dense-r", "for example"]),
    "rank": (GOOD | {"rank": "dense-x"}, ["rank 'x'", "for example 16 or h/8"]),
    "policy without rank": (GOOD | {"rank": "dense"}, ["rank ''", "for example"]),
    "auto": (GOOD | {"rank": "auto:milo-s3"}, ["milo-s3", "auto:milo-s1"]),
    "rank in no digits": ({"rules": [{"rank": "²"}]}, ["rank '²'", "for example 16 or h/8"]),
    "rank of a rule": ({"rules": [{"rank": "a lot"}]}, ["'a lot'", "for example 16 or h/8"]),
    "role": ({"rules": [{"roles": ["experts"]}]}, ["'experts'", "shared_expert", "attention"]),
    "roles left empty": ({"rules": [{"roles": None}]}, ["rule 1", "roles None", "list of roles"]),
    "roles as a number": ({"rules": [{"roles": 5}]}, ["rule 1", "roles 5", "list of roles"]),
    "names left empty": ({"rules": [{"names": None}]}, ["rule 1", "names None", "text"]),
    "role of a name": (GOOD | {"roles": {"*.foo": "exprt"}}, ["'exprt'", "attention"]),
    "roles as list": (GOOD | {"roles": ["*.foo"]}, ["roles ['*.foo']", "mapping"]),
    "format": ({"rules": [{"format": "int3"}]}, ["'int3'", "int3-g64"]),
    "group of nothing": ({"rules": [{"format": "int3-g0"}]}, ["'int3-g0'", "channel"]),
    "method": ({"rules": [{"method": "gtpq"}]}, ["rule 1", "'gtpq'", "rtn, search, hqq"]),
    "layers": ({"rules": [{"layers": 3}]}, ["layers 3", "[first, last]"]),
    "layers as truths": ({"rules": [{"layers": [False, True]}]}, ["layers", "[first, last]"]),
    "layers as text": ({"rules": [{"layers": ["0", "3"]}]}, ["layers", "[first, last]"]),
}


@pytest.mark.parametrize("case", BAD)
def test_messages_name_the_key_and_the_remedy(case: str) -> None:
    data, parts = BAD[case]
    recipe_from_dict(GOOD, "good")
    with pytest.raises(RecipeError) as e:
        recipe_from_dict(data, "mine")
    for part in parts:
        assert part in str(e.value)
    assert "\n" not in str(e.value)


def test_unreadable_recipes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="presets are rtn3"):
        load_recipe("rtn33")
    for content in (b"rules: [", b"\xff\xfe\x00", b"rules: {a: }}"):
        path = tmp_path / "broken.yaml"
        path.write_bytes(content)
        with pytest.raises(RecipeError, match="not valid YAML") as e:
            load_recipe(str(path))
        assert "\n" not in str(e.value)
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(RecipeError, match="rules"):
        load_recipe(str(tmp_path / "empty.yaml"))


@pytest.mark.parametrize(
    ("text", "rank"),
    [("16", 16), ("0", 0), ("h", 4096), ("h/8", 512), ("25h/64", 1600), ("h/5000", 1), ("2h", 8192)],
)
def test_ranks(text: str, rank: int) -> None:
    assert parse_rank(text, 4096) == rank


@pytest.mark.parametrize("text", ["", "-1", "h/", "/8", "1.5", "h/8h", "8 ", "²", "٣", "٣h"])
def test_no_ranks(text: str) -> None:
    with pytest.raises(RecipeError, match="for example"):
        parse_rank(text, 4096)


def test_a_zeroth_is_refused() -> None:
    with pytest.raises(RecipeError):
        parse_rank("h/0", 4096)


def test_policies() -> None:
    assert parse_policies("dense-512 + kurtosis-h/256", 4096) == [("dense", 512), ("kurtosis", 16)]
    assert parse_policies("", 4096) == []


@pytest.mark.parametrize(
    ("experts", "shared", "kind"),
    [(8, False, "coarse"), (16, False, "coarse"), (17, False, "fine"), (8, True, "fine")],
)
@pytest.mark.parametrize("name", MILO_RANKS)
def test_auto_ranks(name: str, experts: int, shared: bool, kind: str) -> None:
    assert resolve_auto_rank(f"auto:{name}", experts=experts, shared=shared) == MILO_RANKS[name][kind]
    assert resolve_auto_rank("dense-4", experts=experts, shared=shared) == "dense-4"


def test_auto_ranks_are_those_of_table_4() -> None:
    """Mixtral-8x7B (h 4096): dense 512 + kurtosis 16, dense 1024 + kurtosis 32.

    DeepSeek-MoE (h 2048): dense 800, dense 1024 + frequency 32."""
    table = {
        ("milo-s1", "coarse", 4096): [("dense", 512), ("kurtosis", 16)],
        ("milo-s2", "coarse", 4096): [("dense", 1024), ("kurtosis", 32)],
        ("milo-s1", "fine", 2048): [("dense", 800)],
        ("milo-s2", "fine", 2048): [("dense", 1024), ("frequency", 32)],
    }
    for (name, kind, hidden), policies in table.items():
        assert parse_policies(MILO_RANKS[name][kind], hidden) == policies


def test_keeping() -> None:
    recipe = load_recipe("rtn3")
    kept = recipe.keeping((Role.EXPERT, Role.HEAD))
    assert kept.rule_for(Role.EXPERT, "x", 0).format is None
    assert kept.rule_for(Role.HEAD, "x", None).format is None
    assert kept.rule_for(Role.ATTENTION, "x", 0) == recipe.rule_for(Role.ATTENTION, "x", 0)
    assert recipe.keeping(()) is recipe


def test_with_group() -> None:
    recipe = load_recipe("mixed-4-2").with_group(32)
    assert {r.format.group for r in recipe.rules if r.format} == {32}
    assert [r.format.bits for r in recipe.rules] == [2, 4, 8]


def test_layer_ranges_include_both_ends_and_need_a_layer() -> None:
    rule = Rule(layers=(1, 3), format=Format(bits=3, group=64))
    assert [rule.matches(Role.EXPERT, "x", i) for i in (None, 0, 1, 3, 4)] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_roles_by_name() -> None:
    assert parse_role("shared_expert") is Role.SHARED_EXPERT
