import contextlib
import copy
import json
import mmap
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.architectures import SEQ2SEQ, TINY_CONFIGS, build_checkpoint
from support.packing import stored_layer
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CompileConfig,
    GptOssConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from trilobite.checkpoint.source import open_source
from trilobite.checkpoint.summary import is_packed
from trilobite.errors import ArchitectureError, CheckpointError, FormatVersionError, SettingError, ShapeError
from trilobite.formats.weight import PackedWeight, dequantize
from trilobite.integrations.transformers import TrilobiteConfig
from trilobite.kernels import ops, reference
from trilobite.kernels.cpu import engine
from trilobite.kernels.expert_table import DOWN, expert_weight
from trilobite.models.experts import expert_activation
from trilobite.quantize.methods.quantized import Compensation
from trilobite.quantize.methods.registry import METHODS, quantize
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.lines import quantize_line
from trilobite.quantize.run.options import Options
from trilobite.recipe import Format, Recipe, Role, Rule, load_recipe
from trilobite.runtime.attention import attend_natively
from trilobite.runtime.generate import cache as cache_module
from trilobite.runtime.generate.cache import FixedCache, GrowingCache
from trilobite.runtime.load import load
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.modules.linear import PackedLinear

SERIAL = Options(jobs=1, device="cpu")
COMPILED = ("deepseek", "deepseek_v3", "gpt_oss", "jamba", "mixtral", "phimoe", "qwen2_moe")
"""Each with a router or a cache of its own kind."""
MILO = replace(load_recipe("milo-s1"), name="milo-test", rank="dense-3+sparse-2", iterations=1, cap=False)


class Model:
    """An original tiny checkpoint, its model in fp32, and packed copies by recipe, made once."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.type, self.folder, self.path = model_type, folder, folder / "original"
        build_checkpoint(model_type, self.path, dtype=torch.bfloat16)
        self.auto = AutoModelForSeq2SeqLM if model_type in SEQ2SEQ else AutoModelForCausalLM

    def packed(self, recipe: Recipe) -> Path:
        path = self.folder / recipe.name
        if not path.exists():
            compress(str(self.path), path, recipe, options=SERIAL)
        return path

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Of more tokens than routers multiply by the engine, which `load` alone has them do."""
        ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :36]} if self.type in SEQ2SEQ else {})
        with torch.no_grad():
            return model.eval()(**inputs, use_cache=False).logits

    def from_pretrained(self, path: Path, **settings: object) -> PreTrainedModel:
        """With the attention of `load`: torch's adds up in another order."""
        model = self.auto.from_pretrained(path, dtype=torch.float32, **settings)
        attend_natively(model)
        return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(model_type: str) -> Model:
        if model_type not in made:
            made[model_type] = Model(model_type, tmp_path_factory.mktemp(model_type))
        return made[model_type]

    return get


def keys(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (info.dtype, info.shape) for name, info in open_source(str(path)).tensors.items()}


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten()


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
@pytest.mark.parametrize(
    "recipe", [load_recipe("int8"), MILO, load_recipe("quip2-free")], ids=lambda r: r.name
)
def test_both_ways_of_loading_give_the_same_bits(
    models: Callable[[str], Model], model_type: str, recipe: Recipe
) -> None:
    model = models(model_type)
    path = model.packed(recipe)
    own, plugged = load(str(path), dtype=torch.float32), model.from_pretrained(path)
    logits = model.logits(own)
    assert logits.isfinite().all()
    assert torch.equal(logits, model.logits(plugged))
    packed = [m for m in own.modules() if isinstance(m, PackedLinear | PackedExperts)]
    assert packed
    # Change one bit of each matrix: the comparison sees it.
    for victim in (m for m in packed if isinstance(m, PackedLinear)):
        victim.weight_packed = victim.weight_packed.clone()
        victim.weight_packed[0, 0, 0] ^= 128
    assert not torch.equal(model.logits(own), logits)


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_int8_is_close_to_the_original(models: Callable[[str], Model], model_type: str) -> None:
    """Gate and up swapped, halves not told apart, an expert lost or a bias forgotten would all be far off."""
    model = models(model_type)
    expected = model.logits(model.from_pretrained(model.path))
    found = model.logits(load(str(model.packed(load_recipe("int8"))), dtype=torch.float32))
    errors = token_errors(found, expected)
    # The median: of a random router's tokens a few lie between two experts, and there int8 tips the scale.
    assert float(errors.median()) < 0.03
    assert float(errors.quantile(0.75)) < 0.12


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "granitemoe", "deepseek_v3"])
@pytest.mark.parametrize("fault", ["swap gate and up", "drop an expert", "zero a tile", "swap experts"])
def test_faults_in_experts_are_far_off(models: Callable[[str], Model], model_type: str, fault: str) -> None:
    """The measure of the test above sees what it has to see."""
    model = models(model_type)
    expected = model.logits(model.from_pretrained(model.path))
    broken = load(str(model.packed(load_recipe("int8"))), dtype=torch.float32)
    for module in broken.modules():
        if not isinstance(module, PackedExperts):
            continue
        home = module.residence
        if fault == "swap gate and up":
            home.table = home.table[:, [1, 0, 2]]
        elif fault == "swap experts":
            home.table = home.table.roll(1, 0)
        else:
            w = expert_weight(home.slab, home.table[0, DOWN], (module.hidden_size, module.intermediate_size))
            lost = w.packed if fault == "drop an expert" else w.packed[:, :1]
            # A private mapping: the file stays as it is.
            lost.zero_()
    errors = token_errors(model.logits(broken), expected)
    # One expert of four, two of which are active, or a third of its input: many tokens, not all.
    assert float(errors.quantile(0.75)) > (0.05 if fault == "zero a tile" else 0.12)


@pytest.mark.parametrize("model_type", COMPILED)
def test_the_decoding_step_compiles(
    models: Callable[[str], Model], model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `generate` of transformers does it on a GPU: in whole graphs, none of them made for later texts."""
    model = models(model_type)
    loaded = load(str(model.packed(load_recipe("int8"))), dtype=torch.float32)
    prompts = [torch.arange(5, 25)[None], torch.arange(40, 70)[None]]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = [loaded.generate(ids, **settings) for ids in prompts]
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    how = CompileConfig(backend=backend, mode=None, fullgraph=True)
    how._compile_all_devices = True
    loaded.generation_config.compile_config = how
    cache = FixedCache(loaded)
    past = cache.ready(prompts[0], 36, 256)
    assert cache.length == 256
    assert graphs
    made = len(graphs)
    for ids, text in zip(prompts, expected, strict=True):
        assert cache.ready(ids, 36, 256) is past
        assert torch.equal(loaded.generate(ids, past_key_values=past, **settings), text)
    # gpt-oss counts the tokens of its sliding windows as Python numbers: once more, for any number.
    assert len(graphs) <= made + (model_type == "gpt_oss")
    torch.compiler.reset()


@pytest.mark.parametrize("model_type", sorted(set(TINY_CONFIGS) - set(SEQ2SEQ)))
def test_a_conversation_is_read_once(models: Callable[[str], Model], model_type: str) -> None:
    """The text after a remembered beginning is the text after all of it."""
    loaded = load(str(models(model_type).packed(load_recipe("int8"))), dtype=torch.float32)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cache = GrowingCache(loaded)
    ids, remembered = torch.arange(5, 25)[None], []
    for cut in (0, 2, 9, 1000, 0):  # tokens of the text that the next turn changes
        past = cache.ready(ids, 200, 256)
        remembered.append(int(past.get_seq_length()))
        made = loaded.generate(ids, past_key_values=past, **settings)
        assert torch.equal(made, loaded.generate(ids, **settings)), remembered
        cache.keep(past, made)
        ids = torch.cat([made[:, : max(0, made.shape[1] - cut)], torch.arange(60, 67)[None]], 1)
    forgets = model_type in (
        "gpt_oss",
        "jamba",
    )  # sliding windows, recurrent states: what was read is never unread
    assert remembered == ([0, 25, 0, 0, 0] if forgets else [0, 25, 37, 41, 0])


def test_a_text_broken_off_is_not_remembered(models: Callable[[str], Model]) -> None:
    loaded = load(str(models("mixtral").packed(load_recipe("int8"))))
    cache, ids = GrowingCache(loaded), torch.arange(5, 25)[None]
    past = cache.ready(ids, 40, None)
    cache.keep(past, loaded.generate(ids, past_key_values=past, max_new_tokens=2))
    past = cache.ready(ids, 40, None)
    assert past.get_seq_length() == 19
    cache.keep(past, ids)
    ids = torch.cat([ids[:, :3], torch.tensor([[99]]), ids[:, 4:]], 1)
    assert cache.ready(ids, 40, None).get_seq_length() == 3
    assert cache.ready(ids, 40, None).get_seq_length() == 0  # what came after `ready` was not kept


def test_a_fixed_cache_grows_by_powers_of_two(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(str(models("mixtral").packed(load_recipe("int8"))))
    monkeypatch.setattr(cache_module, "SHORTEST", 16)
    cache = FixedCache(loaded)
    lengths = []
    for length in (5, 16, 17, 9, 60, 200):
        past = cache.ready(torch.zeros((1, 5), dtype=torch.long), length, 200)
        assert past.get_max_length() == cache.length
        assert int(past.get_seq_length()) == 0
        lengths.append(cache.length)
    assert lengths == [16, 16, 32, 32, 64, 200]


def test_encoder_decoders_are_not_compiled(models: Callable[[str], Model]) -> None:
    loaded = load(str(models("switch_transformers").packed(load_recipe("int8"))))
    with pytest.raises(ArchitectureError, match="without --compile"):
        FixedCache(loaded)


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_save_pretrained_round_trip(models: Callable[[str], Model], model_type: str, tmp_path: Path) -> None:
    model = models(model_type)
    path = model.packed(MILO)
    loaded = model.from_pretrained(path)
    loaded.save_pretrained(tmp_path / "saved")
    assert {n: shape for n, (_, shape) in keys(tmp_path / "saved").items()} == {
        n: s for n, (_, s) in keys(path).items()
    }
    assert torch.equal(model.logits(model.from_pretrained(tmp_path / "saved")), model.logits(loaded))


@pytest.mark.parametrize(
    ("model_type", "recipe"),
    [*((name, "rtn3") for name in TINY_CONFIGS), *((name, "quip2-free") for name in ("gpt_oss", *SEQ2SEQ))],
)
def test_quantize_on_load_is_compress(models: Callable[[str], Model], model_type: str, recipe: str) -> None:
    model = models(model_type)
    expected = model.logits(load(str(model.packed(load_recipe(recipe))), dtype=torch.float32))
    loaded = model.from_pretrained(model.path, quantization_config=TrilobiteConfig(recipe))
    assert torch.equal(model.logits(loaded), expected)


def test_quantize_on_load_with_compensators_and_save(models: Callable[[str], Model], tmp_path: Path) -> None:
    model = models("qwen3_moe")
    path = model.packed(MILO)
    loaded = model.from_pretrained(model.path, quantization_config=TrilobiteConfig(MILO.to_dict()))
    loaded.save_pretrained(tmp_path / "saved")
    assert keys(tmp_path / "saved").keys() == keys(path).keys()
    again = load(str(tmp_path / "saved"), dtype=torch.float32)
    assert torch.equal(model.logits(again), model.logits(load(str(path), dtype=torch.float32)))


def test_quantize_on_load_gives_a_matrix_one_thread(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over shared cores round in another order: bytes would depend on the machine."""
    seen = set()

    def spy(*args: object) -> object:
        seen.add(torch.get_num_threads())
        return quantize_line(*args)

    monkeypatch.setattr("trilobite.integrations.transformers.quantize_line", spy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = models("qwen3_moe")
        model.from_pretrained(model.path, quantization_config=TrilobiteConfig("rtn3"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_a_rule_for_everything_makes_what_can_be_loaded(
    models: Callable[[str], Model], model_type: str
) -> None:
    model = models(model_type)
    recipe = Recipe(name="int8-all", rules=(Rule(format=Format(bits=8, group=32)),))
    loaded = load(str(model.packed(recipe)), dtype=torch.float32)
    assert any(isinstance(m, PackedLinear | PackedExperts) for m in loaded.modules())
    assert bool(torch.isfinite(model.logits(loaded)).all())


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "qwen3_moe", "deepseek"])
@pytest.mark.parametrize("role", [Role.EXPERT, Role.ATTENTION])
def test_kept_roles_stay_16_bit(models: Callable[[str], Model], model_type: str, role: Role) -> None:
    model = models(model_type)
    recipe = replace(load_recipe("int8").keeping((role,)), name=f"int8-keep-{role.value}")
    own = load(str(model.packed(recipe)), dtype=torch.float32)
    kinds = {type(m) for m in own.modules()}
    assert (PackedExperts in kinds) == (role is not Role.EXPERT)
    assert PackedLinear in kinds
    expected = model.logits(model.from_pretrained(model.path))
    assert float(token_errors(model.logits(own), expected).median()) < 0.03
    assert torch.equal(model.logits(own), model.logits(model.from_pretrained(model.packed(recipe))))


def test_original_checkpoints_load_too(models: Callable[[str], Model]) -> None:
    model = models("mixtral")
    assert not is_packed(model.path)
    assert is_packed(model.packed(MILO))
    assert torch.equal(
        model.logits(load(str(model.path), dtype=torch.float32)),
        model.logits(model.from_pretrained(model.path)),
    )


def test_packed_models_generate(models: Callable[[str], Model]) -> None:
    model = models("mixtral")
    packed = load(str(model.packed(load_recipe("int8"))), dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    cached = packed.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    step = ids
    for _ in range(cached.shape[1] - 3):
        with torch.no_grad():
            step = torch.cat((step, packed(input_ids=step).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(cached, step)


@pytest.mark.skipif(not engine.available(), reason="the native library is not installed")
def test_each_model_has_settings_of_its_own(models: Callable[[str], Model]) -> None:
    model = models("mixtral")
    path = str(model.packed(MILO))
    exact, rough = load(path), load(path, activations="int8", threads=1)
    first, second = model.logits(exact), model.logits(rough)
    assert not torch.equal(first, second)
    assert torch.equal(model.logits(load(path)), first)
    assert torch.equal(model.logits(exact), first)
    assert torch.equal(model.logits(copy.deepcopy(rough)), second)
    with pytest.raises(SettingError, match="'fast': expected one of exact, int8"):
        load(path, activations="fast")


def test_tensors_are_views_of_the_file(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stacking copies: the experts of a layer lie in one slab, which is a stretch of the mapping."""
    mapped: list[mmap.mmap] = []
    monkeypatch.setattr("trilobite.runtime.mapped.prefer_huge_pages", mapped.append)
    packed = load(str(models("mixtral").packed(MILO)))
    (file,) = (np.frombuffer(pages, dtype=np.uint8) for pages in mapped)
    experts = [m for m in packed.modules() if isinstance(m, PackedExperts)]
    linear = next(m for m in packed.modules() if isinstance(m, PackedLinear))
    assert len(experts) == 2
    for tensor in (*(m.residence.slab for m in experts), linear.weight_packed):
        assert 0 <= tensor.data_ptr() - file.ctypes.data <= file.nbytes - tensor.nbytes


def test_transformers_is_not_given_the_experts(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader takes a fraction of a millisecond for each tensor, of which 128 experts a layer have thousands."""
    given: list[str] = []

    class Kind:
        @staticmethod
        def from_pretrained(name: None, *, state_dict: dict[str, Tensor], **settings: object) -> object:
            given.extend(state_dict)
            return MixtralForCausalLM.from_pretrained(name, state_dict=state_dict, **settings)

    monkeypatch.setattr("trilobite.runtime.load.model_class", lambda *_: Kind)
    path = models("mixtral").packed(MILO)
    found = load(str(path)).state_dict()
    stored = open_source(str(path)).tensors
    assert len(found) == len(stored)
    assert not any("experts" in name for name in given)
    assert len(given) == sum("experts" not in name for name in stored)


# Files that are not what they should be.


@pytest.fixture
def broken(models: Callable[[str], Model], tmp_path: Path) -> Path:
    """A packed checkpoint that a test may spoil."""
    return Path(shutil.copytree(models("mixtral").packed(MILO), tmp_path / "packed"))


@contextlib.contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    with pytest.raises(kind) as e:
        yield
    for part in parts:
        assert part in str(e.value)


def rewrite(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Edit the tensors of a packed checkpoint in a consistent file: only our own checks can notice."""
    file = path / "model-00001-of-00001.safetensors"
    with safe_open(file, "pt") as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
    weight_map = dict.fromkeys(tensors, file.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


Q = "model.layers.0.self_attn.q_proj.weight"
W1 = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize("way", ["load", "from_pretrained"])
@pytest.mark.parametrize("name", [f"{Q}_lra", f"{W1}_lrb"])
def test_a_missing_compensator_factor(broken: Path, way: str, name: str) -> None:
    rewrite(broken, lambda t: t.pop(name))
    with refused(ShapeError, "compensator factor is missing"):
        load(str(broken)) if way == "load" else AutoModelForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("way", ["load", "from_pretrained"])
def test_a_missing_expert(broken: Path, way: str) -> None:
    rewrite(broken, lambda t: [t.pop(n) for n in list(t) if ".layers.1.block_sparse_moe.experts.2." in n])
    with refused(ArchitectureError, "3 of 4 experts"):
        load(str(broken)) if way == "load" else AutoModelForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("way", ["load", "from_pretrained"])
@pytest.mark.parametrize("name", [f"{Q}_packed", f"{W1}_packed"])
def test_missing_codes(broken: Path, way: str, name: str) -> None:
    rewrite(broken, lambda t: t.pop(name))
    with refused(CheckpointError, "weight_packed is missing"):
        load(str(broken)) if way == "load" else AutoModelForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("way", ["load", "from_pretrained"])
@pytest.mark.parametrize(("matrix", "part"), [("w1", "gate"), ("w2", "down"), ("w3", "up")])
def test_a_missing_matrix_of_an_expert(broken: Path, way: str, matrix: str, part: str) -> None:
    """Not an expert without a gate."""
    rewrite(
        broken,
        lambda t: [t.pop(n) for n in list(t) if f".layers.1.block_sparse_moe.experts.2.{matrix}." in n],
    )
    with refused(CheckpointError, f"expert 2 has no packed {part}"):
        load(str(broken)) if way == "load" else AutoModelForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("name", [Q, W1])
def test_parts_of_a_wrong_shape(broken: Path, name: str) -> None:
    rewrite(broken, lambda t: t.update({f"{name}_packed": t[f"{name}_packed"][:-1].clone()}))
    with refused(ShapeError, name.removesuffix(".weight").split("experts")[-1].rsplit(".", 1)[-1]):
        load(str(broken))


def test_an_index_that_names_more_than_the_files_hold(broken: Path) -> None:
    """How a lost `weight_scale` is noticed: see test_weight.py."""
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    index["weight_map"][f"{Q}_scale"] = "model-00001-of-00001.safetensors"
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(CheckpointError, f"{Q}_scale", "missing"):
        load(str(broken))


@pytest.mark.parametrize("way", ["load", "from_pretrained"])
def test_a_truncated_file(broken: Path, way: str) -> None:
    file = broken / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-118])
    if way == "load":
        with refused(CheckpointError, file.name, "118 bytes shorter than its header says"):
            load(str(broken))
    else:
        with pytest.raises(Exception, match=r"(?i)incomplete|shorter|invalid"):
            AutoModelForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("way", ["load", "from_pretrained"])
@pytest.mark.parametrize("version", [3, "1", None])
def test_another_format_version(broken: Path, way: str, version: object) -> None:
    for name in ("config.json", "trilobite.json"):
        data = json.loads((broken / name).read_text())
        (data["quantization_config"] if name == "config.json" else data)["format_version"] = version
        (broken / name).write_text(json.dumps(data))
    with refused(FormatVersionError, repr(version), "reads version 1"):
        load(str(broken)) if way == "load" else AutoModelForCausalLM.from_pretrained(broken)


def test_an_unfinished_run_does_not_load(broken: Path) -> None:
    (broken / "config.json").unlink()
    with refused(CheckpointError, "config.json"):
        load(str(broken))


# The operators behind the modules.


def experts(fmt: str = "int3-g32", *, count: int = 5, rank: int = 0, gated: bool = True) -> list[tuple]:
    """(gate, up, down) packed weights of `count` experts with H = 64, I = 96."""
    generator, found = torch.Generator().manual_seed(0), []

    def matrix(n: int, k: int) -> PackedWeight:
        w = torch.randn(n, k, generator=generator) * 0.1
        if rank:
            return METHODS["rtn"](
                w, Format.parse(fmt), compensation=Compensation(rank=rank, iterations=1)
            ).weight
        return quantize(w, Format.parse(fmt), "rtn")

    for _ in range(count):
        found.append((matrix(96, 64) if gated else None, matrix(96, 64), matrix(64, 96)))
    return found


def slow(x: Tensor, index: Tensor, weights: Tensor, packed: list[tuple]) -> Tensor:
    """Token by token, in float64; an index of E or more is no expert."""
    dense = [[None if w is None else dequantize(w).double() for w in e] for e in packed]
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for a in range(index.shape[1]):
            if int(index[t, a]) < len(dense):
                gate, up, down = dense[int(index[t, a])]
                row = x[t].double()
                h = silu(up @ row) if gate is None else silu(gate @ row) * (up @ row)
                y[t] += weights[t, a].double() * (down @ h)
    return y


def run(x: Tensor, index: Tensor, weights: Tensor, packed: list[tuple], *, oracle: bool = False) -> Tensor:
    """The operator as this machine runs it, or the reference."""
    return (reference if oracle else ops).experts(x, index, weights, stored_layer(packed))


def inputs(tokens: int, *, high: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 64, generator=generator)
    index = torch.randint(0, high, (tokens, 2), generator=generator)
    return x, index, torch.rand(tokens, 2, generator=generator)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Sums of 96 products in float32, or one rounding to a 16-bit output."""
    return float((found.double() - expected).abs().max()) <= tolerance * float(
        expected.abs().max().clamp_min(1e-9)
    )


@pytest.mark.parametrize("tokens", [1, 2, 63])
@pytest.mark.parametrize(
    "fmt", ["int2-g32", "int3-g32", "int4-channel-sym", "int8-g32", "int3-g32-dq", "int3-g16-super"]
)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("oracle", [True, False], ids=["reference", "operator"])
def test_experts_against_the_slow_loop(tokens: int, fmt: str, rank: int, oracle: bool) -> None:
    packed = experts(fmt, rank=rank)
    x, index, weights = inputs(tokens)
    assert close(run(x, index, weights, packed, oracle=oracle), slow(x, index, weights, packed))


@pytest.mark.parametrize("oracle", [True, False], ids=["reference", "operator"])
@pytest.mark.parametrize(
    "index", [[[0, 1]], [[3, 3]], [[5, 2]], [[3, 3], [1, 2]], [[0, 0], [0, 0]], [[5, 5], [4, 0]]]
)
def test_few_tokens(index: list[list[int]], oracle: bool) -> None:
    """One token, an expert twice, no expert: the shapes of generation, where kernels take short cuts."""
    packed, (x, _, weights) = experts(), inputs(len(index))
    chosen = torch.tensor(index)
    assert close(run(x, chosen, weights, packed, oracle=oracle), slow(x, chosen, weights, packed))


def test_no_expert_at_all_and_the_sentinel() -> None:
    packed = experts()
    x, index, weights = inputs(20, high=6)
    assert (index == 5).any()
    assert close(run(x, index, weights, packed), slow(x, index, weights, packed))
    assert (run(x, torch.full_like(index, 5), weights, packed) == 0).all()
    assert (run(x, torch.full_like(index, 7), weights, packed) == 0).all()


def test_no_tokens() -> None:
    x, index, weights = inputs(0)
    assert run(x, index, weights, experts()).shape == (0, 64)


def test_all_tokens_on_one_expert_and_twice_the_same() -> None:
    packed = experts()
    x, index, weights = inputs(17)
    for e in (0, 4):
        same = torch.full_like(index, e)
        assert close(run(x, same, weights, packed), slow(x, same, weights, packed))


def test_experts_without_a_gate() -> None:
    packed = experts(gated=False)
    x, index, weights = inputs(9)
    assert close(run(x, index, weights, packed), slow(x, index, weights, packed))


def test_experts_of_different_formats_and_ranks() -> None:
    packed = [
        *experts("int3-g32", count=2),
        *experts("int4-g32-dq", count=1),
        *experts("int2-g32", count=2, rank=4),
    ]
    x, index, weights = inputs(30)
    assert close(run(x, index, weights, packed), slow(x, index, weights, packed))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
def test_experts_in_16_bit(dtype: torch.dtype, tolerance: float) -> None:
    packed = experts(rank=2)
    x, index, weights = inputs(33)
    x, weights = x.to(dtype), weights.to(dtype)
    found = run(x, index, weights, packed)
    assert found.dtype == dtype
    assert close(found, slow(x, index, weights, packed), tolerance)


@pytest.mark.parametrize("fault", ["flip a bit", "zero a tile", "drop an expert", "swap gate and up"])
def test_the_slow_loop_notices(fault: str) -> None:
    packed = experts()
    x, index, weights = inputs(63)
    expected = slow(x, index, weights, packed)
    gate, up, down = packed[2]
    if fault == "swap gate and up":
        packed[2] = (up, gate, down)
    else:
        codes = down.packed.clone()
        if fault == "flip a bit":
            codes[1, 1, 3] ^= 4
        elif fault == "zero a tile":
            codes[1, 1] = 0
        else:
            codes[:] = 0
        packed[2] = (gate, up, replace(down, packed=codes))
    assert not close(run(x, index, weights, packed), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, index, weights = inputs(4)
    for bad in ((x[0], index, weights), (x, index[:3], weights), (x, index, weights[:, :1])):
        with pytest.raises(ShapeError):
            run(*bad, experts())


def test_a_slab_that_is_too_short_is_refused() -> None:
    layer = stored_layer(experts())
    x, index, weights = inputs(40)
    with pytest.raises(ShapeError, match="does not fit a slab"):
        ops.experts(x, index, weights, replace(layer, slab=layer.slab[:-64].clone()))


def test_slab_of_neighbours_is_a_view() -> None:
    """Parts in one storage are not copied; scattered ones are, once."""
    first = stored_layer(experts(rank=2))
    again = [
        tuple(
            expert_weight(first.slab, first.table[e, p], s)
            for p, s in enumerate(((96, 64), (96, 64), (64, 96)))
        )
        for e in range(5)
    ]
    second = stored_layer(again)
    assert second.slab.untyped_storage().data_ptr() == first.slab.untyped_storage().data_ptr()
    x, index, weights = inputs(8)
    one, two = (ops.experts(x, index, weights, layer) for layer in (first, second))
    assert torch.equal(one, two)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 3, 64)])
@pytest.mark.parametrize("fmt", ["int3-g32", "int2-g64-dq", "int8-channel-sym"])
@pytest.mark.parametrize("rank", [0, 1])
def test_linear(shape: tuple[int, ...], fmt: str, rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w, bias = torch.randn(37, 64, generator=generator), torch.randn(37, generator=generator)
    packed = (
        METHODS["rtn"](w, Format.parse(fmt), compensation=Compensation(rank=1)).weight
        if rank
        else quantize(w, Format.parse(fmt), "rtn")
    )
    x = torch.randn(shape, generator=generator)
    expected = x.double() @ dequantize(packed).double().T + bias.double()
    found = ops.linear(x, packed, bias)
    assert found.shape == (*shape[:-1], 37)
    assert found.numel() == 0 or close(found, expected)
    without = ops.linear(x, packed)
    assert found.numel() == 0 or close(without, expected - bias.double())


def test_linear_refuses_another_k() -> None:
    w = quantize(torch.ones(16, 64), Format(bits=3, group=64), "rtn")
    with pytest.raises(ShapeError):
        ops.linear(torch.ones(2, 96), w)


class FakeExperts(nn.Module):
    """The least that PackedExperts asks of an experts module."""

    def __init__(self, *, interleaved: bool, transposed: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(3, 64, 192) if transposed else torch.empty(3, 192, 64))
        self.down_proj = nn.Parameter(torch.empty(3, 96, 64) if transposed else torch.empty(3, 64, 96))
        self.is_transposed, self.is_concatenated = transposed, not interleaved
        self.act_fn = ACT2FN["silu"]
        self.config = SimpleNamespace(hidden_act="silu")

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate.sin() * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError


def test_an_activation_that_we_do_not_know_is_refused() -> None:
    """A gate of its own must not silently become silu(gate) * up."""
    original = FakeExperts(interleaved=False, transposed=False)
    with refused(ArchitectureError, "FakeExperts", "--keep expert"):
        PackedExperts(original, {e: {} for e in range(3)})


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changed", [{"swiglu_alpha": 1.5}, {"swiglu_limit": 10.0}], ids=str)
def test_a_gpt_oss_gate_keeps_its_own_constants(changed: dict[str, float], dtype: torch.dtype) -> None:
    """Also while a model of bfloat16 is built, whose dtype is the default then."""
    config = GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=3, **changed)
    with torch.device("meta"):
        original = GptOssExperts(config)
    alpha, limit = changed.get("swiglu_alpha", 1.702), changed.get("swiglu_limit", 7.0)
    with default_dtype(dtype):
        assert expert_activation(original) == f"gpt_oss:{alpha}:{limit}"


def test_missing_experts_are_counted() -> None:
    class Plain(FakeExperts):
        _apply_gate = None  # type: ignore[assignment]

    with refused(ArchitectureError, "2 of 3 experts"):
        PackedExperts(Plain(interleaved=False, transposed=False), {0: {}, 2: {}})
