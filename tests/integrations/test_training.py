"""Adapters of PEFT on packed models, and what Trainer says of models without."""

from pathlib import Path

import pytest
import torch
from support.architectures import build_checkpoint
from transformers.trainer_utils import validate_quantization_for_training

from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
from trilobite.runtime.load import load
from trilobite.runtime.modules.linear import PackedLinear

IDS = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("training")
    build_checkpoint("mixtral", folder / "original", dtype=torch.bfloat16)
    options = Options(jobs=1, device="cpu")
    compress(str(folder / "original"), folder / "packed", load_recipe("rtn3"), options=options)
    return str(folder / "packed")


def test_adapters_lower_the_loss_and_reload(packed: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    model = load(packed, dtype=torch.float32)
    model.gradient_checkpointing_enable()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    layers = [m for m in adapted.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert len(layers) == 8  # q, k, v and o of two layers
    assert all(isinstance(m.base_layer, PackedLinear) for m in layers)
    validate_quantization_for_training(adapted)
    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.05
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(packed, dtype=torch.float32), tmp_path)
    with torch.no_grad():
        expected = adapted.eval()(IDS).logits
        assert torch.equal(again.eval()(IDS).logits, expected)
        with adapted.disable_adapter():
            assert not torch.equal(adapted(IDS).logits, expected)


def test_trainer_refuses_a_model_without_adapters(packed: str) -> None:
    with pytest.raises(ValueError, match="attach trainable adapters"):
        validate_quantization_for_training(load(packed))


def test_embeddings_and_norms_train(packed: str) -> None:
    """Their gradients come through all packed layers."""
    model = load(packed, dtype=torch.float32)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters() if p.requires_grad)
