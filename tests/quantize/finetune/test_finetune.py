"""Fine-tuning: gradients against finite differences, what is stored against what was trained, killed runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from support.calibrating import CONTEXT, DECODERS, SAMPLES, add_tokenizer, calibration, run, words
from support.runs import PlugPulled, digests, looks_complete
from torch import Tensor
from typer.testing import CliRunner

import trilobite
from trilobite.checkpoint.packed import PackedWriter, read_report
from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import open_source
from trilobite.cli import app
from trilobite.errors import CalibrationError, DestinationError, RecipeError, TrilobiteError
from trilobite.formats.incoherence import Spin, draw_signs, read_signs
from trilobite.formats.weight import dequantize, unrotated, with_real_signs
from trilobite.quantize.calibrate import loop as calibration_loop
from trilobite.quantize.calibrate.model import BlockModel
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.finetune import train as finetune
from trilobite.quantize.finetune.part import Part
from trilobite.quantize.finetune.store import TunedStore
from trilobite.quantize.finetune.train import Course, make_course, train
from trilobite.quantize.methods.registry import quantize
from trilobite.quantize.plan.plan import Plan, packed_weight
from trilobite.quantize.run import lines as calibrated_lines
from trilobite.quantize.run import work as calibrated_work
from trilobite.quantize.run.compress import prepare
from trilobite.quantize.run.lines import pack_line
from trilobite.quantize.run.options import Options
from trilobite.recipe import LatticeFormat, load_recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_loop, "PASS_TOKENS", 4 * CONTEXT)
    monkeypatch.setattr(finetune, "BATCH", 4)
    monkeypatch.setattr(finetune, "EPOCHS", 2)
    monkeypatch.setattr(finetune, "RATE", 1e-4)  # there are few steps
    monkeypatch.setattr(finetune, "SIGNS_RATE", 1e-3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(words(SAMPLES * CONTEXT))
    return path


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mixtral"
    build_checkpoint("mixtral", path, dtype=torch.bfloat16)
    add_tokenizer(path)
    return path


def tuning(text: Path, mode: str = "block", **settings: Any) -> Calibration:
    return calibration(text, finetune=mode, **settings)


# Gradients


@pytest.mark.parametrize(
    ("transform", "n", "k"), [("hadamard", 12, 32), ("fourier", 10, 24), ("fourier", 7, 8)]
)
def test_gradients_of_the_vectors(transform: str, n: int, k: int) -> None:
    """W is linear in each vector, so a central difference is its derivative up to fp32."""
    generator = torch.Generator().manual_seed(n)
    c, g = (torch.randn(n, k, generator=generator) for _ in range(2))
    vectors = [
        (read_signs(draw_signs(transform, m, i), transform, m).s * 1.3).requires_grad_()
        for i, m in enumerate((k, n))
    ]

    def value() -> Tensor:
        return (unrotated(c, *(Spin(transform=transform, s=s) for s in vectors)) * g).sum()

    value().backward()
    for s in vectors:
        assert s.grad is not None
        for i in range(len(s)):
            with torch.no_grad():
                s[i] += 0.25
                above = value()
                s[i] -= 0.5
                below = value()
                s[i] += 0.25
            assert float(s.grad[i]) == pytest.approx(float(above - below) / 0.5, abs=1e-3)


@pytest.mark.parametrize("transform", ["hadamard", "fourier"])
def test_real_signs_mean_the_same_matrix(transform: str) -> None:
    w = torch.randn(24, 48, generator=torch.Generator().manual_seed(0))
    bits = quantize(w, LatticeFormat(codebook="e8p", bits=2, transform=transform), "rtn")
    real = with_real_signs(bits)
    assert real.signs_in is not None
    assert real.signs_in.numel() == 2 * 48
    difference = (dequantize(real) - dequantize(bits)).norm() / dequantize(bits).norm()
    assert float(difference) <= (0 if transform == "hadamard" else 1e-3)  # phases are rounded to fp16


def packed_block(path: Path, index: int, recipe: str = "quip2-free") -> tuple[BlockModel, Plan, Any]:
    """A loaded block, and what would be stored of each line."""
    source = open_source(str(path))
    plan = prepare(source, load_recipe(recipe), tuned=True)
    model = BlockModel(source, identify(source), CPU)
    known: dict[str, list[Tensor]] = {}

    def read(line: Any) -> list[Tensor]:
        name = line.matrix.name
        if name not in known:
            known[name] = pack_line(source, line, plan.recipe, CPU)[0]
        return known[name]

    ids = torch.randint(3, 250, (2, 16), generator=torch.Generator().manual_seed(1))
    model.load("")
    model.load(model.blocks[0])
    model.learn_arguments(ids)
    model.load(model.blocks[index])
    return model, plan, read


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_part_is_the_packed_block(model_type: str, tmp_path: Path) -> None:
    """Stacked, transposed, interleaved: a part computes with what `put` gives the model."""
    build_checkpoint(model_type, tmp_path)
    model, plan, read = packed_block(tmp_path, 1)
    block = model.blocks[1]
    part = Part(model, block, plan.lines, read)
    assert part.signs
    assert any("norm" in name for name in part.trained)
    found = part.parameters()
    for line in plan.lines:
        place = model.place(line.matrix) if line.format else None
        if place is not None and model.block_of(place) == 1:
            model.put(place, dequantize(packed_weight(line, read(line), CPU)))
    wanted = model.parameters(block)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name].float()) for name in wanted)
    hidden = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(part(hidden), model.run(block, hidden), atol=1e-5)
    sum(x.square().mean() for x in [part(hidden)]).backward()
    silent = [n for n, x in part.trained.items() if x.grad is None or not bool(x.grad.any())]
    assert (
        len(silent) < len(part.trained) / 2
    )  # experts without a token, layers that are called with weights only


def test_gradients_of_a_block(mixtral: Path) -> None:
    """Through rounding, rotation, stacking, attention and routing, along random directions."""
    model, plan, read = packed_block(mixtral, 1)
    part = Part(model, model.blocks[1], plan.lines, read)
    generator = torch.Generator().manual_seed(3)
    hidden, wanted = (torch.randn(2, 16, 64, generator=generator) for _ in range(2))

    def loss() -> Tensor:
        return (part(hidden) * wanted).sum()

    loss().backward()
    # The router is left out: it may send a token elsewhere.
    for name in [
        n for n in part.trained if n.endswith(("q_proj.weight_signs_in", "2.w2.weight_signs_out"))
    ] + [
        "model.layers.1.block_sparse_moe.experts.1.w3.weight_signs_in",
    ]:
        x = part.trained[name]
        assert x.grad is not None
        step = torch.randn(x.shape, generator=generator).sign() / 32  # exact in 16 bit
        with torch.no_grad():
            x.copy_(x.bfloat16().float())
            x += step
            above = float(loss())
            x -= 2 * step
            below = float(loss())
            x += step
        slope = float((x.grad * step).sum())
        assert (above - below) / 2 == pytest.approx(slope, rel=0.05, abs=2e-4), name
        assert abs(slope) > 0.002, name


# Training


def quadratic(x: float) -> tuple[Any, Tensor]:
    leaf = torch.tensor([x], requires_grad=True)
    return SimpleNamespace(trained={"x": leaf}, signs={"x"}), leaf


def test_early_stopping_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training leads past the value that is best on the windows set aside."""
    monkeypatch.setattr(finetune, "EPOCHS", 20)
    monkeypatch.setattr(finetune, "SIGNS_RATE", 0.1)
    part, leaf = quadratic(0.0)
    seen: list[float] = []

    def loss(rows: Tensor) -> Tensor:
        if rows[0] == 2:
            seen.append(float(leaf))
            return (leaf - 0.35).square().sum()
        return (leaf - 5).square().sum()

    course = Course(train=torch.tensor([0]), valid=torch.tensor([2]), batch=1, seed=0)
    record = train([part], loss, course, lambda *_: None)
    nearest = min(seen, key=lambda x: abs(x - 0.35))
    assert float(leaf) == nearest
    assert 0.2 < nearest < 0.5
    assert record["epochs"] == seen.index(nearest)
    assert len(seen) == 1 + record["epochs"] + finetune.PATIENCE
    assert record["after"] < record["before"]


def test_training_that_only_harms_changes_nothing() -> None:
    part, leaf = quadratic(0.5)
    course = Course(train=torch.tensor([0]), valid=torch.tensor([2]), batch=1, seed=0)
    record = train(
        [part], lambda rows: (leaf - 0.5 - (rows[0] == 0) * 1.0).square().sum(), course, lambda *_: None
    )
    assert float(leaf) == 0.5
    assert record == {"before": 0.0, "after": 0.0, "epochs": 0}


def test_rates_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """QuIP# section D: 5e-5, and 5e-4 for sign vectors. Adam's first step is as long as its rate."""
    monkeypatch.undo()  # what `_small_steps` set
    monkeypatch.setattr(finetune, "EPOCHS", 1)
    signs, norm = (torch.zeros(1, requires_grad=True) for _ in range(2))
    part = SimpleNamespace(trained={"signs": signs, "norm": norm}, signs={"signs"})
    course = Course(train=torch.tensor([0]), valid=torch.tensor([2]), batch=1, seed=0)
    train([part], lambda _: (signs - 1).square().sum() + (norm - 1).square().sum(), course, lambda *_: None)
    assert float(signs.detach()) == pytest.approx(5e-4, rel=1e-3)
    assert float(norm.detach()) == pytest.approx(5e-5, rel=1e-3)


def test_every_third_window_is_set_aside() -> None:
    course = make_course(7, 8, 0)
    assert course.train.tolist() == [0, 1, 3, 4, 6]
    assert course.valid.tolist() == [2, 5]
    with pytest.raises(CalibrationError, match="at least 3"):
        make_course(2, 8, 0)


# Whole runs


@pytest.fixture(scope="module")
def finished(mixtral: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run of `full`, and its parts as they were trained: [block 0], [block 1], [all and the outside]."""
    trained: list[list[Part]] = []
    began: list[dict[str, Tensor]] = []
    real = train

    def watched(parts: Any, *args: Any) -> Any:
        began.append({name: value for part in parts for name, value in part.values().items()})
        found = real(parts, *args)
        trained.append(list(parts))
        return found

    with pytest.MonkeyPatch.context() as patch:
        _small_steps.__wrapped__(patch)  # type: ignore[attr-defined]
        patch.setattr(finetune, "train", watched)
        dst = tmp_path_factory.mktemp("finished") / "packed"
        run(mixtral, dst, tuning(text, "full"), "quip2")
        for name, value in (trained[0][0].values() | trained[1][0].values()).items():
            assert torch.equal(began[2][name], value)  # the whole model begins where its blocks ended
    return dst, trained


def test_losses_fall(finished: Any) -> None:
    records = read_report(finished[0])["finetune"]
    assert sorted(records) == ["00000", "00001", "all"]
    assert all(records[part]["after"] < records[part]["before"] for part in ("00000", "00001"))
    assert records["all"]["after"] <= records["all"]["before"]


def test_the_whole_model_learns(mixtral: Path, tmp_path: Path) -> None:
    """With more text than the other tests have time for."""
    (tmp_path / "long.txt").write_text(words(24 * CONTEXT))
    run(mixtral, tmp_path / "dst", tuning(tmp_path / "long.txt", "full", samples=24), "quip2-free")
    record = read_report(tmp_path / "dst")["finetune"]["all"]
    assert record["after"] < record["before"]


def test_the_packed_model_is_the_trained_one(finished: Any) -> None:
    """Bits stored = bits trained: every block of the loaded model gives what its part gave at the end."""
    dst, trained = finished
    packed = trilobite.load(str(dst), dtype=torch.float32)
    parts: list[Part] = trained[-1]
    ids = torch.randint(3, 250, (1, CONTEXT), generator=torch.Generator().manual_seed(5))
    seen: list[tuple[Tensor, Tensor]] = []
    for layer in packed.model.layers:
        layer.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        logits = packed(input_ids=ids, use_cache=False).logits
        for part, (x, y) in zip(parts[:-1], seen, strict=True):
            assert torch.allclose(part(x), y, atol=1e-4)  # rotary angles of a bf16 model are bf16
        model, outside = parts[-1].model, parts[-1]
        model.load("")
        assert torch.allclose(model.logits(ids, seen[-1][1], outside.parameters()), logits, atol=1e-5)
        model.drop("")
    signs = packed.model.layers[0].self_attn.q_proj.weight_signs_in.view(torch.float16)
    assert 0 < float((signs.abs() - 1).abs().max()) < 0.1


def test_blocks_are_tuned_towards_the_original(mixtral: Path, text: Path, finished: Any) -> None:
    """An oracle for the loss: the original block against the packed one, by hooks, on the windows set aside."""
    _, trained = finished
    part = trained[0][0]
    original = trilobite.load(str(mixtral), dtype=torch.float32)
    flat = [int(w[1:]) for w in text.read_text().split()]
    ids = torch.tensor(flat).view(SAMPLES, CONTEXT)
    seen: list[tuple[Tensor, Tensor]] = []
    original.model.layers[0].register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        original(input_ids=ids, use_cache=False)
        x, y = seen[0]
        after = float((part(x[2::3]) - y[2::3]).square().mean() / (y - x).square().mean())
    assert after == pytest.approx(read_report(finished[0])["finetune"]["00000"]["after"], rel=1e-3)


def kill(monkeypatch: pytest.MonkeyPatch, where: type, name: str, after: int) -> None:
    real, count = getattr(where, name), []

    def method(self: Any, *args: Any) -> Any:
        if len(count) >= after:
            raise PlugPulled
        count.append(1)
        return real(self, *args)

    monkeypatch.setattr(where, name, method)


@pytest.mark.parametrize(
    ("where", "name", "after"),
    [
        (PackedWriter, "write", 30),  # in the second block, the first one is tuned
        (TunedStore, "put", 1),  # the second block is quantized, not tuned
        (TunedStore, "put", 2),  # at the end of the whole model's training
    ],
)
def test_resumed_to_the_same_bytes(
    mixtral: Path,
    text: Path,
    finished: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: type,
    name: str,
    after: int,
) -> None:
    dst = tmp_path / "dst"
    with monkeypatch.context() as patch:
        kill(patch, where, name, after)
        with pytest.raises(PlugPulled):
            run(mixtral, dst, tuning(text, "full"), "quip2")
    assert not looks_complete(dst)
    run(mixtral, dst, tuning(text, "full"), "quip2", Options(jobs=2, device="cpu"))
    assert digests(dst) == digests(finished[0])


def test_killed_while_tuned_values_move_to_their_places(
    mixtral: Path, text: Path, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them are in the packed files when the plug is pulled; a damaged file of them is made again."""
    from trilobite.checkpoint import places

    dst, real = tmp_path / "dst", places.write_at
    moving: list[int] = []

    def pwrite(*args: Any) -> None:
        if moving:
            moving.append(1)
            if len(moving) > 20:
                raise PlugPulled
        real(*args)

    def rewrite(self: PackedWriter, tensors: Any, real: Any = PackedWriter.rewrite) -> None:
        moving.append(1)
        real(self, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(places, "write_at", pwrite)
        patch.setattr(PackedWriter, "rewrite", rewrite)
        with pytest.raises(PlugPulled):
            run(mixtral, dst, tuning(text, "full"), "quip2")
    torn = dst / ".partial" / "tuned-all.safetensors"
    torn.write_bytes(torn.read_bytes()[:-7])
    run(mixtral, dst, tuning(text, "full"), "quip2")
    assert digests(dst) == digests(finished[0])


def test_another_tuning_is_another_run(mixtral: Path, text: Path, finished: Any) -> None:
    for mode in ("block", ""):
        with pytest.raises(DestinationError, match=r"finetune|calibration"):
            run(mixtral, finished[0], tuning(text, mode), "quip2")
    assert run(mixtral, finished[0], tuning(text, "full"), "quip2").fresh == 0


def test_off_stores_bits(mixtral: Path, text: Path, tmp_path: Path) -> None:
    run(mixtral, tmp_path / "dst", calibration(text), "quip2")
    report = read_report(tmp_path / "dst")
    assert "finetune" not in report
    assert "finetune" not in report["identity"]["calibration"]
    packed = trilobite.load(str(tmp_path / "dst"))
    assert packed.model.layers[0].self_attn.q_proj.weight_signs_in.numel() == 64 // 8


@pytest.mark.parametrize("propagate", ["original", "quantized"])
def test_without_hessians_and_with_kept_ones(
    mixtral: Path, text: Path, tmp_path: Path, propagate: str
) -> None:
    """Codes that need no data are tuned as well; and behind original blocks, with Hessians that are kept."""
    ground = tuning(text, propagate=propagate)
    run(mixtral, tmp_path / "free", ground, "quip2-free")
    losses = read_report(tmp_path / "free")["finetune"]
    assert all(r["after"] < r["before"] for r in losses.values())
    if propagate == "original":
        kept = tuning(text, propagate=propagate, save=tmp_path / "h")
        run(mixtral, tmp_path / "kept", kept, "quip2")
        run(mixtral, tmp_path / "direct", ground, "quip2")
        assert digests(tmp_path / "kept") == digests(tmp_path / "direct")
        run(mixtral, tmp_path / "taken", tuning(text, propagate=propagate, hessians=tmp_path / "h"), "quip2")
        assert digests(tmp_path / "taken") == digests(tmp_path / "direct")


def test_a_whole_model_that_does_not_fit_is_recomputed(
    mixtral: Path, text: Path, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound codes are decoded and blocks are run again for each gradient: the same numbers."""
    monkeypatch.setattr(finetune, "TRAINING_BYTES", 1 << 40)
    run(mixtral, tmp_path / "dst", tuning(text, "full"), "quip2")
    assert digests(tmp_path / "dst") == digests(finished[0])


# The paper's order


@pytest.fixture(scope="module")
def in_order(mixtral: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of `paper-block`, killed as it had trained block 1: what each training began and ended with, and weights."""
    trained: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    quantized: dict[str, Tensor] = {}
    real, real_pack = train, calibrated_lines.pack_matrix

    def watched(parts: Any, *args: Any) -> Any:
        before = {name: x.detach().clone() for name, x in parts[0].trained.items()}
        found = real(parts, *args)
        trained.append((before, {name: x.detach().clone() for name, x in parts[0].trained.items()}))
        return found

    def packed(w: Tensor, line: Any, *args: Any) -> Any:
        quantized[line.matrix.name] = w.clone()
        return real_pack(w, line, *args)

    with pytest.MonkeyPatch.context() as patch:
        _small_steps.__wrapped__(patch)  # type: ignore[attr-defined]
        patch.setattr(finetune, "train", watched)
        patch.setattr(calibrated_work, "pack_matrix", packed)
        patch.setattr(finetune, "EPOCHS", 1)
        folder = tmp_path_factory.mktemp("in_order")
        ground = tuning(text, "paper-block", samples=3, propagate="original", save=folder / "h")
        with patch.context() as killed:
            kill(killed, TunedStore, "put", 1)
            with pytest.raises(PlugPulled):
                run(mixtral, folder / "dst", ground, "quip2")
        run(mixtral, folder / "dst", ground, "quip2")
    return folder, trained, quantized


def test_in_the_papers_order_later_matrices_are_trained_before_they_are_quantized(
    mixtral: Path, in_order: Any
) -> None:
    """Each training sees the earlier ones quantized, and those that are left in 16 bit, trained so far."""
    folder, trained, quantized = in_order
    steps = len(trained) // 3
    for (_, once), (_, again) in zip(trained[steps : 2 * steps], trained[2 * steps :], strict=True):
        assert all(torch.equal(x, again[name]) for name, x in once.items())
    trained = trained[: 2 * steps]
    source = open_source(str(mixtral))
    original = {m.name: source.read(m.source).float() for m in identify(source) if m.name in quantized}
    attention = [f"self_attn.{p}_proj" for p in "qkvo"]
    order = [*attention, *(f"experts.{{e}}.w{i}" for i in (1, 3, 2))]
    assert len(trained) == 2 * len(order)
    for step, (before, after) in enumerate(trained):
        block, place = divmod(step, len(order))
        for i, form in enumerate(order):
            for name in [n for n in quantized if f"layers.{block}." in n and _is_form(n, form)]:
                vectors = {f"{name}_signs_in", f"{name}_signs_out"}
                if i <= place:
                    assert name not in before
                    assert vectors <= before.keys()
                    continue
                assert not vectors & before.keys()
                assert place or torch.equal(before[name], original[name])
                if i == place + 1:
                    assert torch.equal(after[name], quantized[name])
    changed = [name for name, w in quantized.items() if not torch.equal(w, original[name])]
    assert not any("q_proj" in name for name in changed)
    assert len(changed) > len(quantized) / 2
    assert sorted(read_report(folder / "dst")["finetune"]) == ["00000", "00001"]


def _is_form(name: str, form: str) -> bool:
    return any(name.endswith(f"{form.format(e=e)}.weight") for e in range(8))


def test_what_was_trained_in_the_papers_order_is_what_is_stored(in_order: Any) -> None:
    folder, trained, quantized = in_order
    stored = open_source(str(folder / "dst"))
    last = trained[-1][1]
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(stored.read(f"{name}_signs_in").view(torch.float16), last[f"{name}_signs_in"].half())
    packed = trilobite.load(str(folder / "dst"), dtype=torch.float32)
    for layer in (0, 1):  # codes are those of the trained matrix, not of the source's
        o_proj = packed.model.layers[layer].self_attn.o_proj.packed()
        w = quantized[f"model.layers.{layer}.self_attn.o_proj.weight"]
        assert float((dequantize(o_proj) - w).norm() / w.norm()) < 0.6


# Bad input


def test_bad_input(mixtral: Path, text: Path, tmp_path: Path) -> None:
    cases: list[tuple[Calibration, str, type[TrilobiteError], str]] = [
        (tuning(text, "blocks"), "quip2", CalibrationError, "'blocks'"),
        (tuning(text, samples=2), "quip2", CalibrationError, "at least 3"),
        (Calibration(hessians=tmp_path / "h", finetune="full"), "quip2", CalibrationError, "on a text"),
        (tuning(text, "paper-full"), "quip2", CalibrationError, "--save-hessians"),
        (tuning(text), "gptq3", RecipeError, "quip2"),
        (tuning(text), "milo-s1", RecipeError, "quip2"),
    ]
    for ground, recipe, error, message in cases:
        with pytest.raises(error, match=message) as e:
            run(mixtral, tmp_path / "dst", ground, recipe)
        assert "\n" not in str(e.value)
        assert not (tmp_path / "dst").exists()
    result = CliRunner().invoke(app, ["compress", str(mixtral), "dst", "-r", "quip2", "--finetune", "block"])
    assert result.exit_code == 2
    assert "--calibration" in result.output
