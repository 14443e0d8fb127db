"""Steps of decoding that are replayed have the bits of the model's own, whatever happens between them."""

import copy
import io
import itertools
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from support.steps import assert_same, conversation, feed, plain, step_of, tokens
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from trilobite.kernels import ops
from trilobite.kernels.cpu.step import Kind, has_curve, softmax_lanes
from trilobite.kernels.layer import CpuSettings
from trilobite.kernels.ops import attends
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.cache_name import CACHE
from trilobite.runtime.generate.cache import GrowingCache
from trilobite.runtime.load import load
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.swap import configure
from trilobite.runtime.offload.plan import Offload
from trilobite.runtime.step import lower, small, step_list
from trilobite.runtime.step import texts as steps_of_texts
from trilobite.runtime.step.step_list import COMPARED, RECORDED, WAITS
from trilobite.runtime.step.trace import Node

pytestmark = pytest.mark.skipif(not attends(torch.zeros(1, 16)), reason="the native library is not installed")

LATENT = ("deepseek_v2", "deepseek_v3")
REPLAYED = ("mixtral", "deepseek", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "gpt_oss", *LATENT)
STEPS = 32
Model = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            build_checkpoint(kind, folder / "original", dtype=torch.bfloat16)
            if kind in REPLAYED:
                compress(str(folder / "original"), folder / "packed", load_recipe("rtn3"))
            made[kind] = folder / "packed"
        return made[kind]

    return of


@pytest.mark.parametrize("kind", REPLAYED)
def test_bits_of_every_architecture(kind: str, packed: Callable[[str], Path]) -> None:
    model = load(str(packed(kind)))
    ours = conversation(model)
    step = step_of(model)
    assert step.why is None
    assert step.ready is not None
    assert step.compared == COMPARED
    assert_same(ours, conversation(plain(model)))


def test_what_a_step_returns(packed: Callable[[str], Path]) -> None:
    """An output like any that its class makes."""
    model = load(str(packed("mixtral")))
    _, cache = conversation(model, turns=1)
    assert step_of(model).compared == COMPARED
    with torch.inference_mode():
        found = model(input_ids=tokens(1)[None], past_key_values=cache, use_cache=True)
    made = type(found)(logits=found.logits, **{CACHE: cache})
    assert vars(found) == vars(made)
    assert list(found.items()) == list(made.items())
    assert found[0] is found["logits"] is found.logits
    assert found.to_tuple() == made.to_tuple()
    assert found.loss is None


@pytest.mark.parametrize(("kind", "texts"), [("mixtral", 1), ("mixtral", 3), ("granitemoe", 1)])
def test_logits_of_each_step_are_their_own(
    kind: str, texts: int, packed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine writes them where they stay: a step leaves those of the one before as they were."""
    model = load(str(packed(kind)))
    monkeypatch.setattr(steps_of_texts, "WORTH", 0)
    ids = tokens(texts)[:, None]
    kept, cache = [], DynamicCache(config=model.config)
    with torch.inference_mode():
        for _ in range(RECORDED + COMPARED + 4):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            kept.append((logits, logits.clone()))
    step = step_of(model) if texts == 1 else step_of(model).others.steps[texts]
    assert step.right
    assert step.ready is not None
    assert step.ready.last is not None
    assert len({logits.data_ptr() for logits, _ in kept}) == len(kept)
    assert all(torch.equal(logits, then) for logits, then in kept)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_q_k_and_v_are_one_call(
    kind: str, packed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a norm stands between them."""
    model, lists, program = load(str(packed(kind))), [], ops.step.program
    monkeypatch.setattr(ops.step, "program", lambda nodes: (lists.append(list(nodes)), program(nodes))[1])
    conversation(model, turns=1, steps=4)
    runs = [
        len(list(run))
        for nodes in lists
        for (kind_of_node, _), run in itertools.groupby(nodes, lambda n: (n.kind, n.a.data))
        if kind_of_node == Kind.LINEAR
    ]
    layers = model.config.num_hidden_layers
    assert sorted(runs) == [1] * (layers + 1) + [3] * layers  # o_proj and the head; q, k and v


@pytest.mark.skipif(softmax_lanes() is None, reason="torch's softmax has bits that the library does not know")
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"])
def test_a_step_is_few_calls(kind: str, packed: Callable[[str], Path]) -> None:
    """Between two layers there is nothing of Python: cosines and sines are torch's, all else is the engine's."""
    model = load(str(packed(kind)))
    conversation(model, turns=1)
    ready = step_of(model).ready
    assert ready is not None
    assert len(ready.steps) <= 5


@pytest.mark.skipif(
    not has_curve(Kind.LOGISTIC, torch.float32),
    reason="torch's sigmoid has bits that the library does not know",
)
@pytest.mark.parametrize(
    ("kind", "groups"),
    [("deepseek_v3", {"n_group": 8, "topk_group": 4, "q_lora_rank": 64}), ("glm4_moe", {})],
)
def test_routers_in_groups_are_the_engines(kind: str, groups: dict[str, int], tmp_path: Path) -> None:
    """Sigmoids, the best groups and their masks, and the weights of those chosen, of as many experts as fill vectors."""
    changes = {"n_routed_experts": 64, "intermediate_size": 128, **groups}
    build_checkpoint(kind, tmp_path / "original", dtype=torch.bfloat16, changes=changes)
    compress(str(tmp_path / "original"), tmp_path / "packed", load_recipe("rtn3"))
    model = load(str(tmp_path / "packed"))
    ours = conversation(model)
    ready = step_of(model).ready
    assert ready is not None
    assert len(ready.steps) <= 5
    assert_same(ours, conversation(plain(model)))


def test_what_is_written_meanwhile_is_read_in_order() -> None:
    """A matrix stays behind what changes the tensor that it reads."""
    x, y = torch.zeros(1, 4), torch.zeros(1, 4)
    matrix = PackedLinear.__new__(PackedLinear)

    def reads(t: Tensor) -> Node:
        return Node(kind="module", what=matrix, args=(t,), kwargs={}, outputs=(torch.zeros(1, 4),))

    def adds(to: Tensor) -> Node:
        return Node(kind="torch", what=torch.ops.aten.add_.Tensor, args=(to, 1), kwargs={}, outputs=(to,))

    first, of_y, second, late, later = reads(x), reads(y), reads(x), reads(x), reads(x[:])
    change, other = adds(x), adds(y)
    nodes = [first, of_y, other, second, change, late, later]
    assert lower.side_by_side(nodes) == [first, second, of_y, other, change, late, later]


def test_a_sliding_window(packed: Callable[[str], Path]) -> None:
    model = load(str(packed("mixtral")))
    model.config.sliding_window = 16
    ours = conversation(model, steps=40)
    assert step_of(model).ready is not None
    assert ours[1].layers[0].keys.shape[2] == 15
    assert_same(ours, conversation(plain(model), steps=40))


def with_torchs_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def with_keys_made_of_latents(model: PreTrainedModel) -> None:
    for module in model.modules():
        module.__dict__.pop("expand_kv", None)


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("mixtral", with_torchs_attention, "its attention is 'eager', not the engine's"),
        (
            "deepseek_v2",
            with_keys_made_of_latents,
            "it attends to more, or less, than what the cache holds",
        ),
    ],
)
def test_what_cannot_be_a_list_says_why(
    kind: str,
    change: Callable[[PreTrainedModel], None],
    why: str,
    packed: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line of the log says what is in the way."""
    model = load(str(packed(kind).parent / "original"))
    change(model)
    with caplog.at_level(logging.INFO):
        ours = conversation(model, turns=2, steps=4)
    step = step_of(model)
    assert step.ready is None
    assert step.why == why
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("trilobite.runtime.step")]
    assert lines == [f"{type(model).__name__}: steps run as transformers runs them: {why}"]
    assert_same(ours, conversation(plain(model), turns=2, steps=4))


@pytest.mark.parametrize("kind", LATENT)
def test_latents_lie_side_by_side(kind: str, packed: Callable[[str], Path]) -> None:
    """A step makes neither keys nor values, and the cache shows latents and rotated keys as transformers has them."""
    model = load(str(packed(kind)))
    _, cache = conversation(model, turns=1, steps=8)
    ready = step_of(model).ready
    assert ready is not None
    for i, layer in enumerate(cache.layers):
        rows = ready.rows[i]
        assert rows.joined
        assert layer.keys.data_ptr() + layer.keys.shape[3] * 2 == layer.values.data_ptr()
        assert layer.keys.shape[3], layer.values.shape[3] == (32, 16)


@pytest.mark.parametrize("change", ["weights", "hook", "sinks"])
def test_what_attention_depends_on(change: str, packed: Callable[[str], Path]) -> None:
    """Weights between latents and values, hooks on them, and sinks: a step sees that they are others."""
    model = load(str(packed("gpt_oss" if change == "sinks" else "deepseek_v3")))
    before = conversation(model, turns=1, steps=8)
    assert step_of(model).ready is not None
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        if change == "weights":
            attention.kv_b_proj.weight_packed.zero_()
        elif change == "hook":
            attention.kv_b_proj.register_forward_hook(lambda m, x, y: y * 2)
        else:
            attention.sinks.fill_(9.0)
    after = conversation(model, turns=1, steps=8)
    assert not torch.equal(before[0][-1], after[0][-1])
    assert_same(after, conversation(plain(model), turns=1, steps=8))


def test_hooks_that_come_and_go(packed: Callable[[str], Path]) -> None:
    """What passes is tried again after a while, and its steps have the same bits."""
    model = load(str(packed("mixtral")))
    hook = model.model.norm.register_forward_hook(lambda *_: None)
    before = conversation(model, turns=1, steps=3)
    assert step_of(model).why == "there are hooks on its modules"
    hook.remove()
    ours = conversation(model, turns=1, steps=WAITS[0] + RECORDED + COMPARED)
    assert step_of(model).why is None
    assert step_of(model).ready is not None
    assert step_of(model).failures == 0
    assert_same(ours, conversation(plain(model), turns=1, steps=WAITS[0] + RECORDED + COMPARED))
    assert torch.equal(before[0][0], ours[0][0])


def test_tries_end(
    packed: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not pass is the model's nature, in the end: one line says so."""
    model = load(str(packed("mixtral")))
    model.model.norm.register_forward_hook(lambda *_: None)
    looked, check = list[int](), step_list.check_state
    step = step_of(model)
    monkeypatch.setattr(step_list, "check_state", lambda *of: (looked.append(len(made)), check(*of))[1])
    made: list[Tensor] = []
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens(6)[None], past_key_values=cache, use_cache=True)
    for i in tokens(sum(WAITS) + 20):
        made += feed(model, cache, i.view(1))
    assert looked == [0, 4, 20, 84]
    assert step.wait == 0
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert lines == [
        "MixtralForCausalLM: steps run as transformers runs them: there are hooks on its modules"
    ]


@pytest.mark.parametrize("fails", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["record", "compare"])
def test_a_failure_that_passes(
    at: str, fails: type[BaseException], packed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that ends, or who interrupts, while a step is written down or compared: the cache is as before."""
    model = load(str(packed("mixtral")))
    step = step_of(model)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens(6)[None], past_key_values=cache, use_cache=True)
    ids = tokens(STEPS)
    before = 1 if at == "record" else RECORDED
    made = feed(model, cache, ids[:before])

    def broken(*_: Any) -> Any:
        raise fails("of nothing")

    with monkeypatch.context() as patch:
        if at == "record":
            patch.setattr(step_list, "lower", broken)
        else:
            patch.setattr(step, "_run_list", broken)
        if fails is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                feed(model, cache, ids[before : before + 1])
        else:
            made += feed(model, cache, ids[before : before + 1])
            assert step.why == "MemoryError: of nothing"
    assert cache.get_seq_length() == 6 + len(made)
    made += feed(model, cache, ids[len(made) :])
    assert step.why is None
    assert step.ready is not None
    other = DynamicCache(config=model.config)
    plain(model)
    with torch.inference_mode():
        model(input_ids=tokens(6)[None], past_key_values=other, use_cache=True)
    assert_same((made, cache), (feed(model, other, ids), other))


def test_a_cache_of_another_type(packed: Callable[[str], Path]) -> None:
    """A step over it is the model's own, and later ones of an ordinary cache are replayed again."""
    model = load(str(packed("mixtral")))
    conversation(model, turns=1, steps=6)
    step = step_of(model)
    assert step.ready is not None
    odd = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens(6)[None], past_key_values=odd, use_cache=True)
    for layer in odd.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    again = copy.deepcopy(odd)
    with pytest.raises(RuntimeError, match="dtype"):
        feed(model, odd, tokens(1))
    assert step.why
    with pytest.raises(RuntimeError, match="dtype"):
        feed(plain(model), again, tokens(1))
    model.forward = step
    ours = conversation(model, turns=1)
    assert step.ready is not None
    assert_same(ours, conversation(plain(model), turns=1))


def test_one_line_says_why(packed: Callable[[str], Path]) -> None:
    """To whoever generates, without any settings of logs, and before the first token."""
    packed("mixtral")
    script = f"""
import torch
from trilobite.runtime.load import load
from trilobite.runtime.offload.plan import Offload
model = load({str(packed("mixtral"))!r}, memory=Offload(memory=8 << 30, slots=6))
ids = torch.tensor([[5, 6, 7]])
for _ in range(2):
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    why = "MixtralForCausalLM: steps run as transformers runs them: its experts stream, or lie elsewhere"
    assert done.stderr.splitlines().count(why) == 1


def test_experts_that_no_list_knows(packed: Callable[[str], Path]) -> None:
    """Those of an original, which are computed one by one."""
    model = load(str(packed("switch_transformers").parent / "original"))
    ids = tokens(5)[None]
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert step_of(model).ready is None
    assert step_of(model).why == "aten.bincount.default has shapes that depend on values"
    again = plain(model).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, again)


def test_generate_and_a_second_turn(packed: Callable[[str], Path]) -> None:
    """As chat does it: the kept cache, cropped where the texts part."""
    model = load(str(packed("mixtral")))

    def turns() -> list[Tensor]:
        cache, made = GrowingCache(model), []
        ids = tokens(9)[None]
        for _ in range(3):
            past = cache.ready(ids, 64, None)
            asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            with torch.inference_mode():
                ids = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=past, **asked)
            cache.keep(past, ids)
            made.append(ids)
            ids = torch.cat((ids[:, :-4], tokens(5, 7)[None]), 1)
        return made

    ours = turns()
    assert step_of(model).ready is not None
    plain(model)
    assert all(torch.equal(a, b) for a, b in zip(ours, turns(), strict=True))


def test_tensors_that_somebody_kept_do_not_change(packed: Callable[[str], Path]) -> None:
    model = load(str(packed("mixtral")))
    _, cache = conversation(model, turns=1, steps=8)
    assert step_of(model).ready is not None
    kept = [(x.keys, x.keys.clone()) for x in cache.layers]
    feed(model, cache, tokens(4, 5))
    cache.crop(-6)
    branch = copy.deepcopy(cache)
    one = feed(model, cache, tokens(4, 8))
    two = feed(model, branch, tokens(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(torch.equal(a, b) for a, b in kept)


def test_two_texts_in_turns(packed: Callable[[str], Path]) -> None:
    model = load(str(packed("qwen3_moe")))

    def both() -> list[Tensor]:
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        with torch.inference_mode():
            for i, cache in enumerate(caches):
                model(input_ids=tokens(5 + i, i)[None], past_key_values=cache, use_cache=True)
        return [feed(model, c, t.view(1))[0] for t in tokens(8, 3) for c in caches]

    ours = both()
    assert step_of(model).ready is not None
    plain(model)
    assert all(torch.equal(a, b) for a, b in zip(ours, both(), strict=True))


def test_copies_have_steps_of_their_own(packed: Callable[[str], Path]) -> None:
    model = load(str(packed("mixtral")))
    expected = conversation(model, turns=1)
    twin = copy.deepcopy(model)
    assert step_of(twin) is not step_of(model)
    assert step_of(twin).model is twin
    assert step_of(twin).ready is None
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    other = conversation(twin, turns=1)
    assert step_of(twin).ready is not None
    assert not torch.equal(other[0][-1], expected[0][-1])
    assert_same(conversation(model, turns=1), expected)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    back = torch.load(saved, weights_only=False)
    assert step_of(back).model is back
    assert_same(conversation(back, turns=1), expected)


def _hook(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)


def _weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(3)


def _memory(model: PreTrainedModel) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data * 3


def _parameter(model: PreTrainedModel) -> None:
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach() * 3)


def _module(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.q_proj = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(0.01)


def _mode(model: PreTrainedModel) -> None:
    configure(model, CpuSettings("int8"))


def _forward(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    real = attention.forward
    attention.forward = lambda *args, **kwargs: (real(*args, **kwargs)[0] * 2, None)


@pytest.mark.parametrize("change", [_hook, _weights, _memory, _parameter, _module, _mode, _forward])
def test_changes_of_the_model_are_seen(change: Callable[..., None], packed: Callable[[str], Path]) -> None:
    model = load(str(packed("mixtral")))
    before = conversation(model, turns=1, steps=6)
    assert step_of(model).ready is not None
    change(model)
    ours = conversation(model, turns=1, steps=8)
    assert not torch.equal(ours[0][0], before[0][0])
    assert_same(ours, conversation(plain(model), turns=1, steps=8))


def test_what_is_no_step(packed: Callable[[str], Path]) -> None:
    """Batches, masks, gradients, and what else is asked for go to the model's own forward."""
    model = load(str(packed("mixtral")))
    _, cache = conversation(model, turns=1, steps=6)
    step = step_of(model)
    assert step.ready is not None
    step._run = None  # type: ignore[assignment, method-assign]
    one = torch.tensor([[5]])
    length = cache.get_seq_length()
    holes = torch.ones(1, length + 1, dtype=torch.int64)
    holes[0, 0] = 0
    batch = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens(8).view(2, 4), past_key_values=batch, use_cache=True)
        model(input_ids=tokens(2).view(2, 1), past_key_values=batch, use_cache=True)
    calls: list[dict[str, Any]] = [
        {"attention_mask": holes},
        {"position_ids": torch.tensor([[length + 3]])},
        {"labels": one},
        {"use_cache": False},
    ]
    for asked in calls:
        with torch.inference_mode():
            model(input_ids=one, past_key_values=copy.deepcopy(cache), **asked)
    model(input_ids=one, past_key_values=copy.deepcopy(cache))
    with torch.inference_mode(), pytest.raises(TypeError):
        model(input_ids=one, past_key_values=copy.deepcopy(cache))
    with torch.inference_mode():
        asked = model(input_ids=one, past_key_values=cache, output_hidden_states=True)
    assert asked.hidden_states is not None


def test_a_wrong_operator_is_found_out(
    packed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is off by one unit in the last place: steps go on as the model's own."""
    model = load(str(packed("mixtral")))
    aten = torch.ops.aten
    right = small._OPERATORS[aten.mul.Tensor]

    def wrong(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nodes = right(out, args, kwargs)
        return nodes and [*nodes, *(small._OPERATORS[aten.add.Tensor](out, (out, out), {}) or [])]

    monkeypatch.setitem(small._OPERATORS, aten.mul.Tensor, wrong)
    ours = conversation(model)
    assert step_of(model).why == "its logits are other ones"
    assert_same(ours, conversation(plain(model)))


def test_streaming_experts_are_not_replayed(packed: Callable[[str], Path]) -> None:
    model = load(str(packed("mixtral")), memory=Offload(memory=8 << 30, slots=6))
    ours = conversation(model, turns=1, steps=4)
    assert step_of(model).why == "its experts stream, or lie elsewhere"
    assert_same(ours, conversation(plain(load(str(packed("mixtral")))), turns=1, steps=4))


def test_memory_is_used_again(packed: Callable[[str], Path]) -> None:
    """Tensors of a step share memory where they can: less than all of them take."""
    model = load(str(packed("deepseek")))
    conversation(model, turns=1, steps=4)
    ready = step_of(model).ready
    assert ready is not None
    assert lower.ALIGNMENT <= ready.logits.untyped_storage().nbytes() < 64 << 10
