"""Real models on a real GPU, compiled, beside the CPU: `make test-gpu`. Elsewhere all of it is skipped."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.triton_interpreter import available as interpreted
from torch import Tensor
from transformers import PreTrainedModel

import trilobite
from trilobite.evaluate.perplexity import score, tokenize_file
from trilobite.runtime.generate.cache import FixedCache
from trilobite.runtime.generate.text import Sampling, generate
from trilobite.runtime.load import load, load_tokenizer
from trilobite.runtime.modules.residence import OnGpu, PackedModule
from trilobite.runtime.offload.plan import GpuMemory, Offload
from trilobite.runtime.offload.streaming import streaming

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL, TRANSLATOR = EXAMPLES / "tiny-moe", EXAMPLES / "tiny-translator"
RECIPES = ("search3", "milo-s2", "quip3-free", "super3", "int8-experts", "int4")
PROMPT = "The old man looked at the sea and"
GREEDY = Sampling(temperature=0)
DEVICE = "cuda"

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(interpreted(), reason="kernels are interpreted; `make test-gpu` compiles them"),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The folder of an example, compressed; once each."""
    folder = tmp_path_factory.mktemp("packed")

    def made(recipe: str, source: Path = MODEL) -> str:
        target = folder / source.name / recipe
        if not target.exists():
            trilobite.compress(str(source), target, trilobite.load_recipe(recipe))
        return str(target)

    return made


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return tokenize_file(load_tokenizer(str(MODEL)), EXAMPLES / "heldout.txt")[:4096]


def relative_error(found: Tensor, expected: Tensor) -> float:
    expected = expected.float().cpu()
    return float((found.float().cpu() - expected).norm() / expected.norm())


def residences(model: PreTrainedModel) -> set[bool]:
    """Whether packed modules are in the GPU layout."""
    return {isinstance(m.residence, OnGpu) for m in model.modules() if isinstance(m, PackedModule)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_scores_are_those_of_the_cpu(packed: Callable[..., str], ids: Tensor, recipe: str) -> None:
    here, there = load(packed(recipe)), load(packed(recipe), device=DEVICE)
    assert residences(there) == {True}
    scores = score({"cpu": here, "gpu": there}, ids, context=256, batch=8, reference=here)
    assert scores["gpu"].kl is not None
    assert scores["gpu"].kl < 1e-3
    assert scores["gpu"].perplexity == pytest.approx(scores["cpu"].perplexity, rel=2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_come_back_from_a_gpu(packed: Callable[..., str], ids: Tensor, recipe: str) -> None:
    model = load(packed(recipe))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(DEVICE)
    model(ids[None, :64].to(DEVICE))
    found = model.to("cpu").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("recipe", ["search3", "milo-s2", "quip3-free"])
@pytest.mark.parametrize(("slots", "share"), [(None, False), (8, False), (None, True)])
@torch.inference_mode()
def test_streaming_has_the_bits_of_the_whole_model(
    packed: Callable[..., str], ids: Tensor, recipe: str, slots: int | None, share: bool
) -> None:
    """But for the misses that the CPU computes, whose sums are others. slots: experts that RAM holds before the disk."""
    whole = load(packed(recipe), device=DEVICE)
    ram = None if slots is None else Offload(memory=1 << 40, slots=slots)
    model = load(packed(recipe), memory=ram, gpu_memory=GpuMemory(memory=1 << 40, slots=3, share=share))
    found = streaming(model)
    assert found is not None
    assert found.cache is not None
    for tokens in (200, 1):
        x = ids[None, :tokens].to(DEVICE)
        logits, expected = model(x).logits, whole(x).logits
        assert relative_error(logits, expected) < 3e-2 if share else torch.equal(logits, expected)
    assert found.cache.counters.misses > 0
    tokenizer = load_tokenizer(packed(recipe))
    assert generate(model, tokenizer, PROMPT, tokens=12, sampling=GREEDY).tokens == 12
    found.cache.close()


def test_gradients_are_those_of_the_cpu(packed: Callable[..., str], ids: Tensor) -> None:
    gradients = []
    for device in ("cpu", DEVICE):
        model = load(packed("milo-s2"), device=device)
        x = model.get_input_embeddings()(ids[None, :64].to(device)).detach().requires_grad_(True)
        model(inputs_embeds=x).logits.float().logsumexp(-1).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert relative_error(gradients[1], gradients[0]) < 5e-2


@torch.inference_mode()
def test_an_encoder_decoder_computes_what_the_cpu_does(packed: Callable[..., str]) -> None:
    path = packed("milo-s1", TRANSLATOR)
    source = load_tokenizer(path)("Two dogs are running across a field.", return_tensors="pt").input_ids
    logits = []
    for device in ("cpu", DEVICE):
        x = source.to(device)
        logits.append(load(path, device=device)(input_ids=x, decoder_input_ids=x).logits)
    assert relative_error(logits[1], logits[0]) < 3e-2


@pytest.mark.long
def test_a_compiled_step_writes_what_others_write(packed: Callable[..., str]) -> None:
    model, tokenizer = load(packed("search3"), device=DEVICE), load_tokenizer(str(MODEL))
    plain = generate(model, tokenizer, PROMPT, tokens=12, sampling=GREEDY)
    cache = FixedCache(model)
    compiled = generate(model, tokenizer, PROMPT, tokens=12, sampling=GREEDY, cache=cache)
    assert compiled.text == plain.text
