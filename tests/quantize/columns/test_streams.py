"""That scales which move from readers to writers leave the model as it is, for every architecture that is known."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import every_architecture
from support.architectures import TINY_CONFIGS, build_checkpoint
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from trilobite.checkpoint.roles import identify
from trilobite.checkpoint.source import Source, open_source
from trilobite.quantize.columns import streams as streams_module
from trilobite.quantize.columns.rescaling import RescaledWeights
from trilobite.quantize.columns.streams import KNOWN, Stream, find_streams
from trilobite.runtime.load import load

TESTED = [name for name in KNOWN if name in TINY_CONFIGS or name in CONFIG_MAPPING_NAMES]
"""Those that the installed transformers has."""


def build(model_type: str, path: Path, dtype: torch.dtype = torch.bfloat16) -> Source:
    """A tiny random checkpoint; of those that have no configuration of ours in bf16."""
    if model_type in TINY_CONFIGS:
        build_checkpoint(model_type, path, dtype=dtype)
    else:
        every_architecture.build(model_type, path)
    return open_source(str(path))


def powers_of_two(stream: Stream) -> Tensor:
    """Random scales that round nothing."""
    generator = torch.Generator().manual_seed(len(stream.name))
    return torch.exp2(torch.randint(-3, 4, (stream.size,), generator=generator).float())


def rescaled(source: Source, streams: list[Stream], find: Callable[[Stream], Tensor]) -> RescaledWeights:
    return RescaledWeights(source, identify(source), streams, find, "test")


def save(source: Source, weights: RescaledWeights, folder: Path) -> Path:
    """The rescaled checkpoint on disk."""
    folder.mkdir()
    for file in source.path.glob("*.json"):
        if "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    read = {name: source.read(name) for name in source.tensors}
    tensors = {name: weights.apply(name, w).to(w.dtype).contiguous() for name, w in read.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def logits(path: Path) -> Tensor:
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(1))
    found: Tensor = load(str(path))(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [(name, torch.bfloat16) for name in TESTED]
    + [(name, torch.float32) for name in TESTED if name in TINY_CONFIGS],
)
def test_the_model_computes_the_same_bits(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = build(model_type, tmp_path / "original", dtype)
    streams = find_streams(source, identify(source))
    changed = save(source, rescaled(source, streams, powers_of_two), tmp_path / "rescaled")
    assert torch.equal(logits(tmp_path / "original"), logits(changed))


def test_a_norm_that_adds_one_is_told_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why types are listed: names alone would take Qwen3-Next's norms for Qwen3's, and change the model."""
    assert "qwen3_next" not in KNOWN
    monkeypatch.setattr(streams_module, "KNOWN", ("qwen3_next",))
    source = build("qwen3_next", tmp_path / "original")
    streams = find_streams(source, identify(source))
    changed = save(source, rescaled(source, streams, powers_of_two), tmp_path / "rescaled")
    assert not torch.allclose(logits(tmp_path / "original"), logits(changed), atol=1e-2)


@pytest.mark.parametrize("model_type", TESTED)
def test_every_matrix_of_attention_and_mlps_has_scales(model_type: str, tmp_path: Path) -> None:
    source = build(model_type, tmp_path)
    matrices = identify(source)
    read = {p.matrix.name for s in find_streams(source, matrices) for p in s.readers}
    body = ("attention", "expert", "shared_expert", "dense_mlp", "router")
    assert read == {m.name for m in matrices if m.role.value in body and m.quantizable}


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v2", "qwen2_moe"])
def test_every_reader_and_writer_counts(model_type: str, tmp_path: Path) -> None:
    """A stream of the last layer without one of its ports changes the logits: the comparison above can fail."""
    build_checkpoint(model_type, tmp_path / "original")
    source = open_source(str(tmp_path / "original"))
    streams = find_streams(source, identify(source))
    last = max(p.matrix.layer or 0 for s in streams for p in s.readers)
    ends = [s for s in streams if s.readers[0].matrix.layer == last and ".experts.1" not in s.name]
    expected = logits(tmp_path / "original")
    for i, stream in enumerate(ends):
        for side in ("readers", "writers"):
            ports = getattr(stream, side)
            if ports[0].matrix.role.value in ("expert", "norm"):  # one of many experts may have seen no token
                ports = ports[:1]
            for j, port in enumerate(ports):
                spoiled = replace(stream, **{side: tuple(p for p in getattr(stream, side) if p is not port)})
                if not spoiled.readers or not spoiled.writers:
                    continue
                weights = rescaled(source, [spoiled], powers_of_two)
                found = logits(save(source, weights, tmp_path / f"{side}-{i}-{j}"))
                assert not torch.equal(found, expected), (stream.name, port.matrix.name)


def test_what_is_not_known_is_left_alone(tmp_path: Path) -> None:
    """A matrix that no pattern names may read the norm: nothing of its layer is scaled."""
    build_checkpoint("mixtral", tmp_path)
    source = open_source(str(tmp_path))
    matrices = identify(source)
    strange = [
        replace(m, name=m.name.replace("q_proj", "indexer")) if m.layer == 0 and m.projection == "q" else m
        for m in matrices
    ]
    layers = {p.matrix.layer for s in find_streams(source, strange) for p in s.readers}
    assert layers == {1}
    other = replace(source, config=source.config | {"model_type": "gpt_oss"})
    assert find_streams(other, matrices) == []


def test_values_that_are_clamped_are_not_scaled(tmp_path: Path) -> None:
    build_checkpoint("olmoe", tmp_path)
    source = open_source(str(tmp_path))
    clamped = replace(source, config=source.config | {"clip_qkv": 8.0})
    names = [{s.name for s in find_streams(x, identify(x))} for x in (source, clamped)]
    assert {n.rpartition(".")[2] for n in names[0] - names[1]} == {"v_proj"}


def test_scales_are_what_the_norm_can_express(tmp_path: Path) -> None:
    """A bf16 gain rounds; what readers are divided by is the rounded gain over the original."""
    build_checkpoint("mixtral", tmp_path, dtype=torch.bfloat16)
    source = open_source(str(tmp_path))
    (stream,) = [
        s for s in find_streams(source, identify(source)) if s.name == "model.layers.0.input_layernorm"
    ]
    weights = rescaled(source, [stream], lambda s: torch.linspace(0.3, 3, s.size))
    gain = source.read("model.layers.0.input_layernorm.weight")
    written = weights.apply("model.layers.0.input_layernorm.weight", gain)
    assert torch.allclose(written.bfloat16().float(), written, rtol=1e-6)
    assert torch.allclose(weights.scales(stream), torch.linspace(0.3, 3, stream.size), rtol=2**-8)
    name = "model.layers.0.self_attn.q_proj.weight"
    q = source.read(name)
    assert torch.equal(weights.apply(name, q), q.float() / weights.scales(stream))


def test_fused_experts_are_rescaled_in_place(tmp_path: Path) -> None:
    """One tensor that holds all experts of a layer: each part by its own scales."""
    build_checkpoint("qwen3_moe", tmp_path)
    source = open_source(str(tmp_path))
    stacked = {}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            p: [source.read(f"{path}.{e}.{p}_proj.weight") for e in range(4)] for p in ("gate", "up", "down")
        }
        gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        stacked |= {
            f"{path}.gate_up_proj": torch.stack(gate_up),
            f"{path}.down_proj": torch.stack(parts["down"]),
        }
    folder = tmp_path / "fused"
    folder.mkdir()
    rest = {n: source.read(n) for n in source.tensors if ".experts." not in n}
    save_file(rest | stacked, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    fused = open_source(str(folder))
    plain = rescaled(source, find_streams(source, identify(source)), powers_of_two)
    whole = rescaled(fused, find_streams(fused, identify(fused)), powers_of_two)
    path = "model.layers.1.mlp.experts"
    found = whole.apply(f"{path}.gate_up_proj", stacked[f"{path}.gate_up_proj"])
    for p, half in (("gate", slice(0, 96)), ("up", slice(96, None))):
        name = f"{path}.2.{p}_proj.weight"
        assert torch.equal(found[2, half], plain.apply(name, source.read(name)))
