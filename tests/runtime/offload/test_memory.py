"""The bound on memory: how it is divided, and that it holds."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.paths import ROOT, SRC
from transformers import MixtralConfig, MixtralForCausalLM

from trilobite.errors import OffloadError
from trilobite.kernels.cpu import engine
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.offload import plan as planning
from trilobite.runtime.offload.plan import Offload, key_value_bytes, parse_size
from trilobite.runtime.offload.streaming import streaming

GIB = 2**30


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 M weights in 64 experts: 10 MB."""
    folder = tmp_path_factory.mktemp("packed")
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=16,
        max_position_embeddings=256,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "original")
    compress(str(folder / "original"), folder / "packed", load_recipe("rtn3"))
    return folder / "packed"


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is in this process changes from one load to the next."""
    monkeypatch.setattr(planning, "anonymous_bytes", lambda: 300 * 2**20)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GIB),
        ("8g", 8 * 10**9),
        ("1.5 GB", 1_500_000_000),
        ("500mib", 500 * 2**20),
        ("77", 77),
        (4096, 4096),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-3GiB", "8GiBs", "0", "8 G B", "1e9", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OffloadError, match="such as 8GiB"):
        parse_size(text)


def smallest(packed: Path) -> int:
    """What the refusal names."""
    with pytest.raises(OffloadError, match="smallest that works") as caught:
        load(str(packed), memory="1MB")
    assert "\n" not in str(caught.value)
    return parse_size(str(caught.value).split("works is ")[1].split(" ")[0])


def test_the_smallest_figure_works_and_less_does_not(packed: Path) -> None:
    figure = smallest(packed)
    found = streaming(load(str(packed), memory=figure + 2**20))
    assert found is not None
    with pytest.raises(OffloadError, match="smallest that works"):
        load(str(packed), memory=figure - 2 * 2**20)


def test_the_parts_add_up(packed: Path) -> None:
    model = load(str(packed), memory=Offload(memory=smallest(packed) + 2**20, staging=2, context=100))
    found = streaming(model)
    assert found is not None
    assert found.cache is not None
    plan = found.plan
    experts = (plan.slots + plan.staging) * plan.experts.slot_bytes
    assert plan.fixed.total + experts <= plan.memory
    assert found.cache.arena.tensor.nbytes == experts
    each = 2 * 4 * 2 * 64 * 2  # bytes of a token: keys and values, layers, heads, width, bf16
    assert plan.fixed.keys_and_values == 100 * each
    stays = sum(t.nbytes for name, t in model.state_dict().items() if ".experts." not in name)
    assert plan.fixed.weights == stays


def test_a_model_that_fits_does_not_stream(packed: Path) -> None:
    found = streaming(load(str(packed), memory="64GiB"))
    assert found is not None
    assert found.cache is None
    assert "nothing needs to stream" in str(found.plan)


def test_keys_and_values_are_what_transformers_keeps(packed: Path) -> None:
    model = load(str(packed))
    kept = model(input_ids=torch.arange(3, 20)[None], use_cache=True).past_key_values
    assert sum(t.nbytes for layer in kept.layers for t in (layer.keys, layer.values)) == key_value_bytes(
        model, 17
    )


def test_auto_streams_only_what_does_not_fit(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert streaming(load(str(packed), memory="auto")) is None
    model = load(str(packed))
    needed = planning.activation_bytes(model, 256) + key_value_bytes(model, 256) + 6 * 2**20
    monkeypatch.setattr(planning, "available_bytes", lambda: int(needed / planning.HEADROOM))
    found = streaming(load(str(packed), memory="auto"))
    assert found is not None
    assert found.cache is not None
    monkeypatch.setattr(planning, "available_bytes", lambda: needed // 2)
    assert streaming(load(str(packed), memory="auto")) is None, "as ever: the page cache does what it can"
    monkeypatch.setattr(planning, "available_bytes", lambda: None)
    assert streaming(load(str(packed), memory="auto")) is None


def test_what_cannot_stream_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="compress it first"):
        load(str(packed.parent / "original"), memory="8GiB")
    with pytest.raises(OffloadError, match="policy 'mru'"):
        load(str(packed), memory=Offload(memory=8 * GIB, policy="mru"))
    with pytest.raises(OffloadError, match="device='cpu'"):
        load(str(packed), memory="8GiB", device="meta")


def own_group() -> Path | None:
    """Folder of this process's memory control group, version 1 or 2, where groups may be made in it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / group.lstrip("/")
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 1 for the length of a test."""
    parent = own_group() if sys.platform == "linux" else None
    folder = None if parent is None else parent / f"trilobite-{uuid.uuid4().hex}"
    try:
        if folder is None:
            raise OSError("none")
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"no control groups to be had: {e}")
    yield folder
    folder.rmdir()


BOUNDED = """
import json, sys
from pathlib import Path
import torch
from trilobite.errors import OffloadError
from trilobite.runtime.load import load
from trilobite.runtime.offload.plan import parse_size
from trilobite.runtime.offload.streaming import streaming
path, group, excess = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
(group / "cgroup.procs").write_text("0")
try:
    load(path, memory="1MB")
except OffloadError as e:
    bound = parse_size(str(e).split("works is ")[1].split(" ")[0]) + 4 * 2**20
model = load(path, memory=bound)
(group / "memory.limit_in_bytes").write_text(str(bound))
made = model.generate(torch.arange(7, 60)[None], max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
more = b"x" * excess
print(json.dumps({"made": made[0].tolist(), "misses": streaming(model).counters.misses, "bound": bound}))
"""


@pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
@pytest.mark.parametrize("excess", [0, 10**9])
def test_the_bound_holds_in_a_control_group(packed: Path, group: Path, excess: int) -> None:
    """The limit of the group is the bound: the process lives; one that takes a gigabyte more is killed."""
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, packed, group, str(excess)],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if excess:
        assert done.returncode == -9
        return
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["misses"] > 0
    expected = load(str(packed)).generate(
        torch.arange(7, 60)[None], max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert found["made"] == expected[0].tolist()
