"""A GPU in front of the host, with the host in its place: the bits of the resident model, from two tiers and three."""

import copy
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.architectures import build_checkpoint
from support.triton_interpreter import available, install
from torch import Tensor

from trilobite.errors import OffloadError
from trilobite.kernels.cpu import engine
from trilobite.kernels.cpu.bound import Sums
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.offload import misses
from trilobite.runtime.offload.cache import ExpertCache
from trilobite.runtime.offload.copies import HostCopies
from trilobite.runtime.offload.host_store import HostStore, PinnedStore, SlotStore
from trilobite.runtime.offload.misses import TOKENS, Costs, HostShare
from trilobite.runtime.offload.plan import GpuMemory, Offload
from trilobite.runtime.offload.streaming import streaming
from trilobite.runtime.routing import moe_layers

pytestmark = pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
IDS = torch.arange(7, 16)[None]
LARGE = 2**40


class InterpretedGpu(HostCopies):
    """The GPU kernels, interpreted, on experts in the GPU layout."""

    gpu_layout = True


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, str], Path] = {}

    def get(model_type: str = "mixtral", recipe: str = "milo-s1") -> Path:
        if (model_type, recipe) not in made:
            folder = tmp_path_factory.mktemp(f"{model_type}-{recipe}")
            build_checkpoint(model_type, folder / "original")
            compress(str(folder / "original"), folder / "packed", load_recipe(recipe))
            made[model_type, recipe] = folder / "packed"
        return made[model_type, recipe]

    return get


def streamed(path: Path, slots: int, **chosen: Any) -> tuple[Any, ExpertCache]:
    """A model with so many slots a layer on the "GPU". ram: slots a layer on the host, in front of the disk."""
    layers = len(moe_layers(load(str(path))))
    ram, share = chosen.pop("ram", None), chosen.pop("share", False)
    gpu = GpuMemory(
        memory=LARGE, engine=chosen.pop("engine", None) or HostCopies(), slots=slots * layers, share=share
    )
    memory = None if ram is None else LARGE
    wanted = Offload(memory=memory, slots=ram and ram * layers, **chosen)
    model = load(str(path), memory=wanted, gpu_memory=gpu)
    found = streaming(model)
    assert found is not None
    assert found.cache is not None
    return model, found.cache


def answers(model: Any, ids: Tensor) -> Tensor:
    """Logits of a prompt, and of tokens one by one behind it, greedily."""
    with torch.inference_mode():
        made = model.generate(
            ids,
            max_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        return torch.cat([step.flatten() for step in made.logits])


@pytest.mark.parametrize("ram", [None, 2, 3])
@pytest.mark.parametrize(
    ("model_type", "recipe"), [("mixtral", "milo-s1"), ("gpt_oss", "rtn3"), ("mixtral", "quip3-free")]
)
def test_streaming_changes_no_bit(
    packed: Callable[..., Path], model_type: str, recipe: str, ram: int | None
) -> None:
    path = packed(model_type, recipe)
    model, cache = streamed(path, 2, ram=ram)
    assert isinstance(cache.store, HostStore if ram is None else SlotStore)
    assert torch.equal(answers(model, IDS), answers(load(str(path)), IDS))
    counts = cache.counters
    assert counts.misses > 0
    assert counts.bytes > 0
    cache.close()


@pytest.mark.parametrize("ram", [None, 3])
@pytest.mark.parametrize(("staging", "guesses"), [(1, 0), (2, 4), (4, 2)])
def test_a_batch_of_64_with_two_slots(
    packed: Callable[..., Path], ram: int | None, staging: int, guesses: int
) -> None:
    """All experts of every layer pass through the buffers that all layers share."""
    path = packed()
    model, cache = streamed(path, 2, ram=ram, staging=staging, guesses=guesses)
    ids = torch.randint(3, 256, (64, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = load(str(path))(input_ids=ids, use_cache=False).logits
        for _ in range(2):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    layers = len(cache.tables)
    assert cache.arena.slots == 2 * layers + staging
    assert cache.counters.misses + cache.counters.hits == 2 * cache.store.count
    cache.close()


@pytest.fixture(scope="module")
def layers(packed: Callable[..., Path]) -> list[Any]:
    """The first experts module: resident, and streaming from pinned memory, from slots, and shared with the host."""
    path = packed()
    slow = Costs(copied=[1e9] * len(TOKENS), computed=[1e-9] * len(TOKENS))
    models = [load(str(path)), streamed(path, 2)[0], streamed(path, 2, ram=2)[0]]
    shared = streamed(path, 3, share=True)[0]
    for layer in moe_layers(shared):
        layer.experts.residence.host.costs = slow  # type: ignore[union-attr]
    return [moe_layers(model)[0].experts for model in (*models, shared)]


def draw(data: st.DataObject, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, index (with "no expert" among them) and weights."""
    tokens, active = data.draw(st.integers(1, most)), data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 5), min_size=active, max_size=active)
    index = torch.tensor(data.draw(st.lists(row, min_size=tokens, max_size=tokens)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).to(dtype)
    return x, index, torch.rand(tokens, active, generator=generator)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_routing(layers: list[Any], data: st.DataObject) -> None:
    inputs = draw(data, 70)
    with torch.inference_mode():
        resident, pinned, slots, shared = (module(*inputs) for module in layers)
    assert torch.equal(pinned, resident)
    assert torch.equal(slots, resident)
    # The host's experts are summed up for themselves: another order of additions, in fp32.
    bound = 2e-6 if inputs[0].dtype == torch.float32 else 8e-3
    assert torch.allclose(shared, resident, rtol=bound, atol=bound * float(resident.abs().max()))


@pytest.mark.skipif(not available(), reason="Triton does not interpret here")
@pytest.mark.parametrize(
    ("recipe", "ram"),
    [
        ("milo-s1", 3),
        ("quip3-free", None),
        pytest.param("milo-s1", None, marks=pytest.mark.long),
        pytest.param("quip3-free", 3, marks=pytest.mark.long),
    ],
)
def test_the_gpu_layout_in_slots(packed: Callable[..., Path], recipe: str, ram: int | None) -> None:
    """The bits of the same kernels on a layer that lies in one piece, for one token and for a prompt."""
    install()
    path = packed("mixtral", recipe)
    model, cache = streamed(path, 2, ram=ram, engine=InterpretedGpu())
    assert isinstance(cache.store, PinnedStore if ram is None else SlotStore)
    generator = torch.Generator().manual_seed(0)
    from trilobite.kernels import ops

    layers = zip(moe_layers(model), moe_layers(load(str(path))), (1, 9), strict=True)
    for layer, whole, tokens in layers:
        module, resident = layer.experts, whole.experts
        rows = [[None if m is None else m.packed() for m in row] for row in resident.matrices()]  # type: ignore[operator]
        pack = ops.repack(rows)
        x = torch.randn(tokens, 64, generator=generator)
        index = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(tokens)])
        weights = torch.rand(tokens, 2, generator=generator)
        expected = ops.experts(
            x,
            index,
            weights,
            resident.layer(pack.slab, pack.table, pack.codings),  # type: ignore[operator]
        )
        with torch.inference_mode(tokens == 1):  # what was made in it is used outside of it
            assert torch.equal(module(x, index, weights), expected)
    assert cache.counters.misses > 0
    cache.close()


def test_experts_that_differ(tmp_path: Path) -> None:
    """Ranks and formats of the experts of one layer differ; each slot is large enough for any of them."""
    from trilobite.recipe import recipe_from_dict

    build_checkpoint("mixtral", tmp_path / "original")
    recipe = recipe_from_dict(
        {
            "name": "mixed",
            "rules": [
                {"names": "*.experts.[02].*", "roles": ["expert"], "format": "int4-g64"},
                {"roles": ["expert"], "format": "int3-g64", "rank": 8},
            ],
        },
        "recipe",
    )
    compress(str(tmp_path / "original"), tmp_path / "packed", recipe)
    model, cache = streamed(tmp_path / "packed", 2)
    assert len({cache.store.size((0, e)) for e in range(4)}) > 1
    assert torch.equal(answers(model, IDS), answers(load(str(tmp_path / "packed")), IDS))


def test_a_wrong_row_of_the_table_is_noticed(packed: Callable[..., Path]) -> None:
    """What these tests would see if an expert lay where another one does."""
    model, cache = streamed(packed(), 3)
    place = cache._place
    cache._place = lambda key, slot: place(key, 1 - slot if slot < 2 else slot)  # type: ignore[method-assign]
    assert not torch.equal(answers(model, IDS), answers(load(str(packed())), IDS))


def test_a_copy_that_is_not_awaited_is_noticed(packed: Callable[..., Path]) -> None:
    """The copies are real: whoever computes before they are over gets something else."""
    model, cache = streamed(packed(), 2, engine=HostCopies(latency=0.02), guesses=0)
    cache._wait = lambda layer, transfers: None  # type: ignore[method-assign]
    assert not torch.equal(answers(model, IDS), answers(load(str(packed())), IDS))


def test_guesses_never_evict_what_this_token_needs(packed: Callable[..., Path]) -> None:
    model, cache = streamed(packed("deepseek", "rtn3"), 2, guesses=4)
    guess, there = cache.guess, list[bool]()

    def watched(layer: int, experts: list[int]) -> None:
        before = [cache.slots.resident(number) for number in range(len(cache.tables))]
        guess(layer, experts)
        there.append(before == [cache.slots.resident(number) for number in range(len(cache.tables))])

    cache.guess = watched  # type: ignore[method-assign,assignment]
    answers(model, IDS)
    assert there
    assert all(there)
    assert cache.counters.used > 0


class Gate(HostCopies):
    """Notes what is copied, and lets nothing through before `opened`."""

    def __init__(self) -> None:
        super().__init__(piece=4096)
        self.opened, self.begun = threading.Event(), list[int]()

    def put(self, source: Tensor, target: Tensor) -> None:
        self.begun.append(target.data_ptr())
        assert self.opened.wait(20)
        super().put(source, target)


def test_a_miss_overtakes_guesses() -> None:
    gate, source, target = (
        Gate(),
        torch.arange(3 * 8192).to(torch.uint8),
        torch.zeros(3 * 8192, dtype=torch.uint8),
    )
    parts = [slice(i * 8192, (i + 1) * 8192) for i in range(3)]
    guesses = [gate.copy(source[p], target[p], urgent=False) for p in parts[:2]]
    while not gate.begun:
        pass
    miss = gate.copy(source[parts[2]], target[parts[2]], urgent=True)
    gate.opened.set()
    for transfer in (miss, *guesses):
        transfer.wait()
    first = target.data_ptr()
    assert [a - first for a in gate.begun] == [0, 16384, 20480, 4096, 8192, 12288]
    assert torch.equal(source, target)
    gate.close()


def test_the_bus_is_as_slow_as_asked() -> None:
    from time import perf_counter

    bus = HostCopies(bandwidth=1e8, latency=0.01, piece=2**18)
    source, target = torch.ones(2**20, dtype=torch.uint8), torch.zeros(2**20, dtype=torch.uint8)
    started = perf_counter()
    for transfer in [bus.copy(source, target, urgent=True) for _ in range(3)]:
        transfer.wait()
    taken = perf_counter() - started
    assert taken >= 0.999 * 3 * (2**20 / 1e8 + 0.01) - 1e-3
    bus.close()


def test_a_slot_that_is_copied_from_is_not_read_into(packed: Callable[..., Path]) -> None:
    """Nothing is brought into the slots of the host, where it may evict anything, before copies out of them are over."""
    gate, brought = Gate(), list[tuple[int, int]]()
    _, cache = streamed(packed(), 2, engine=gate, ram=2, guesses=0)
    store = cache.store
    assert isinstance(store, SlotStore)
    bring = store.lower.bring
    store.lower.bring = lambda key, keep: (brought.append(key), bring(key, keep))  # type: ignore[assignment,method-assign,return-value]
    copied = store.fetch((0, 0), cache.arena, 0, urgent=True)
    waiting = threading.Thread(target=store.load, args=((0, 1),))
    waiting.start()
    sleep(0.2)
    assert gate.begun
    before = list(brought)
    gate.opened.set()
    waiting.join(20)
    copied.wait()
    assert (before, brought) == ([(0, 0)], [(0, 0), (0, 1)])
    cache.close()


def test_a_copy_that_fails_is_one_line_and_leaves_the_cache_as_new(packed: Callable[..., Path]) -> None:
    bus = HostCopies()
    model, _ = streamed(packed(), 2, engine=bus)
    put = bus.put

    def failing(source: Tensor, target: Tensor) -> None:
        raise RuntimeError("the bus burns")

    bus.put = failing  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(OffloadError, match="the bus burns"):
            answers(model, IDS)
    bus.put = put  # type: ignore[method-assign]
    assert torch.equal(answers(model, IDS), answers(load(str(packed())), IDS))


def test_a_disk_that_fails_below(packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = streamed(packed(), 2, ram=2)

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    for _ in range(3):
        with pytest.raises(OffloadError, match="Input/output error"):
            answers(model, IDS)
    monkeypatch.undo()
    assert torch.equal(answers(model, IDS), answers(load(str(packed())), IDS))


def test_ctrl_c_during_a_copy(packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = streamed(packed(), 2, ram=3)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_wait", interrupted)
    for ids in (IDS, torch.arange(3, 131)[None]):
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids, use_cache=False)
    monkeypatch.undo()
    assert torch.equal(answers(model, IDS), answers(load(str(packed())), IDS))


def test_the_host_computes_what_is_slow_to_copy(
    packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is computed before; what the host computed follows into the cache meanwhile, for the next token."""
    model, cache = streamed(packed(), 3, share=True, engine=HostCopies(bandwidth=2e6), guesses=0)
    module = moe_layers(model)[0].experts
    host = module.residence.host  # type: ignore[union-attr]
    assert isinstance(host, HostShare)
    assert all(a > b for a, b in zip(host.costs.copied, host.costs.computed, strict=True))
    x, weights = torch.ones(1, 64), torch.ones(1, 2)
    calls = list[tuple[str, list[int]]]()
    compute, add = host.compute, Sums.add

    def computed(layer: int, tokens: Sequence[int], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert (layer, sum(tokens)) == (0, int((index < 4).sum()))
        calls.append(("host", sorted(e for e in index.flatten().tolist() if e < 4)))
        with monkeypatch.context() as patch:
            patch.setattr(Sums, "add", add)
            return compute(layer, tokens, x, index, weights)

    def added(self: Sums, index: Tensor) -> None:
        calls.append(("device", sorted(e for e in index.flatten().tolist() if e < 4)))
        add(self, index)

    host.compute = computed  # type: ignore[method-assign]
    monkeypatch.setattr(Sums, "add", added)
    with torch.inference_mode():
        for index in ([0, 1], [0, 1], [1, 2]):
            module(x, torch.tensor([index]), weights)
    first, *second, there, third = calls
    assert (first, there, third) == (("host", [0, 1]), ("device", [1]), ("host", [2]))
    assert {name for name, _ in second} == {"device"}
    assert cache.slots.resident(0) == [0, 1, 2]
    assert (cache.counters.misses, cache.counters.hits) == (3, 3)
    assert cache.counters.stalled > 0, "the second token waits for what the first one's host computed"


@pytest.mark.parametrize(
    ("copied", "computed", "tokens", "expected"),
    [
        (1.0, 2.1, {3: 1}, []),
        (1.0, 0.9, {3: 1}, [3]),
        (1.0, 0.9, {3: 1, 4: 1}, [3]),
        (1.0, 0.1, {3: 64, 4: 1, 5: 4}, [4, 5, 3]),
        (1.0, 1.0, dict.fromkeys(range(6), 1), [0, 1, 2]),
        (1.0, 0.5, {3: 640}, []),
    ],
)
def test_what_ends_first_is_chosen(
    copied: float, computed: float, tokens: dict[int, int], expected: list[int]
) -> None:
    count = len(TOKENS)
    host = HostShare(Costs(copied=[copied] * count, computed=[computed] * count), [])
    assert host.choose(tokens) == expected


def test_a_host_that_turns_out_slow_is_passed_over_until_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    class Slow:
        """Takes three times what was measured."""

        sums = torch.zeros(1, 1)

        def parts(self, *_: Tensor) -> "Slow":
            nonlocal now
            now += 3.0
            return self

        def add(self, index: Tensor) -> None:
            pass

    monkeypatch.setattr(misses, "perf_counter", lambda: now)
    count, index = len(TOKENS), torch.zeros(1, 1, dtype=torch.int64)
    host = HostShare(Costs(copied=[2.0] * count, computed=[1.0] * count), [Slow()])  # type: ignore[list-item]
    asked = 0
    while asked < 20 and host.choose({0: 1}):
        host.compute(0, [1], index, index, index)
        asked += 1
    assert asked == 6, "a pace of 1 + 2 (1 - (7 / 8) ** asked) is above 2"
    again = next(i for i in range(200) if host.choose({0: 1}))
    assert 0 < again < 20


def test_too_little_is_refused_with_the_smallest_figure(packed: Callable[..., Path]) -> None:
    def within(memory: int) -> object:
        gpu = GpuMemory(memory=memory, engine=HostCopies(), slots=6, share=False)
        return load(str(packed()), gpu_memory=gpu)

    with pytest.raises(OffloadError, match="of GPU memory do not suffice, the smallest that works") as caught:
        within(2**20)
    figure = int(str(caught.value).split("works is ")[1].split("MiB")[0]) * 2**20
    assert "\n" not in str(caught.value)
    within(figure)
    with pytest.raises(OffloadError, match="smallest that works"):
        within(figure - 2**20)


def test_without_a_gpu_one_line_says_so(packed: Callable[..., Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(OffloadError, match="no GPU that torch can use") as caught:
        load(str(packed()), gpu_memory="10GiB")
    assert "\n" not in str(caught.value)
    with pytest.raises(OffloadError, match="such as 8GiB"):
        load(str(packed()), gpu_memory="much")


def test_no_bound_at_all(packed: Callable[..., Path]) -> None:
    assert streaming(load(str(packed()), memory=Offload(memory=None))) is None


def test_what_fits_does_not_stream(packed: Callable[..., Path]) -> None:
    model = load(str(packed()), gpu_memory=GpuMemory(memory=LARGE, engine=HostCopies()))
    found = streaming(model)
    assert found is not None
    assert found.cache is None
    assert "nothing needs to stream" in found.notes[0]


def test_copies_and_pickles_settle_in_the_mapped_file(packed: Callable[..., Path]) -> None:
    model, _ = streamed(packed(), 2, ram=2)
    expected = answers(model, IDS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert streaming(other) is None
        # Tensors of a copy lie elsewhere, and torch's products of fp32 depend on where.
        assert torch.allclose(answers(other, IDS), expected, atol=1e-5)


def test_a_model_moves_without_its_experts(packed: Callable[..., Path]) -> None:
    """Buffers that move to another device become new tensors: those of the experts stay, and so does the streaming."""
    if not available():
        pytest.skip("Triton does not interpret here")
    install()
    model, cache = streamed(packed(), 2, engine=InterpretedGpu())
    module = moe_layers(model)[0].experts
    before, others = [t.data_ptr() for t in module.buffers()], model.lm_head.weight_packed.data_ptr()
    model._apply(torch.clone)  # what `to` does on the way to where the slots are
    assert model.lm_head.weight_packed.data_ptr() != others
    assert [t.data_ptr() for t in module.buffers()] == before
    assert module.residence is not None
    assert module.residence.cache is cache  # type: ignore[union-attr]


def test_memory_does_not_grow(packed: Callable[..., Path]) -> None:
    """Two slots, many tokens, three tiers."""
    model, _ = streamed(packed(), 2, ram=2)
    token = torch.tensor([[5]])

    def run(count: int) -> None:
        with torch.inference_mode():
            for i in range(count):
                model(input_ids=token + i % 200, use_cache=False)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    run(150)
    before = resident()
    run(500)
    assert resident() - before < 2**20
