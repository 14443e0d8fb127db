"""`TrilobiteConfig(memory=…, gpu_memory=…)`: from_pretrained leaves the experts in their files."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import build_checkpoint
from transformers import AutoModelForCausalLM

from trilobite import TrilobiteConfig
from trilobite.errors import OffloadError
from trilobite.kernels.cpu import engine
from trilobite.quantize.run.compress import compress
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.offload.copies import HostCopies
from trilobite.runtime.offload.plan import GpuMemory, Offload
from trilobite.runtime.offload.streaming import streaming
from trilobite.runtime.routing import moe_layers

pytestmark = pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
IDS = torch.arange(7, 16)[None]


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    build_checkpoint(request.param, folder / "original")
    compress(str(folder / "original"), folder / "packed", load_recipe("milo-s1"))
    return folder / "packed"


def loaded(path: Path, device_map: str | None = None, **bounds: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        chosen = TrilobiteConfig(**bounds)
        return AutoModelForCausalLM.from_pretrained(path, quantization_config=chosen, device_map=device_map)


@pytest.mark.parametrize("gpu", [False, True])
def test_experts_stream_and_are_never_read_whole(
    packed: Path, gpu: bool, caplog: pytest.LogCaptureFixture
) -> None:
    slots = 2 * len(moe_layers(load(str(packed))))
    bounds: dict[str, Any] = {"memory": Offload(memory=2**40, slots=slots)}
    if gpu:
        bounds["gpu_memory"] = GpuMemory(memory=2**40, engine=HostCopies(), slots=slots, share=False)
    model = loaded(packed, **bounds)
    found = streaming(model)
    assert found is not None
    assert found.cache is not None
    assert (found.below is not None) == gpu
    assert "UNEXPECTED" not in caplog.text
    assert "MISSING" not in caplog.text
    with torch.inference_mode():
        expected = load(str(packed))(input_ids=IDS, use_cache=False).logits
        assert torch.allclose(model(input_ids=IDS, use_cache=False).logits, expected, atol=1e-5)
    assert found.counters.misses > 0
    mapped = {str(packed / f.name) for f in packed.glob("*.safetensors")}
    module = moe_layers(model)[0].experts
    buffer = next(module.buffers())
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(v, 16) for v in line[0].split("-")] for line in lines if line[-1] in mapped]
    assert any(a <= buffer.data_ptr() < b for a, b in ranges), "the experts' buffers are views of the file"


def test_a_streaming_model_is_saved_whole(packed: Path, tmp_path: Path) -> None:
    model = loaded(packed, memory=Offload(memory=2**40, slots=6, pool=True))
    model.save_pretrained(tmp_path / "saved")
    saved, original = load(str(tmp_path / "saved")).state_dict(), load(str(packed)).state_dict()
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)


def test_what_cannot_be(packed: Path) -> None:
    with pytest.raises(OffloadError, match="smallest that works"):
        loaded(packed, memory="1MB")
    with pytest.raises(OffloadError, match="run `trilobite compress` first"):
        loaded(packed.parent / "original", memory="8GiB")
    with pytest.raises(OffloadError, match="leave device_map out"):
        loaded(packed, device_map="meta", memory="8GiB")
    if not torch.cuda.is_available():
        with pytest.raises(OffloadError, match="no GPU"):
            loaded(packed, gpu_memory="8GiB")


def test_settings_of_the_engine_reach_packed_checkpoints_too(packed: Path) -> None:
    assert moe_layers(loaded(packed, activations="int8"))[0].experts.settings.activations == "int8"  # type: ignore[union-attr]
