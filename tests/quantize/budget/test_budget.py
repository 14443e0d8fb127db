"""Recipes that are made for a budget: what they come to, that they are ordinary ones, and runs that are cut off."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from support.architectures import build_checkpoint
from support.calibrating import SERIAL, add_tokenizer
from support.runs import PlugPulled, digests

from trilobite.checkpoint.packed import PackedWriter, read_report
from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import open_source
from trilobite.checkpoint.summary import bytes_on_disk
from trilobite.errors import BudgetError
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.budget.measured import read_sensitivities
from trilobite.quantize.budget.priors import prior, priors
from trilobite.quantize.budget.units import make_units
from trilobite.quantize.columns.choose import with_column_scales
from trilobite.quantize.run import compress as run
from trilobite.quantize.run.compress import compress, prepare
from trilobite.quantize.run.planned import Planned, plan_within
from trilobite.recipe import Role, recipe_from_dict
from trilobite.runtime.load import load


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("budget") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    add_tokenizer(path)
    return path


def planned(path: Path, budget: Budget) -> Planned:
    return plan_within(open_source(str(path)), budget)


@pytest.mark.parametrize("bits", [2.6, 3.3, 4.0, 6.5])
def test_bits_are_met_and_nearly_used(original: Path, bits: float) -> None:
    found = planned(original, Budget(bits=bits, importance="none", columns="none"))
    lines = [
        line
        for line in prepare(open_source(str(original)), found.recipe).lines
        if line.format and line.matrix.role is not Role.HEAD
    ]
    weights = sum(line.matrix.shape[0] * line.matrix.shape[1] for line in lines)
    assert 0.93 * bits < 8 * sum(line.nbytes for line in lines) / weights <= bits


def test_more_bytes_lose_less(original: Path) -> None:
    losses = [
        planned(original, Budget(bits=bits, importance="none")).account["loss"]
        for bits in (2.6, 3.0, 3.5, 4.5, 7.0)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 10 * losses[-1]


def test_an_ordinary_recipe(original: Path) -> None:
    """As YAML it is read back, and makes the same plan."""
    found = planned(original, Budget(bits=3.5, keep=(Role.HEAD,)))
    text = yaml.safe_dump(found.recipe.to_dict())
    again = recipe_from_dict(yaml.safe_load(text), "again")
    assert again == found.recipe
    source = open_source(str(original))
    kept = [line for line in prepare(source, again).lines if line.matrix.role is Role.HEAD]
    assert [line.format for line in kept] == [None]
    assert found.recipe.importance == "weights"
    assert found.recipe.columns == "sinkhorn"


def test_experts_share_a_format_unless_asked_otherwise(original: Path) -> None:
    matrices = identify(open_source(str(original)))
    together = make_units(matrices, per_expert=False)
    apart = make_units(matrices, per_expert=True)
    assert [u.part for u in together if u.layer == "1"] == ["q, k, v", "o", "gate, up", "down"]
    assert len([u for u in apart if u.role is Role.EXPERT]) == 4 * len(
        [u for u in together if u.role is Role.EXPERT]
    )
    assert planned(original, Budget(bits=3.45, per_expert=True)).recipe.importance == "builtin"
    found = planned(original, Budget(bits=3.45, per_expert=True, importance="none"))
    assert {row["expert"] for row in found.account["choices"] if "expert" in row} == {0, 1, 2, 3}
    lines = prepare(open_source(str(original)), found.recipe).lines
    experts = {
        str(line.format) for line in lines if line.matrix.role is Role.EXPERT and line.matrix.layer == 0
    }
    assert len(experts) > 1


def test_sensitivities_decide(original: Path) -> None:
    """A unit that costs nothing gets the fewest bytes, one that costs all the most."""
    matrices = identify(open_source(str(original)))
    names = [f"{u.layer} {u.role.value}: {u.part}" for u in make_units(matrices, per_expert=False)]
    measured = dict.fromkeys(names, 1.0) | {"0 expert: down": 0.0, "1 expert: down": 1e6}
    found = planned(original, Budget(bits=3.5, importance="none", sensitivities=measured))
    formats = {f"{r['layer']} {r['role']}: {r['part']}": r["format"] for r in found.account["choices"]}
    assert formats["0 expert: down"].startswith("int2")
    assert formats["1 expert: down"].startswith("int8")


def test_size_counts_every_file(original: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"the least that is possible is (\S+) MB, the most (\S+) MB") as e:
        planned(original, Budget(size=1, importance="none"))
    low, high = (1e6 * float(number) for number in re.findall(r"(\S+) MB", str(e.value))[1:])
    size = int((low + high) / 2)
    compress(original, tmp_path / "out", Budget(size=size), options=SERIAL)
    assert 0.8 * size < bytes_on_disk(tmp_path / "out") <= size


def test_few_bits_bring_in_the_lattice(original: Path, tmp_path: Path) -> None:
    """Side by side with formats of integers, column scales and importance; and the model runs."""
    compress(original, tmp_path / "out", Budget(bits=2.35), options=SERIAL)
    formats = {row["format"] for row in read_report(tmp_path / "out")["tensors"] if "format" in row}
    assert {"e8p-2", "int8-g64"} < formats
    assert any(name.endswith("super") for name in formats)
    ids = torch.arange(8)[None]
    assert bool(torch.isfinite(load(str(tmp_path / "out"))(ids).logits).all())
    asked = planned(original, Budget(bits=2.6, importance="none", lattice=True)).account
    assert asked["least"] < planned(original, Budget(bits=2.6, importance="none")).account["least"]
    assert any("e8p-2" in row["format"] for row in asked["choices"])
    more = planned(original, Budget(bits=3.4, importance="none", lattice=True)).account
    assert any(row["format"] in ("e8p-3", "e8p-4") for row in more["choices"])
    assert more["loss"] < planned(original, Budget(bits=3.4, importance="none")).account["loss"]
    least = planned(original, Budget(bits=2.6, importance="none")).account["least"]
    assert least > planned(original, Budget(bits=2.35, importance="none")).account["least"]


def test_fewer_bits_than_the_lattice_has(original: Path, tmp_path: Path) -> None:
    """A codebook of one bit joins where it has to, for what suffers least; and the model runs."""
    compress(original, tmp_path / "out", Budget(bits=1.9), options=SERIAL)
    formats = {row["format"] for row in read_report(tmp_path / "out")["tensors"] if "format" in row}
    assert {"e8p-1", "e8p-2"} < formats
    ids = torch.arange(8)[None]
    assert bool(torch.isfinite(load(str(tmp_path / "out"))(ids).logits).all())
    enough = planned(original, Budget(bits=2.35, importance="none")).account
    assert not any("e8p-1" in row["format"] for row in enough["choices"])


def test_compensators_where_a_low_rank_helps(original: Path, tmp_path: Path) -> None:
    """Matrices whose residual is nearly of rank 2, by importance, get a compensator and no other format."""
    source = open_source(str(original))
    plain = planned(original, Budget(bits=3.6))
    found = planned(original, Budget(bits=3.6, ranks=("2",)))
    assert found.account["loss"] <= plain.account["loss"]
    ranked = [row["format"] for row in found.account["choices"] if row["format"].endswith("rank 2")]
    lines = prepare(with_column_scales(source, found.recipe), found.recipe).lines
    assert bool(ranked) == any(line.rank == 2 for line in lines)


def test_impossible_budgets(original: Path) -> None:
    for budget in (Budget(bits=0.5, importance="none"), Budget(bits=12, importance="none")):
        with pytest.raises(BudgetError, match=r"the least that is possible is \d\.\d\d, the most 8\.\d\d"):
            planned(original, budget)
    with pytest.raises(BudgetError, match="expected one: bits, size or fit"):
        Budget(bits=3, size=10**9)
    wide = planned(original, Budget(fit=2**33, reserved=2**20, importance="none"))
    assert {row["format"] for row in wide.account["choices"]} == {"int8-g128"}
    with pytest.raises(BudgetError, match="GiB for all but weights"):
        planned(original, Budget(fit=2**33, reserved=2**33, importance="none"))


def test_a_run_that_is_cut_off_keeps_its_plan(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(bits=3.4)
    compress(original, tmp_path / "whole", budget, options=SERIAL)
    write, writes = PackedWriter.write, 0

    def pulled(self: PackedWriter, *args: object) -> None:
        nonlocal writes
        writes += 1
        if writes == 40:
            raise PlugPulled
        write(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(PackedWriter, "write", pulled)
        with pytest.raises(PlugPulled):
            compress(original, tmp_path / "cut", budget, options=SERIAL)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("was planned again")

    monkeypatch.setattr(run, "plan_within", never)
    assert compress(original, tmp_path / "cut", budget, options=SERIAL).fresh < 60
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")
    assert compress(original, tmp_path / "cut", budget, options=SERIAL).fresh == 0
    account = read_report(tmp_path / "cut")["identity"]["planner"]
    assert account["budget"] == budget.to_dict()
    assert len(account["choices"]) == 8
    ids = torch.arange(8)[None]
    assert bool(torch.isfinite(load(str(tmp_path / "cut"))(ids).logits).all())


def test_another_budget_is_another_checkpoint(original: Path, tmp_path: Path) -> None:
    compress(original, tmp_path / "out", Budget(bits=3.4, importance="none"), options=SERIAL)
    with pytest.raises(OSError, match="differs in its recipe and planner"):
        compress(original, tmp_path / "out", Budget(bits=4, importance="none"), options=SERIAL)


def test_priors_know_every_role() -> None:
    for role in ("attention", "expert", "shared_expert", "dense_mlp"):
        assert prior(role, "a part that nobody measured", 0.3) > 0
    values = priors()["expert: down"]
    assert prior("expert", "down", 0) == pytest.approx(values[0])
    assert prior("expert", "down", 1) == pytest.approx(values[-1])
    assert min(values[:2]) <= prior("expert", "down", 0.1) <= max(values[:2])


def test_files_that_hold_no_sensitivities(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    good = {"kind": "trilobite sensitivity", "version": 1, "sensitivities": {"0 expert: down": 0.5}}
    path.write_text(json.dumps(good))
    assert read_sensitivities(path) == {"0 expert: down": 0.5}
    for bad in (
        "",
        "[]",
        "{}",
        json.dumps(good | {"version": 2}),
        json.dumps(good | {"sensitivities": {"a": "b"}}),
    ):
        path.write_text(bad)
        with pytest.raises(BudgetError, match=r"s\.json: .*writes it anew"):
            read_sensitivities(path)
    with pytest.raises(BudgetError, match="cannot be read"):
        read_sensitivities(tmp_path / "absent.json")
