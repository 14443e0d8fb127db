"""Hessians against hooks on the whole model; runs that are killed; texts, folders and models that do not fit."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import build_checkpoint
from support.calibrating import CONTEXT, DECODERS, SAMPLES, SERIAL, add_tokenizer, calibration, run, words
from support.runs import PlugPulled, digests, looks_complete
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

import trilobite
from trilobite.checkpoint.packed import PackedWriter, read_report
from trilobite.checkpoint.roles import Matrix, identify, read_matrix
from trilobite.checkpoint.source import open_source
from trilobite.errors import (
    ArchitectureError,
    CalibrationError,
    DestinationError,
    RecipeError,
    TrilobiteError,
)
from trilobite.models.names import memory_names
from trilobite.quantize.calibrate import loop as calibration_loop
from trilobite.quantize.calibrate import routed as calibration_experts
from trilobite.quantize.calibrate import store as calibration_store
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.routed import Routed
from trilobite.quantize.calibrate.stacked_experts import expert_matrix
from trilobite.quantize.calibrate.store import HessianStore
from trilobite.quantize.calibrate.watch import Watch, same_inputs
from trilobite.quantize.calibrate.windows import Calibration, draw_windows
from trilobite.quantize.plan.report import scarce
from trilobite.quantize.run import executor as work_module
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import BODY_ROLES, HEAD_RULE, PRESETS, Recipe, Role, load_recipe, needs_calibration


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_loop, "PASS_TOKENS", 4 * CONTEXT)
    monkeypatch.setattr(calibration_experts, "ROWS", 50)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(words(SAMPLES * CONTEXT))
    return path


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mixtral"
    build_checkpoint("mixtral", path)
    add_tokenizer(path)
    return path


@pytest.fixture
def copy(mixtral: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixtral, tmp_path / "mixtral"))


def with_head(recipe: Recipe) -> Recipe:
    """The head calibrated as well."""
    rules = tuple(replace(r, method="gptq") if r == HEAD_RULE else r for r in recipe.rules)
    return replace(recipe, rules=rules)


# The oracle: hooks on the whole model, experts computed from the matrices on disk


def gram(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.shape[-1]).double()
    return x.T @ x / len(x)


def activated(model: PreTrainedModel, gate: Tensor, up: Tensor) -> Tensor:
    if model.config.model_type == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return ACT2FN[model.config.hidden_act](gate) * up


def whole_model_hessians(
    model: PreTrainedModel, path: Path, ids: Tensor
) -> Iterator[tuple[Matrix, Tensor, int]]:
    """(matrix, its Hessian in float64, tokens) of everything that ran."""
    source = open_source(str(path))
    matrices = [m for m in identify(source) if m.quantizable]
    seen: dict[str, list[tuple[Any, ...]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: seen.setdefault(name, []).append(
                    (*args, *kwargs.values())
                ),
                with_kwargs=True,
            )
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    translate = memory_names(model)
    parts = {(m.layer, m.expert, m.projection): m for m in matrices if m.role is Role.EXPERT}
    for m in matrices:
        module = translate(m.name).removesuffix(".weight")
        if module in seen:
            x = torch.cat([args[0].reshape(-1, m.shape[1]) for args in seen[module]])
            yield m, gram(x), len(x)
        elif m.expert is not None:
            experts = module.split(".experts.")[0] + ".experts"
            hidden, index = seen[experts][0][:2]
            x = hidden.reshape(-1, hidden.shape[-1])[(index == m.expert).any(-1)]
            tokens = len(x)
            if m.projection == "down":
                gate, up = (
                    x @ read_matrix(source, parts[m.layer, m.expert, p]).float().T for p in ("gate", "up")
                )
                bias = getattr(model.get_submodule(experts), "gate_up_proj_bias", None)
                if bias is not None:
                    gate, up = gate + bias[m.expert, ::2], up + bias[m.expert, 1::2]
                x = activated(model, gate, up)
            yield m, gram(x.detach()), tokens


@pytest.mark.parametrize("model_type", DECODERS)
def test_hessians_of_every_architecture(
    model_type: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trilobite.quantize.methods.hessian.ENOUGH", 1e-9
    )  # each expert's own, however few its tokens
    model = build_checkpoint(model_type, tmp_path / "source")
    add_tokenizer(tmp_path / "source")
    ground = calibration(text, propagate="original", save=tmp_path / "h")
    ids = draw_windows(open_source(str(tmp_path / "source")), ground).ids
    run(tmp_path / "source", tmp_path / "dst", ground, with_head(load_recipe("gptq3")))
    store = HessianStore(
        tmp_path / "h", source=open_source(str(tmp_path / "source")).fingerprint(), calibration=None
    )
    compared = 0
    for m, wanted, tokens in whole_model_hessians(model, tmp_path / "source", ids):
        if store.missing([m.name]):
            continue
        h, note = store.get(m.name, m.shape[1])
        assert note["tokens"] == tokens, m.name
        if tokens:
            assert torch.allclose(h.double(), wanted, rtol=1e-3, atol=1e-5 * float(wanted.diagonal().mean()))
            compared += 1
    lines = [t for t in read_report(tmp_path / "dst")["tensors"] if "proxy" in t]
    assert compared >= len(lines) - sum(t["tokens"] == 0 for t in lines)
    unseen = [t["name"] for t in lines if t["role"] != "expert" and t["tokens"] == 0]
    assert all(
        name.endswith("mamba.dt_proj.weight") for name in unseen
    )  # Jamba multiplies by it without calling it


def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Hessians as they reach the quantizer."""
    found: dict[str, Tensor] = {}
    real = work_module.pack_line

    def process(source: Any, line: Any, recipe: Any, device: Any, known: Any = None) -> Any:
        if known is not None:
            found[line.matrix.name] = known[0].clone()
        return real(source, line, recipe, device, known)

    monkeypatch.setattr(work_module, "pack_line", process)
    return found


def second_block(path: Path, ids: Tensor) -> Tensor:
    """What the attention of the second block of a packed or original model sees."""
    model = trilobite.load(str(path), dtype=torch.float32)
    seen: list[Tensor] = []
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return gram(seen[0])


def test_quantized_blocks_are_propagated(
    copy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block's inputs are those of the packed model, or of the original one."""
    hessians = recorded(monkeypatch)
    tensors = {name: t.bfloat16().float() for name, t in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})  # packed models keep the router in bf16
    ids = draw_windows(open_source(str(copy)), calibration(text)).ids
    name = "model.layers.1.self_attn.q_proj.weight"
    recipe = replace(load_recipe("gptq2"), rank="dense-8", cap=False)
    run(copy, tmp_path / "q", calibration(text), recipe)
    quantized, packed = hessians[name].double(), second_block(tmp_path / "q", ids)
    run(copy, tmp_path / "o", calibration(text, propagate="original"), recipe)
    original, wanted = hessians[name].double(), second_block(copy, ids)
    assert torch.allclose(original, wanted, atol=1e-5 * float(wanted.diagonal().mean()))
    assert torch.allclose(quantized, packed, atol=1e-4 * float(packed.diagonal().mean()))
    assert float((quantized - original).norm() / original.norm()) > 0.02


def test_projections_of_one_input_share_a_hessian(mixtral: Path) -> None:
    source = open_source(str(mixtral))
    model = BlockModel(source, identify(source), torch.device("cpu"))
    ids = torch.randint(3, 250, (2, 16))
    model.load("")
    model.load(model.blocks[0])
    model.learn_arguments(ids)
    names = [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"]
    with Watch(model, names, []) as watch:
        watch.begin()
        model.run(model.blocks[0], model.embed(ids))
        assert same_inputs(watch.inputs()) == {
            names[0]: names[0],
            names[1]: names[0],
            names[2]: names[0],
            names[3]: names[3],
        }
    model.drop(model.blocks[0])
    assert all(p.is_meta for p in model.module(model.blocks[0]).parameters())


def to_fp8(path: Path) -> None:
    """Every matrix of the blocks in fp8 with a scale for 32 x 32 weights."""
    tensors = load_file(path / "model.safetensors")
    for name in [n for n, t in tensors.items() if t.ndim == 2 and "layers" in n and ".gate.weight" not in n]:
        w = tensors[name]
        n, k = (-(-s // 32) for s in w.shape)
        tensors[f"{name}_scale_inv"] = torch.rand(n, k) + 0.5
        tensors[name] = w.to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    change_config(path, {"quant_method": "fp8", "weight_block_size": [32, 32]})


def to_mxfp4(path: Path) -> None:
    """gpt-oss as it is published: experts in MXFP4, rows of [N, K]."""
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(
            119, 123, (experts, n, k // 32), generator=generator, dtype=torch.uint8
        )
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    change_config(path, {"quant_method": "mxfp4"})


def change_config(path: Path, quantization: Mapping[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": dict(quantization)}))


@pytest.mark.parametrize(
    ("model_type", "spoil"),
    [*((name, None) for name in DECODERS), ("qwen3_moe", to_fp8), ("mixtral", to_fp8), ("gpt_oss", to_mxfp4)],
)
def test_blocks_have_the_checkpoints_weights(model_type: str, spoil: Any, tmp_path: Path) -> None:
    """Stacked, transposed, interleaved, quantized: what the model computes with is what `read_matrix` reads."""
    build_checkpoint(model_type, tmp_path, dtype=torch.bfloat16)
    if spoil:
        spoil(tmp_path)
    source = open_source(str(tmp_path))
    matrices = identify(source)
    model = BlockModel(source, matrices, torch.device("cpu"))
    compared = 0
    for i, block in enumerate(model.blocks):
        model.load(block)
        for m in matrices:
            place = model.place(m) if m.quantizable else None
            if place is None or model.block_of(place) != i:
                continue
            module = model.module(place.module)
            w = (
                module.weight
                if place.expert is None
                else expert_matrix(module, place.expert, place.projection)
            )
            assert torch.equal(w.float(), read_matrix(source, m).float()), m.name
            model.put(place, w.detach().float() + 1)
            again = (
                module.weight
                if place.expert is None
                else expert_matrix(module, place.expert, place.projection)
            )
            assert torch.equal(
                again.detach().float(), (read_matrix(source, m).float() + 1).bfloat16().float()
            )
            compared += 1
        model.drop(block)
    assert compared == sum(m.quantizable and m.role in BODY_ROLES for m in matrices) + sum(
        m.role is Role.ROUTER and model.place(m) is not None for m in matrices
    )


# Interrupted runs


def interrupted(
    source: Path, dst: Path, ground: Calibration, after: int, monkeypatch: Any, **more: Any
) -> None:
    real, count = PackedWriter.write, []

    def write(self: PackedWriter, *args: Any) -> None:
        if len(count) >= after:
            raise PlugPulled
        count.append(1)
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PackedWriter, "write", write)
        with pytest.raises(PlugPulled):
            run(source, dst, ground, **more)


@pytest.fixture(scope="module")
def finished(mixtral: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_loop, "PASS_TOKENS", 4 * CONTEXT)
        patch.setattr(calibration_experts, "ROWS", 50)
        dst = tmp_path_factory.mktemp("finished") / "packed"
        run(mixtral, dst, calibration(text))
        yield dst


@pytest.mark.parametrize(("after", "jobs"), [(0, 1), (8, 2), (13, 1), (24, 2), (38, 1)])
def test_resumed_to_the_same_bytes(
    mixtral: Path,
    text: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    jobs: int,
) -> None:
    """Killed before the blocks, in the middle of one, between two; then with another number of threads."""
    dst = tmp_path / "dst"
    interrupted(mixtral, dst, calibration(text), after, monkeypatch, options=Options(jobs=jobs, device="cpu"))
    assert not looks_complete(dst)
    run(mixtral, dst, calibration(text), options=Options(jobs=3 - jobs, device="cpu"))
    assert digests(dst) == digests(finished)


def test_a_block_that_is_not_propagated_would_be_noticed(
    mixtral: Path, text: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail: after a resumption that forgets what is quantized already."""
    interrupted(mixtral, tmp_path / "dst", calibration(text), 26, monkeypatch)
    monkeypatch.setattr(BlockModel, "put", lambda *_: None)
    run(mixtral, tmp_path / "dst", calibration(text))
    assert digests(tmp_path / "dst") != digests(finished)


def test_activations_on_disk_change_nothing(
    mixtral: Path, text: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[str] = []
    real = torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda name, **k: files.append(name) or real(name, **k))
    run(mixtral, tmp_path / "dst", calibration(text, memory=4096))
    assert len(files) == 3  # what enters the blocks, and what enters the experts of each
    assert all(str(tmp_path / "dst") in name and not Path(name).exists() for name in files)
    assert digests(tmp_path / "dst") == digests(finished)


@pytest.mark.parametrize("change", [{"seed": 1}, {"samples": 5}, {"context": 16}, {"propagate": "original"}])
def test_another_calibration_is_another_run(
    mixtral: Path,
    text: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
) -> None:
    interrupted(mixtral, tmp_path / "dst", calibration(text), 20, monkeypatch)
    for dst in (tmp_path / "dst", finished):
        with pytest.raises(DestinationError, match="calibration"):
            run(mixtral, dst, calibration(text, **change))
    assert run(mixtral, finished, calibration(text)).fresh == 0


# Kept Hessians


def test_kept_hessians_give_the_same_bytes(mixtral: Path, text: Path, tmp_path: Path) -> None:
    """Collected and used, used again, used by another recipe: as without the folder."""
    ground = calibration(text, propagate="original")
    run(mixtral, tmp_path / "direct", ground)
    run(mixtral, tmp_path / "saved", replace(ground, save=tmp_path / "h"))
    run(mixtral, tmp_path / "again", Calibration(hessians=tmp_path / "h"))
    assert digests(tmp_path / "direct") == digests(tmp_path / "saved") == digests(tmp_path / "again")
    run(mixtral, tmp_path / "two", Calibration(hessians=tmp_path / "h"), "gptq2")
    run(mixtral, tmp_path / "two-direct", ground, "gptq2")
    assert digests(tmp_path / "two") == digests(tmp_path / "two-direct")


def test_collecting_is_resumed_block_by_block(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = calibration(text, propagate="original", save=tmp_path / "h")
    real, count = HessianStore.take, []

    def take(self: HessianStore, *args: Any) -> Any:
        count.append(1)
        if len(count) == 15:
            raise PlugPulled
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(HessianStore, "take", take)
        with pytest.raises(PlugPulled):
            run(mixtral, tmp_path / "dst", ground)
    first = (tmp_path / "h" / "hessians-00000.safetensors").stat().st_mtime_ns
    run(mixtral, tmp_path / "dst", ground)
    assert (tmp_path / "h" / "hessians-00000.safetensors").stat().st_mtime_ns == first
    run(mixtral, tmp_path / "whole", replace(ground, save=None))
    assert digests(tmp_path / "dst") == digests(tmp_path / "whole")


def only(recipe: Recipe, role: Role) -> Recipe:
    rules = tuple(r if r.roles == (role,) else replace(r, method="rtn") for r in split(recipe).rules)
    return replace(recipe, rules=rules)


def split(recipe: Recipe) -> Recipe:
    """A rule for each role."""
    rules = (replace(rule, roles=(role,)) for rule in recipe.rules for role in rule.roles)
    return replace(recipe, rules=tuple(rules))


def test_another_recipe_adds_to_the_folder(mixtral: Path, text: Path, tmp_path: Path) -> None:
    """What is there stays as it is, and only what it lacks is collected."""
    ground = calibration(text, propagate="original")
    saving, kept = replace(ground, save=tmp_path / "h"), Calibration(hessians=tmp_path / "h")
    experts, attention = (only(load_recipe("gptq3"), role) for role in (Role.EXPERT, Role.ATTENTION))
    run(mixtral, tmp_path / "experts", saving, experts)
    before = digests(tmp_path / "h")
    run(mixtral, tmp_path / "attention", saving, attention)
    after = digests(tmp_path / "h")
    assert all(after[name] == before[name] for name in before if name != "manifest.json")
    assert {"hessians-00000-1.safetensors", "hessians-00001-1.safetensors"} == after.keys() - before.keys()
    for name, recipe in (("experts", experts), ("attention", attention), ("all", load_recipe("gptq3"))):
        run(mixtral, tmp_path / f"{name}-direct", ground, recipe)
        run(mixtral, tmp_path / f"{name}-kept", kept, recipe)
        assert digests(tmp_path / f"{name}-kept") == digests(tmp_path / f"{name}-direct")


@pytest.mark.parametrize("damage", ["deleted", "cut", "empty", "another"])
def test_a_lost_file_is_collected_again(mixtral: Path, text: Path, tmp_path: Path, damage: str) -> None:
    ground = calibration(text, propagate="original", save=tmp_path / "h")
    run(mixtral, tmp_path / "dst", ground)
    path = tmp_path / "h" / "hessians-00000.safetensors"
    if damage == "deleted":
        path.unlink()
    elif damage == "another":
        save_file({"else": torch.ones(2)}, path)
    else:
        os.truncate(path, path.stat().st_size - 50 if damage == "cut" else 0)
    whole = (tmp_path / "h" / "hessians-00001.safetensors").stat().st_mtime_ns
    with pytest.raises(CalibrationError, match=r"cannot be read; collect the Hessians again"):
        run(mixtral, tmp_path / "no", Calibration(hessians=tmp_path / "h"))
    run(mixtral, tmp_path / "again", ground)
    assert (tmp_path / "h" / "hessians-00001.safetensors").stat().st_mtime_ns == whole
    run(mixtral, tmp_path / "kept", Calibration(hessians=tmp_path / "h"))
    assert digests(tmp_path / "dst") == digests(tmp_path / "again") == digests(tmp_path / "kept")


def test_two_runs_do_not_fill_one_folder(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused, and one that opened the folder before the first had ended sees what that added."""
    ground = calibration(text, propagate="original", save=tmp_path / "h")
    run(mixtral, tmp_path / "whole", replace(ground, save=tmp_path / "whole-h"))
    source, wanted = open_source(str(mixtral)), draw_windows(open_source(str(mixtral)), ground).identity
    early = HessianStore(tmp_path / "h", source=source.fingerprint(), calibration=wanted)
    real = HessianStore.take

    def take(self: HessianStore, *args: Any) -> Any:
        with pytest.raises(DestinationError, match="another run is writing here; wait") as e, early.writing():
            pass
        assert "\n" not in str(e.value)
        return real(self, *args)

    monkeypatch.setattr(HessianStore, "take", take)
    line = run(mixtral, tmp_path / "dst", ground).plan.lines[0]
    with early.writing():
        early.unseen([replace(line, matrix=replace(line.matrix, name="a"))])
    assert not early.missing([t["name"] for t in read_report(tmp_path / "dst")["tensors"] if "proxy" in t])
    (found,) = (HessianStore(tmp_path / h, source=source.fingerprint(), calibration=None) for h in ["h"])
    assert found.missing(["a", "b"]) == {"b"}


def test_a_failed_collection_leaves_no_temporary_file(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HessianStore, "take", lambda *_: pytest.fail("stop"))
    with pytest.raises(pytest.fail.Exception):
        run(mixtral, tmp_path / "dst", calibration(text, propagate="original", save=tmp_path / "h"))
    assert not list((tmp_path / "h").glob("*.safetensors*")) + list((tmp_path / "h").glob(".*.tmp"))


@pytest.mark.parametrize(
    "change",
    [
        [],
        None,
        {"version": [1]},
        {"calibration": []},
        {"matrices": []},
        {"matrices": {"a": 3}},
        {"matrices": {"a": {}}},
        {"matrices": {"a": {"tokens": 1, "file": 3, "tensor": "a"}}},
        {"matrices": {"a": {"tokens": 1, "file": "a"}}},
    ],
    ids=str,
)
def test_manifests_of_another_shape(tmp_path: Path, change: Any) -> None:
    good = {"version": 1, "source": "s", "calibration": {}, "matrices": {"a": {"tokens": 0}}}
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(good))
    HessianStore(tmp_path, source="s", calibration={})
    path.write_text(json.dumps(good | change if isinstance(change, dict) else change))
    with pytest.raises(
        CalibrationError, match=r"manifest.json: .*; delete .* collect the Hessians again"
    ) as e:
        HessianStore(tmp_path, source="s", calibration={})
    assert "\n" not in str(e.value)


def test_a_folder_that_cannot_be_written_to(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = calibration(text, propagate="original", save=tmp_path / "h")
    real, count = calibration_store._Triangles.append, []

    def append(self: Any, *args: Any) -> None:
        count.append(1)
        if len(count) > 15:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(calibration_store._Triangles, "append", append)
        with pytest.raises(DestinationError, match=r"h: the disk is full.*the same command again"):
            run(mixtral, tmp_path / "dst", ground)
    run(mixtral, tmp_path / "dst", ground)
    with pytest.raises(DestinationError, match="cannot write"):
        run(mixtral, tmp_path / "other", replace(ground, save=text / "h"))


def test_hessians_that_do_not_fit(mixtral: Path, copy: Path, text: Path, tmp_path: Path) -> None:
    ground = calibration(text, propagate="original", save=tmp_path / "h")
    run(mixtral, tmp_path / "dst", ground)
    kept = Calibration(hessians=tmp_path / "h")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    cases: list[tuple[Path, Calibration, str | Recipe, str]] = [
        (copy, kept, "gptq3", "another checkpoint"),
        (mixtral, kept, with_head(load_recipe("gptq3")), "no Hessian for lm_head.weight"),
        (mixtral, replace(ground, seed=1), "gptq3", "seed"),
        (mixtral, replace(ground, hessians=tmp_path / "h", save=None, samples=3), "gptq3", "samples"),
        (mixtral, Calibration(hessians=tmp_path / "nothing"), "gptq3", "manifest"),
        (mixtral, replace(ground, hessians=tmp_path / "h"), "gptq3", "drop one"),
        (mixtral, replace(ground, propagate="quantized"), "gptq3", "--propagate original"),
        (mixtral, replace(ground, propagate="both", save=None), "gptq3", "'both'"),
    ]
    for i, (source, wrong, recipe, message) in enumerate(cases):
        with pytest.raises(CalibrationError, match=message) as e:
            run(source, tmp_path / f"no{i}", wrong, recipe)
        assert "\n" not in str(e.value)
    file = tmp_path / "h" / "hessians-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CalibrationError, match="cannot be read"):
        run(mixtral, tmp_path / "damaged", kept)
    (tmp_path / "h" / "manifest.json").write_text("{")
    with pytest.raises(CalibrationError, match="cannot be read"):
        run(mixtral, tmp_path / "damaged", kept)


# Experts that see little


def spoiled_router(path: Path, experts: Mapping[int, float]) -> None:
    """Scale the router's rows of layer 0 to be far below (never chosen) or above."""
    tensors = load_file(path / "model.safetensors")
    gate = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    for expert, factor in experts.items():
        gate[expert] *= factor
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def test_an_expert_without_tokens_gets_the_layers_average(
    copy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hessians = recorded(monkeypatch)
    real = BlockModel.run

    def never_three(self: BlockModel, block: str, hidden: Tensor, first: int) -> Tensor:
        """Expert 3 of the first layer is never chosen, expert 2 by one token in a batch."""
        if block != self.blocks[0]:
            return real(self, block, hidden, first)
        experts = self.module(f"{block}.mlp.experts")
        handle = experts.register_forward_pre_hook(reroute, prepend=True)
        try:
            return real(self, block, hidden, first)
        finally:
            handle.remove()

    def reroute(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, *rest = args
        index = index.clone()
        index[:] = torch.tensor([0, 1])
        index[0] = torch.tensor([0, 2])
        return hidden, index, *rest

    monkeypatch.setattr(BlockModel, "run", never_three)
    run(copy, tmp_path / "dst", calibration(text))
    rows = {t["name"]: t for t in read_report(tmp_path / "dst")["tensors"] if t["role"] == "expert"}
    name = "model.layers.0.block_sparse_moe.experts.{}.{}.weight".format
    assert [rows[name(e, "w1")]["tokens"] for e in range(4)] == [288, 285, 3, 0]
    assert "own" not in rows[name(0, "w1")]
    assert rows[name(2, "w2")]["own"] == pytest.approx(3 / (2 * 96), rel=1e-3)
    assert rows[name(3, "w1")]["own"] == 0
    mean = (288 * hessians[name(0, "w1")] + 285 * hessians[name(1, "w1")]) / 573
    assert torch.allclose(hessians[name(3, "w1")], mean, rtol=0.3, atol=0.2 * float(mean.diagonal().mean()))
    table = scarce(list(rows.values()))
    assert table[0][:3] == (name(3, "x").removesuffix(".x.weight"), "w1, w3, w2", 0)
    assert all(0 < t["error"] < 1 for t in rows.values())


def test_no_expert_saw_a_token(
    copy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All indices mean none, as expert parallelism and finished sentences have it."""
    real = Routed.put
    monkeypatch.setattr(
        Routed, "put", lambda self, states, index: real(self, states, torch.full_like(index, 4))
    )
    run(copy, tmp_path / "dst", calibration(text))
    rows = [t for t in read_report(tmp_path / "dst")["tensors"] if t["role"] == "expert"]
    assert all(t["tokens"] == 0 and 0 < t["error"] < 0.2 for t in rows)


# Texts


def test_windows_of_a_short_text(mixtral: Path, text: Path) -> None:
    source = open_source(str(mixtral))
    ids = draw_windows(source, calibration(text)).ids
    flat = [int(w[1:]) for w in text.read_text().split()]
    assert ids.tolist() == [flat[i : i + CONTEXT] for i in range(0, len(flat), CONTEXT)]
    few = draw_windows(source, calibration(text, samples=6)).ids
    assert [row in ids.tolist() for row in few.tolist()] == [True] * 6
    assert few.tolist() != draw_windows(source, calibration(text, samples=6, seed=7)).ids.tolist()


def test_windows_of_a_long_text(mixtral: Path, tmp_path: Path) -> None:
    source, path = open_source(str(mixtral)), tmp_path / "long.txt"
    path.write_text(words(40_000, seed=3))
    flat = [int(w[1:]) for w in path.read_text().split()]
    drawn = draw_windows(source, calibration(path))
    assert drawn.ids.shape == (SAMPLES, CONTEXT)
    joined = " ".join(map(str, flat))
    for row in drawn.ids.tolist():  # the first word of a window may be cut
        assert " ".join(map(str, row[1:])) in joined
    assert torch.equal(drawn.ids, draw_windows(source, calibration(path)).ids)
    assert drawn.identity != draw_windows(source, calibration(path, seed=1)).identity
    add = Path(shutil.copytree(mixtral, tmp_path / "begins"))
    add_tokenizer(add, begins=True)
    begun = draw_windows(open_source(str(add)), calibration(path)).ids
    assert begun[:, 0].tolist() == [1] * SAMPLES
    assert begun.shape == drawn.ids.shape


def test_files_and_folders(mixtral: Path, tmp_path: Path) -> None:
    source, folder = open_source(str(mixtral)), tmp_path / "texts"
    folder.mkdir()
    parts = [words(CONTEXT, seed=i) for i in range(3)]
    (folder / "a.txt").write_text(parts[0])
    (folder / "b.jsonl").write_text(json.dumps({"text": parts[1]}) + "\n\n" + json.dumps({"text": parts[2]}))
    (folder / "c.png").write_bytes(b"\xff\x00")
    ids = draw_windows(source, calibration(folder)).ids
    assert ids.flatten().tolist() == [int(w[1:]) for w in " ".join(parts).split()]
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": parts}), tmp_path / "d.parquet")
    assert torch.equal(draw_windows(source, calibration(tmp_path / "d.parquet")).ids, ids)
    parquet.write_table(pyarrow.table({"prose": parts}), tmp_path / "e.parquet")
    with pytest.raises(CalibrationError, match="no readable column"):
        draw_windows(source, calibration(tmp_path / "e.parquet"))


def bad_texts(tmp_path: Path) -> dict[str, tuple[Calibration, str]]:
    files = {
        "short.txt": words(CONTEXT - 1).encode(),
        "latin.txt": b"caf\xe9",
        "bad.jsonl": b"{}\n",
        "worse.jsonl": b"{",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "empty").mkdir()
    good = tmp_path / "good.txt"
    good.write_text(words(500))
    return {
        "short": (calibration(tmp_path / "short.txt"), "31 tokens, a window needs 32"),
        "latin": (calibration(tmp_path / "latin.txt"), "not UTF-8 at byte 3"),
        "record": (calibration(tmp_path / "bad.jsonl"), 'line 1 has no string "text"'),
        "json": (calibration(tmp_path / "worse.jsonl"), "line 1 is not JSON"),
        "empty": (calibration(tmp_path / "empty"), "no .txt"),
        "hub id": (calibration(Path("Salesforce/wikitext")), "never downloaded"),
        "context": (calibration(good, context=257), "takes 2 to 256 tokens"),
        "samples": (calibration(good, samples=0), "at least one"),
    }


@pytest.mark.parametrize(
    "case", ["short", "latin", "record", "json", "empty", "hub id", "context", "samples"]
)
def test_bad_texts(mixtral: Path, tmp_path: Path, case: str) -> None:
    ground, message = bad_texts(tmp_path)[case]
    with pytest.raises(CalibrationError, match=message) as e:
        run(mixtral, tmp_path / "dst", ground)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "dst").exists()


def test_a_tokenizer_that_does_not_fit(copy: Path, text: Path, tmp_path: Path) -> None:
    add_tokenizer(copy, vocabulary=300)
    big = tmp_path / "big.txt"
    big.write_text(words(500, vocabulary=300))
    with pytest.raises(CalibrationError, match="vocabulary has 256"):
        run(copy, tmp_path / "dst", calibration(big))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    with pytest.raises(CalibrationError, match="no usable tokenizer"):
        run(copy, tmp_path / "dst", calibration(text))
    assert not (tmp_path / "dst").exists()


# Models


def test_activations_that_are_not_finite(copy: Path, text: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = float("inf")
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    rule = replace(load_recipe("gptq3"), rules=load_recipe("gptq3").rules)
    with pytest.raises(TrilobiteError, match=r"layers\.1") as e:
        run(copy, tmp_path / "dst", calibration(text), rule)
    assert "\n" not in str(e.value)


def test_a_tensor_that_is_missing(copy: Path, text: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.post_attention_layernorm.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrilobiteError, match="post_attention_layernorm"):
        run(copy, tmp_path / "dst", calibration(text))


def test_blocks_that_need_more_than_hidden_states(mixtral: Path) -> None:
    source = open_source(str(mixtral))
    model = BlockModel(source, identify(source), torch.device("cpu"))
    model.load("")
    model.load(model.blocks[0])
    ids = torch.randint(3, 250, (2, 16))
    real = type(model.model.model).forward

    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return real(self, input_ids=input_ids, **{**kwargs, "position_ids": input_ids % 7})

    model.check_arguments(ids)
    type(model.model.model).forward, before = forward, real
    try:
        with pytest.raises(ArchitectureError, match="depends on the text"):
            model.check_arguments(ids)
    finally:
        type(model.model.model).forward = before


# Recipes


def test_which_recipes_need_calibration(mixtral: Path, text: Path, tmp_path: Path) -> None:
    wanted = {"gptq2", "gptq3", "gptq4"}
    assert {name for name, r in PRESETS.items() if needs_calibration(r)} >= wanted
    assert not needs_calibration(load_recipe("milo-s1"))
    with pytest.raises(RecipeError, match="needs a text to calibrate on; pass --calibration"):
        compress(str(mixtral), tmp_path / "dst", load_recipe("gptq3"), options=SERIAL)
    with pytest.raises(RecipeError, match="needs no calibration; drop --calibration"):
        run(mixtral, tmp_path / "dst", calibration(text), "search3")
    assert not (tmp_path / "dst").exists()


def test_mixed_recipes(mixtral: Path, text: Path, tmp_path: Path) -> None:
    """Data-free attention, calibrated experts, kept layer: the packed model runs."""
    recipe = load_recipe("gptq3")
    rules = (replace(recipe.rules[0], roles=(Role.ATTENTION,), method="search"), *recipe.rules)
    run(mixtral, tmp_path / "dst", calibration(text), replace(recipe, rules=rules))
    rows = {t["name"]: t for t in read_report(tmp_path / "dst")["tensors"]}
    assert "proxy" not in rows["model.layers.0.self_attn.q_proj.weight"]
    assert rows["model.layers.0.block_sparse_moe.experts.0.w1.weight"]["proxy"] > 0
    model = trilobite.load(str(tmp_path / "dst"))
    assert bool(torch.isfinite(model(input_ids=torch.arange(20)[None]).logits).all())


def test_quantizing_while_loading_is_refused(mixtral: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(RecipeError, match="which from_pretrained cannot do"):
        AutoModelForCausalLM.from_pretrained(mixtral, quantization_config=trilobite.TrilobiteConfig("gptq3"))


def test_real_hessians_favour_gptq(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of a trained model: the loss of gptq on real inputs is far below that of search."""
    from trilobite.formats.weight import dequantize
    from trilobite.quantize.methods.hessian import weighted_error
    from trilobite.quantize.methods.registry import METHODS

    path = shared / "models/tiny-mixtral-outliers"
    hessians = recorded(monkeypatch)
    recipe = load_recipe("gptq3")
    rules = (replace(recipe.rules[0], layers=(0, 0)), replace(recipe.rules[0], method="rtn"))
    ground = Calibration(
        text=shared / "data/train/wikipedia.txt", samples=16, context=256, propagate="original"
    )
    result = run(path, tmp_path / "dst", ground, replace(recipe, rules=rules))
    source = open_source(str(path))
    ratios = []
    for line in result.plan.lines:
        if line.matrix.name in hessians:
            assert line.format is not None
            w, h = read_matrix(source, line.matrix).float(), hessians[line.matrix.name]
            e = w - dequantize(METHODS["search"](w, line.format).weight)
            plain = weighted_error(e, h) / weighted_error(w, h)
            ratios.append(result.records[line.matrix.name]["proxy"] / plain)
    assert len(ratios) == 28
    assert max(ratios) < 0.95
    assert sum(ratios) / len(ratios) < 0.6
