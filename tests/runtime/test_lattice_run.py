"""Packed weights in lattice formats through plan, files, operators and models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from support.packing import packed_weight, relative_error, stored_layer
from torch import Tensor
from torch.nn.functional import silu

from trilobite.checkpoint.source import open_source
from trilobite.cli.inspect import inspect
from trilobite.errors import RecipeError, ShapeError
from trilobite.formats.incoherence import store_signs
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.kernels import ops, reference
from trilobite.kernels.cpu import engine as cpu
from trilobite.kernels.expert_table import Column, build, expert_weight, has_lattice
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS
from trilobite.quantize.plan.report import account
from trilobite.quantize.run.compress import compress, prepare
from trilobite.quantize.run.lines import input_name
from trilobite.quantize.run.options import Options
from trilobite.recipe import LatticeFormat, Recipe, load_recipe, parse_format, recipe_from_dict
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import PackedExperts

SERIAL = Options(jobs=1, device="cpu")
T, H, INTER, E, A = 9, 48, 24, 5, 2


def weight(n: int, k: int, fmt: str = "e8p-2", *, seed: int = 0, rank: int = 0) -> PackedWeight:
    """A packed weight; the input's transform depends on K alone, the output's on N alone."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    parsed = parse_format(fmt)
    assert isinstance(parsed, LatticeFormat)
    compensation = Compensation(rank=rank, iterations=1, seed=n, input_seed=k)
    return METHODS["search"](w, parsed, compensation=compensation).weight


def tuned(w: PackedWeight, seed: int = 0) -> PackedWeight:
    """The same codes with real vectors in the place of signs, as fine-tuning leaves them."""
    generator = torch.Generator().manual_seed(seed)
    signs_out, signs_in = (store_signs(1 + torch.randn(m, generator=generator) / 4) for m in w.shape)
    return replace(w, signs_in=signs_in, signs_out=signs_out)


@pytest.mark.parametrize(
    "fmt", ["e8p-1", "e8p-2", "e8p-3", "e8p-4-fourier", "grid-2", "grid-3-fourier", "grid-4"]
)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_product_with_the_matrix(fmt: str, rank: int, dtype: torch.dtype) -> None:
    w = weight(40, 24, fmt, rank=rank)
    x, bias = torch.randn(2, 3, 24, dtype=dtype), torch.randn(40, dtype=dtype)
    for stored in (w, tuned(w)):
        expected = x.float() @ dequantize(stored).T + bias.float()
        found = ops.linear(x, stored, bias)
        assert (found.shape, found.dtype) == ((2, 3, 40), dtype)
        assert relative_error(found, expected) < (1e-5 if dtype == torch.float32 else 4e-3)


def test_linear_refuses_what_does_not_fit() -> None:
    w = weight(40, 24)
    with pytest.raises(ShapeError, match="K=32"):
        ops.linear(torch.randn(3, 32), w)
    with pytest.raises(ShapeError):
        ops.linear(torch.randn(3, 24), replace(w, packed=w.packed[:-1]))


def test_opcheck_and_fake() -> None:
    w = weight(40, 24, rank=2)
    arguments = (
        torch.randn(2, 24),
        w.packed,
        w.lattice,
        w.signs_in,
        w.signs_out,
        w.lra,
        w.lrb,
        torch.randn(40),
        40,
    )
    torch.library.opcheck(torch.ops.trilobite.lattice_linear.default, arguments)
    compiled = torch.compile(lambda x: ops.linear(x, w) * 2, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 24)
    assert relative_error(compiled(x), ops.linear(x, w) * 2) < 1e-6


Expert = tuple[PackedWeight | None, PackedWeight, PackedWeight]


def layer(kind: str) -> list[Expert]:
    """Experts whose transforms are alike, of all kinds in one layer, or without gates."""
    rows: list[Expert] = []
    for e in range(E):
        gate, up, down = (
            weight(INTER, H, seed=e),
            weight(INTER, H, seed=e + 50),
            weight(H, INTER, seed=e + 90),
        )
        if kind == "mixed" and e == 1:
            gate, up = weight(INTER, H, "e8p-3-fourier", seed=e), weight(INTER, H, "grid-4", seed=7, rank=2)
        if kind == "mixed" and e == 2:
            down = tuned(weight(H, INTER, "e8p-4", seed=e, rank=2))
        if kind == "mixed" and e == 3:
            gate, up, down = tuned(gate, 1), tuned(up, 2), down
        rows.append((None if kind == "no gates" else gate, up, down))
    return rows


def slow_experts(x: Tensor, index: Tensor, weights: Tensor, experts: list[Expert], bias: bool) -> Tensor:
    """Token by token, with dense matrices."""
    out = torch.zeros(T, H)
    gate_up_bias, down_bias = biases() if bias else (torch.zeros(E, 2 * INTER), torch.zeros(E, H))
    for t in range(T):
        for a in range(A):
            e = int(index[t, a])
            if e >= E:
                continue
            gate, up, down = experts[e]
            if gate is None:
                h = silu(dequantize(up) @ x[t] + gate_up_bias[e, -INTER:])
            else:
                h = silu(dequantize(gate) @ x[t] + gate_up_bias[e, :INTER])
                h = h * (dequantize(up) @ x[t] + gate_up_bias[e, INTER:])
            out[t] += weights[t, a] * (dequantize(down) @ h + down_bias[e])
    return out


def biases() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(E, 2 * INTER, generator=generator) / 10, torch.randn(E, H, generator=generator) / 10


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["alike", "mixed", "no gates"])
def test_experts_are_those_of_the_matrices(kind: str, bias: bool) -> None:
    experts = layer(kind)
    stored = stored_layer(experts)
    assert has_lattice(stored.table)
    x, weights = torch.randn(T, H), torch.rand(T, A)
    index = torch.randint(0, E + 1, (T, A))
    index[0] = E  # a padded token
    if bias:
        gate_up, down = biases()
        gate_up = gate_up[:, INTER:] if kind == "no gates" else gate_up
        stored = replace(stored, gate_up_bias=gate_up, down_bias=down)
    found = ops.experts(x, index, weights, stored)
    assert relative_error(found, slow_experts(x, index, weights, experts, bias)) < 1e-5
    assert not found[0].any()


def test_affine_and_lattice_experts_in_one_layer() -> None:
    k, inter = 64, 32
    experts: list[Expert] = [
        tuple(weight(*s, seed=e) if e % 2 else packed_weight(*s, "int3-g32", seed=e, rank=2) for s in shapes)  # type: ignore[misc]
        for e in range(4)
        for shapes in [((inter, k), (inter, k), (k, inter))]
    ]
    x, weights, index = torch.randn(6, k), torch.rand(6, 2), torch.randint(0, 4, (6, 2))
    found = ops.experts(x, index, weights, stored_layer(experts))
    expected = torch.zeros(6, k)
    for t in range(6):
        for a in range(2):
            gate, up, down = (dequantize(w) for w in experts[index[t, a]] if w is not None)
            expected[t] += weights[t, a] * (down @ (silu(gate @ x[t]) * (up @ x[t])))
    assert relative_error(found, expected) < 1e-5


@pytest.mark.skipif(not cpu.available(), reason="no native library")
def test_the_native_engine_refuses_lattice_experts_whose_k_is_no_multiple_of_32() -> None:
    index, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(ShapeError, match="K=48"):
        cpu.experts(torch.randn(2, H), index, weights, stored_layer(layer("alike")))


def test_the_input_is_rotated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up of all experts share a transform of their input, the down projections one of their output."""
    stored = stored_layer(layer("alike"))
    x, weights, index = torch.randn(T, H), torch.rand(T, A), torch.randint(0, E, (T, A))
    calls: list[tuple[int, ...]] = []
    forward, adjoint = reference.Spin.forward, reference.Spin.adjoint
    monkeypatch.setattr(reference.Spin, "forward", lambda s, v: calls.append(tuple(v.shape)) or forward(s, v))
    monkeypatch.setattr(reference.Spin, "adjoint", lambda s, v: calls.append(tuple(v.shape)) or adjoint(s, v))
    reference.experts(x, index, weights, stored)
    assert calls.count((T, H)) == 2


def test_table_rows_come_back() -> None:
    experts = layer("mixed")
    slab, table = build(experts)
    for e, matrices in enumerate(experts):
        for p, w in enumerate(matrices):
            assert w is not None
            back = expert_weight(slab, table[e, p], w.shape)
            assert back is not None
            assert back.tensors().keys() == w.tensors().keys()
            assert all(torch.equal(back.tensors()[s], t) for s, t in w.tensors().items())
    table[0, 0, Column.SIGNS_IN] = slab.numel() - 1
    with pytest.raises(ShapeError, match="slab"):
        expert_weight(slab, table[0, 0], (INTER, H))
    assert not has_lattice(
        build([(None, packed_weight(32, 64, "int3-g32"), packed_weight(64, 32, "int3-g32"))])[1]
    )


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lattice") / "original"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    return path


def logits(path: Path, *, dense: bool) -> Tensor:
    """Of a packed model; dense: with every packed matrix multiplied as a plain one."""
    model = load(str(path), dtype=torch.float32)
    if dense:
        for module in model.modules():
            if isinstance(module, PackedExperts):
                module.forward = _dense_experts(module)  # type: ignore[method-assign]
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def _dense_experts(module: PackedExperts) -> object:
    matrices = [
        tuple(None if m is None else dequantize(m.packed()) for m in row) for row in module.matrices()
    ]

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(matrices):
            assert gate is not None
            assert up is not None
            assert down is not None
            token, slot = torch.where(index == e)
            h = silu(x[token] @ gate.T) * (x[token] @ up.T)
            out.index_add_(0, token, h @ down.T * weights[token, slot, None])
        return out

    return forward


@pytest.mark.parametrize(
    "name",
    ["quip2-free", "quip3-free", pytest.param("compensated", marks=pytest.mark.long), "fourier", "mixed"],
)
def test_a_model_runs_packed(mixtral: Path, tmp_path: Path, name: str) -> None:
    compress(str(mixtral), tmp_path / "packed", recipe(name), options=SERIAL)
    found, expected = logits(tmp_path / "packed", dense=False), logits(tmp_path / "packed", dense=True)
    assert relative_error(found, expected) < 1e-4
    rows = json.loads((tmp_path / "packed" / "trilobite.json").read_text())["tensors"]
    formats = {row["format"] for row in rows if row["role"] == "expert"}
    assert formats <= {"e8p-2", "e8p-3", "e8p-2-fourier", "int4-g32"}
    assert all(row["error"] < 0.4 for row in rows if "error" in row)
    again = tmp_path / "again"
    compress(str(mixtral), again, recipe(name), options=SERIAL)
    files = sorted(p.name for p in again.glob("*.safetensors"))
    assert all((again / f).read_bytes() == (tmp_path / "packed" / f).read_bytes() for f in files)


def recipe(name: str) -> Recipe:
    if name.startswith("quip"):
        return load_recipe(name)
    body = {"roles": ["attention", "expert"], "format": "e8p-2"}
    if name == "compensated":
        return recipe_from_dict(
            {"rules": [body], "rank": "dense-4+sparse-2", "iterations": 1, "cap": False}, name
        )
    if name == "fourier":
        return recipe_from_dict({"rules": [body | {"format": "e8p-2-fourier"}]}, name)
    rules = [
        {"names": "*.experts.1.*", "format": "int4-g32"},
        body,
    ]
    return recipe_from_dict({"rules": rules}, name)


def test_transforms_are_shared_as_promised(mixtral: Path, tmp_path: Path) -> None:
    compress(str(mixtral), tmp_path / "packed", load_recipe("quip2-free"), options=SERIAL)
    model = load(str(tmp_path / "packed"))
    attention = model.model.layers[0].self_attn
    q, k, v = (attention.q_proj.packed(), attention.k_proj.packed(), attention.v_proj.packed())
    assert torch.equal(q.signs_in, k.signs_in)
    assert torch.equal(q.signs_in, v.signs_in)
    experts = next(m for m in model.modules() if isinstance(m, PackedExperts)).matrices()
    assert len({bytes(m.packed().signs_in.tolist()) for gate, up, _ in experts for m in (gate, up)}) == 1
    assert len({bytes(down.packed().signs_out.tolist()) for _, _, down in experts}) == 1
    other = model.model.layers[1].self_attn.q_proj.packed()
    assert not torch.equal(q.signs_in, other.signs_in)


@pytest.mark.parametrize("name", ["quip3-free", "compensated", "fourier", "mixed", "rtn3"])
def test_every_byte_is_accounted_for(mixtral: Path, tmp_path: Path, name: str) -> None:
    """Section F.1: the sign vectors cost (n + m) / (n m) bits a weight."""
    chosen = load_recipe(name) if name == "rtn3" else recipe(name)
    rows = prepare(open_source(str(mixtral)), chosen).to_dict()["tensors"]
    accounts = {(a.role, a.format): a for a in account(rows)}
    for (role, fmt), a in accounts.items():
        mine = [row for row in rows if (row["role"], row.get("format")) == (role, fmt)]
        assert a.total * a.weights == pytest.approx(8 * sum(row["bytes"] for row in mine))
        assert a.bits["codes"] == parse_format(fmt).bits
        assert min(a.bits.values()) >= 0
        signs = sum(n + m for n, m in (row["shape"] for row in mine))
        if fmt in ("e8p-2", "e8p-3"):
            assert a.bits["signs"] * a.weights == pytest.approx(signs)  # dimensions here are multiples of 8
        if fmt.endswith("fourier"):
            assert a.bits["signs"] * a.weights == pytest.approx(4 * signs)
        assert (a.bits["compensator"] > 0) == (name == "compensated")
        assert (a.bits["signs"] > 0) == ("e8p" in fmt)


def test_inspect_shows_the_account(mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compress(str(mixtral), tmp_path / "packed", load_recipe("quip2-free"), options=SERIAL)
    inspect(str(tmp_path / "packed"))
    shown = capsys.readouterr().out
    assert "signs" in shown
    assert "1 KiB" in shown
    inspect(str(tmp_path / "packed"), json=True)
    head, *body = sorted(
        json.loads(capsys.readouterr().out)["accounts"], key=lambda a: a["role"], reverse=True
    )
    assert (head["role"], head["signs"]) == ("head", 0)
    assert all(a["codes"] == 2 and a["signs"] > 0 for a in body)


def test_names_of_inputs() -> None:
    from trilobite.checkpoint.roles import Matrix, View
    from trilobite.recipe import Role

    def name(text: str, expert: int | None = None) -> str:
        return input_name(
            Matrix(
                name=text,
                source=text,
                role=Role.OTHER,
                layer=0,
                expert=expert,
                projection=None,
                shape=(8, 8),
                view=View(),
            )
        )

    assert name("model.layers.3.self_attn.q_proj.weight") == name("model.layers.3.self_attn.v_proj.weight")
    assert name("m.layers.3.mlp.experts.7.up_proj.weight", 7) == name(
        "m.layers.3.mlp.experts.17.gate_proj.weight", 17
    )
    assert name("m.layers.3.mlp.experts.7.up_proj.weight", 7) != name(
        "m.layers.4.mlp.experts.7.up_proj.weight", 7
    )


def test_ldlq_without_data_says_what_to_do(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--calibration"):
        compress(str(mixtral), tmp_path / "packed", load_recipe("quip2"), options=SERIAL)
