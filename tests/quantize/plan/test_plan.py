import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.architectures import TINY_CONFIGS, build_checkpoint

from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import Source, open_source
from trilobite.errors import ArchitectureError, CheckpointError, RecipeError, ShapeError
from trilobite.quantize.plan.plan import Plan, make_plan, plan_json
from trilobite.quantize.run.lines import quantize_line
from trilobite.recipe import BODY_ROLES, Format, Recipe, Role, Rule, load_recipe, parse_format

ONE_LAYER = "model.layers.0"
INT4 = Format(bits=4, group=32)


def prepare(source: Source, recipe: Recipe, **settings: object) -> Plan:
    """The plan of a checkpoint that may be no model: whether it is one, `test_expected.py` asks."""
    return make_plan(source, identify(source, extra_rules=recipe.roles), recipe, **settings)


def body(text: str, *, rank: str = "", **settings: object) -> Recipe:
    rules = (Rule(roles=BODY_ROLES, format=Format.parse(text), method="rtn"),)
    return Recipe(name="test", rules=rules, rank=rank, **settings)


def llama(
    path: Path,
    *,
    k: int = 64,
    expert_k: int | None = None,
    expert_n: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """A checkpoint by hand: attention with K = k, one expert pair with K = expert_k."""
    path.mkdir()
    tensors = {f"{ONE_LAYER}.self_attn.q_proj.weight": torch.ones(20, k, dtype=dtype)}
    tensors["model.embed_tokens.weight"] = torch.ones(10, 64, dtype=dtype)
    tensors["model.norm.weight"] = torch.ones(64, dtype=dtype)
    if expert_k:
        for e in range(2):
            tensors[f"{ONE_LAYER}.mlp.experts.{e}.down_proj.weight"] = torch.ones(
                expert_n, expert_k, dtype=dtype
            )
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "mixtral", "hidden_size": 64}))
    return path


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("plan") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    return open_source(str(path))


def lines(plan: Plan) -> dict[str, object]:
    return {line.matrix.name: line for line in plan.lines}


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_every_tensor_has_a_line_and_every_kept_one_a_reason(model_type: str, tmp_path: Path) -> None:
    build_checkpoint(model_type, tmp_path / "m", dtype=torch.bfloat16)
    source = open_source(str(tmp_path / "m"))
    plan = prepare(source, load_recipe("rtn3"))
    assert {line.matrix.source for line in plan.lines} == set(source.tensors)
    names = [t.name for line in plan.lines for t in line.stored]
    assert len(set(names)) == len(names)
    for line in plan.lines:
        if line.format is None:
            assert line.note
            assert line.rank == 0
            assert [t.name for t in line.stored] == [line.matrix.name]
        else:
            assert line.matrix.role in (*BODY_ROLES, Role.HEAD)
            assert line.method
    # Nothing that matters is kept: routed experts never, and of the rest only what cannot be cut into groups.
    kept = [line for line in plan.lines if line.format is None and line.matrix.role in BODY_ROLES]
    assert all("multiple of 32" in line.note or line.note == "not a matrix" for line in kept)
    assert all(line.format for line in plan.lines if line.matrix.role is Role.EXPERT)


def test_experts_of_a_layer_are_neighbours(mixtral: Source) -> None:
    order = [
        (m.layer, m.expert)
        for line in prepare(mixtral, load_recipe("rtn3")).lines
        if (m := line.matrix).expert is not None
    ]
    assert order == sorted(order)


def test_group_falls_back_to_the_largest_that_divides(tmp_path: Path) -> None:
    for i, (k, wanted, group) in enumerate(
        [(64, 64, 64), (96, 64, 32), (192, 128, 64), (32, 128, 32), (192, 64, 64)]
    ):
        plan = prepare(open_source(str(llama(tmp_path / str(i), k=k))), body(f"int3-g{wanted}"))
        line = lines(plan)[f"{ONE_LAYER}.self_attn.q_proj.weight"]
        assert line.format == Format(bits=3, group=group)
        assert bool(line.note) == (group != wanted)
        assert group == wanted or f"K={k}" in line.note


def test_columns_are_filled_up_and_counted(tmp_path: Path) -> None:
    source = open_source(str(llama(tmp_path / "m", k=40, expert_k=64)))
    line = lines(prepare(source, body("int3-g64")))[f"{ONE_LAYER}.self_attn.q_proj.weight"]
    n, k = line.matrix.shape
    assert k == 40
    assert line.packed_shape == (n, 64)
    assert line.note == f"[{n}, 40] filled up to [{n}, 64]"
    assert line.nbytes == 32 * 64 * 3.5 / 8  # 20 rows are two tiles


def test_columns_are_not_filled_up_where_that_costs_more_than_16_bit(tmp_path: Path) -> None:
    source = open_source(str(llama(tmp_path / "m", k=8, expert_k=64)))
    line = lines(prepare(source, body("int8-g32")))[f"{ONE_LAYER}.self_attn.q_proj.weight"]
    assert line.format is None
    assert line.note == "K=8 is not a multiple of 32; filled up it would be no smaller than in 16 bit"


def test_rows_of_experts_are_filled_up_too(tmp_path: Path) -> None:
    """With scales of their own: rows of zeros would share double-quantized ones with others, and be none."""
    for n, k, fmt in ((64, 40, "int3-g64-dq"), (40, 64, "int3-g64")):
        source = open_source(str(llama(tmp_path / f"{n}", expert_k=k, expert_n=n)))
        line = lines(prepare(source, body("int3-g64-dq")))[f"{ONE_LAYER}.mlp.experts.0.down_proj.weight"]
        assert line.packed_shape == (64, 64)
        assert str(line.format) == fmt


def test_float32_is_kept_as_bf16_where_it_is_large(tmp_path: Path) -> None:
    source = open_source(str(llama(tmp_path / "m", dtype=torch.float32)))
    found = lines(prepare(source, body("int3-g64")))
    assert found["model.embed_tokens.weight"].stored[0].dtype == "BF16"
    assert "F32 to BF16" in found["model.embed_tokens.weight"].note
    assert found["model.norm.weight"].stored[0].dtype == "F32"


def test_a_recipe_that_matches_nothing_is_refused(mixtral: Source) -> None:
    rules = (Rule(names="no.such.*", format=Format(bits=3, group=64)),)
    with pytest.raises(RecipeError, match="nothing to compress"):
        prepare(mixtral, Recipe(name="none", rules=rules))


def test_unmatched_tensors_are_an_error_before_anything_else(tmp_path: Path) -> None:
    path = llama(tmp_path / "m")
    save_file({"model.layers.0.moe.w1": torch.ones(4, 32, 32)}, path / "model.safetensors")
    with pytest.raises(ArchitectureError, match="1 tensors match no role"):
        prepare(open_source(str(path)), body("int3-g64"))


def test_a_packed_checkpoint_is_refused(tmp_path: Path) -> None:
    path = llama(tmp_path / "m")
    config = {"model_type": "mixtral", "quantization_config": {"quant_method": "trilobite"}}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="already quantized with 'trilobite'"):
        prepare(open_source(str(path)), body("int3-g64"))


def test_a_null_quantization_config_is_none(tmp_path: Path) -> None:
    path = llama(tmp_path / "m")
    (path / "config.json").write_text('{"model_type": "mixtral", "quantization_config": null}')
    assert any(line.format for line in prepare(open_source(str(path)), body("int3-g64")).lines)


@pytest.mark.parametrize("hidden", ["abc", "64", [64], 64.5, True, -64])
def test_an_impossible_hidden_size_is_refused(tmp_path: Path, hidden: object) -> None:
    path = llama(tmp_path / "m")
    (path / "config.json").write_text(json.dumps({"model_type": "mixtral", "hidden_size": hidden}))
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_size .*; expected a positive integer"):
        prepare(open_source(str(path)), body("int3-g64"))


def test_a_hidden_size_is_needed_only_for_fractions_of_it(tmp_path: Path) -> None:
    path = llama(tmp_path / "m")
    (path / "config.json").write_text('{"model_type": "mixtral", "hidden_size": null}')
    source = open_source(str(path))
    assert prepare(source, body("int3-g64", rank="dense-2", cap=False)).lines
    with pytest.raises(RecipeError, match="names no hidden_size"):
        prepare(source, body("int3-g64", rank="dense-h/8"))


# What can be planned can be loaded.


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_a_rule_for_everything_keeps_what_cannot_run_packed(model_type: str, tmp_path: Path) -> None:
    build_checkpoint(model_type, tmp_path / "m", dtype=torch.bfloat16)
    plan = prepare(open_source(str(tmp_path / "m")), Recipe(name="all", rules=(Rule(format=INT4),)))
    assert {line.matrix.role for line in plan.lines if line.format} <= {*BODY_ROLES, Role.HEAD}
    found = {m.role: line.note for line in plan.lines if len((m := line.matrix).shape) == 2}
    assert found[Role.EMBEDDING] == "embedding stays in 16 bit"
    assert found.get(Role.ROUTER, "router stays in 16 bit") == "router stays in 16 bit"


@pytest.mark.parametrize("role", [Role.EMBEDDING, Role.ROUTER, Role.NORM, Role.OTHER])
def test_a_format_for_what_cannot_run_packed_is_refused(mixtral: Source, role: Role) -> None:
    rules = (Rule(roles=(Role.ATTENTION, role), format=INT4), *body("int4-g32").rules)
    with pytest.raises(RecipeError, match=f"gives {role.value} the format int4-g32; .*: drop the role"):
        prepare(mixtral, Recipe(name="mine", rules=rules))
    kept = (Rule(roles=(Role.ATTENTION, role)), *body("int4-g32").rules)
    assert prepare(mixtral, Recipe(name="mine", rules=kept)).lines


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("mixtral", "*.experts.[0-2].*"),
        ("mixtral", "*.w1.weight"),
        ("qwen3_moe", "*.experts.*.gate_proj.*"),
        ("gpt_oss", "*.experts.[0-2].*"),
        ("gpt_oss", "*.experts.*.down_proj.*"),
        ("jamba", "*.experts.3.*"),
        ("nllb-moe", "*.expert_1.*"),
    ],
)
@pytest.mark.parametrize("first", [INT4, None])
def test_experts_of_a_module_are_quantized_all_or_none(
    model_type: str, names: str, first: Format | None, tmp_path: Path
) -> None:
    build_checkpoint(model_type, tmp_path / "m", dtype=torch.bfloat16)
    source = open_source(str(tmp_path / "m"))
    rest = Rule(roles=BODY_ROLES, format=None if first else INT4)
    with pytest.raises(
        RecipeError, match=r"\.experts: the recipe quantizes \d+ of its (8|12) matrices; .*--keep"
    ):
        prepare(source, Recipe(name="part", rules=(Rule(names=names, format=first), rest)))
    other = Format(bits=8, group=32)
    mixed = (Rule(names=names, format=other), Rule(roles=BODY_ROLES, format=INT4))
    assert prepare(source, Recipe(name="mixed", rules=mixed)).lines


def test_experts_may_be_kept_layer_by_layer(mixtral: Source) -> None:
    rules = (Rule(roles=(Role.EXPERT,), layers=(1, 1), format=INT4),)
    plan = prepare(mixtral, Recipe(name="layer", rules=rules))
    assert {line.matrix.layer for line in plan.lines if line.format} == {1}


def test_ranks_are_planned(mixtral: Source) -> None:
    plan = prepare(mixtral, body("int3-g32", rank="dense-3+sparse-2", cap=False))
    for line in plan.lines:
        if line.format:
            assert line.rank == (2 if line.matrix.role is Role.EXPERT else 3)
            assert [t.name.rsplit("_", 1)[1] for t in line.stored] == ["packed", "lra", "lrb"]
    assert {line.rank for line in prepare(mixtral, body("int3-g32", rank="dense-30")).lines} <= set(range(13))


def test_rule_overrides_rank(mixtral: Source) -> None:
    rules = (
        Rule(names="*.layers.1.*.experts.2.*", format=Format(bits=3, group=32), method="rtn", rank="h/16"),
        *body("int3-g32").rules,
    )
    plan = prepare(mixtral, Recipe(name="test", rules=rules, rank="dense-1", cap=False))
    special = [
        line.rank for line in plan.lines if ".layers.1." in line.matrix.name and line.matrix.expert == 2
    ]
    assert special == [4, 4, 4]
    assert {line.rank for line in plan.lines if line.matrix.expert == 1} == {0}


def test_frequency_needs_statistics(mixtral: Source) -> None:
    recipe = body("int3-g32", rank="frequency-2", cap=False)
    with pytest.raises(RecipeError, match="trilobite stats"):
        prepare(mixtral, recipe)
    plan = prepare(mixtral, recipe, frequency={"0": [1, 1, 1, 5], "1": [2, 2, 2, 2]})
    ranks = {(m.layer, m.expert): line.rank for line in plan.lines if (m := line.matrix).role is Role.EXPERT}
    assert ranks == {(0, 0): 1, (0, 1): 1, (0, 2): 1, (0, 3): 5, **{(1, e): 2 for e in range(4)}}


def test_auto_ranks_become_policies(mixtral: Source) -> None:
    plan = prepare(mixtral, load_recipe("milo-s1"))
    assert plan.rank == "dense-h/8+kurtosis-h/256"
    # The cap of the small k_proj and v_proj is below h/8.
    assert {
        (m.projection, line.rank) for line in plan.lines if (m := line.matrix).role is Role.ATTENTION
    } == {("q", 8), ("k", 4), ("v", 4), ("o", 8)}


def test_known_ranks_are_taken_as_they_are(mixtral: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run must not read all weights again for their kurtosis."""
    recipe = load_recipe("milo-s1")
    plan = prepare(mixtral, recipe)
    monkeypatch.setattr("trilobite.quantize.plan.plan.kurtosis", lambda w: pytest.fail("read the weights"))
    again = prepare(
        mixtral, recipe, known_ranks={line.matrix.name: line.rank for line in plan.lines if line.rank}
    )
    assert again == plan


def test_plan_json_is_json_and_counts_every_byte(mixtral: Source) -> None:
    plan = prepare(mixtral, load_recipe("milo-s1"))
    data = json.loads(plan_json(plan))
    assert data == plan.to_dict()
    assert plan_json(plan) == plan_json(prepare(mixtral, load_recipe("milo-s1")))
    assert [row["bytes"] for row in data["tensors"]] == [line.nbytes for line in plan.lines]
    assert {row["name"] for row in data["tensors"] if "kept" in row} == {
        line.matrix.name for line in plan.lines if line.format is None
    }


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Source]:
    folder = tmp_path_factory.mktemp("shapes")

    def make(n: int, k: int) -> Source:
        path = folder / f"{n}-{k}"
        if not path.exists():
            path.mkdir()
            name = f"{ONE_LAYER}.self_attn.q_proj.weight"
            save_file({name: torch.randn(n, k).bfloat16()}, path / "model.safetensors")
            (path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
        return open_source(str(path))

    return make


@given(
    st.sampled_from((1, 15, 16, 17, 50)),
    st.sampled_from((32, 64, 96, 288)),
    st.sampled_from(
        (
            "int2-g32",
            "int3-g64",
            "int4-g128-dq",
            "int8-channel-sym",
            "int3-g32-sym-dq",
            "int2-channel",
            "int3-g16-super",
        )
    ),
    st.sampled_from(("int3", "int8", "fp16")),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=30)
def test_planned_tensors_are_the_tensors_made(
    checkpoint_of: Callable[[int, int], Source], n: int, k: int, text: str, kind: str, rank: int
) -> None:
    """Names, dtypes, shapes and bytes, for any matrix, format and compensator."""
    source = checkpoint_of(n, k)
    plan = prepare(source, body(text, rank=f"uniform-{rank}", compensator=kind, cap=False, iterations=1))
    (line,) = plan.lines
    packed, _ = quantize_line(source.read(line.matrix.name), line, plan.recipe)
    made = [(f"{line.matrix.name}_{s}", tuple(t.shape), t.nbytes) for s, t in packed.tensors().items()]
    assert made == [(t.name, t.shape, t.nbytes) for t in line.stored]
    assert packed.nbytes() == line.nbytes


def lattice(text: str) -> Recipe:
    return Recipe(name="test", rules=(Rule(roles=BODY_ROLES, format=parse_format(text)),))


def test_where_no_hadamard_matrix_fits_fourier_is_used_and_said(tmp_path: Path) -> None:
    """20 has one, 188 has none here."""
    path = llama(tmp_path / "m", k=64, expert_k=188 * 2)
    found = lines(prepare(open_source(str(path)), lattice("e8p-2")))
    attention = found[f"{ONE_LAYER}.self_attn.q_proj.weight"]
    expert = found[f"{ONE_LAYER}.mlp.experts.1.down_proj.weight"]
    assert (str(attention.format), attention.note) == ("e8p-2", "")
    assert (str(expert.format), expert.note) == (
        "e8p-2-fourier",
        "fourier: no Hadamard matrix fits [64, 376]",
    )
    assert [t.shape for t in expert.stored] == [(4, 47, 32), (12,), (188,), (32,)]
    wished = lines(prepare(open_source(str(path)), lattice("e8p-2-fourier")))
    assert {str(line.format) for line in wished.values() if line.format} == {"e8p-2-fourier"}
    assert {line.note for line in wished.values() if line.format} == {""}


def test_lattice_codewords_need_columns_in_eights(tmp_path: Path) -> None:
    path = llama(tmp_path / "m", k=60)
    with pytest.raises(RecipeError, match="nothing to compress"):
        prepare(open_source(str(path)), lattice("e8p-2"))
    path = llama(tmp_path / "n", k=64, expert_k=60)
    with pytest.raises(ShapeError, match=r"K=60 is not a multiple of 8.*--keep expert"):
        prepare(open_source(str(path)), lattice("e8p-2"))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_compensators_of_lattice_formats_are_capped(mixtral: Source, bits: int) -> None:
    """None costs more than the next wider format, 8 bits after the widest."""
    recipe = replace(lattice(f"e8p-{bits}"), rank="uniform-1000")
    for line in prepare(mixtral, recipe).lines:
        if line.format is not None:
            n, k = line.matrix.shape
            assert 0 < line.rank < min(n, k)
            assert line.nbytes <= n * k * {2: 3, 3: 4, 4: 8}[bits] / 8 + 4 * (n + k) + 64
