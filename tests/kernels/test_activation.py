"""The forms of activations: their strings, and that each computes what the architecture that it is of computes."""

import pytest
import torch
from torch import Tensor

from trilobite.errors import ArchitectureError
from trilobite.kernels.activation import gate_fn, plain_fn, spell, split

GATE = torch.linspace(-30, 30, 121).view(-1, 1).expand(121, 121)
UP = GATE.mT


def test_strings_and_back() -> None:
    assert split(spell("clamped_silu", 7.25)) == ("clamped_silu", (7.25,))
    assert split(spell("softcapped", 4.0, 25.0)) == ("softcapped", (4.0, 25.0))
    assert spell("gpt_oss", 1.702, 7.0) == "gpt_oss"
    assert split("gpt_oss") == ("gpt_oss", (1.702, 7.0))
    assert split("silu") == ("silu", ())


@pytest.mark.parametrize(
    "wrong", ["", "siluu", "silu:1", "clamped_silu", "clamped_silu:x", "softcapped:1", "gpt_oss:1"]
)
def test_what_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ArchitectureError, match="unknown"):
        gate_fn(wrong)


def test_what_needs_gates_is_refused_without() -> None:
    with pytest.raises(ArchitectureError, match="gates"):
        plain_fn("clamped_silu:7.0")


def by_transformers(name: str) -> Tensor:
    """What transformers' own module computes of GATE and UP."""
    from transformers import DeepseekV4Config, GptOssConfig, Step3p7TextConfig
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2Experts
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    made = {
        "gpt_oss": lambda: GptOssExperts(GptOssConfig()),
        "clamped_silu:6.5": lambda: DeepseekV4Experts(DeepseekV4Config(swiglu_limit=6.5)),
        "silu_clamped:6.5": lambda: Step3p7Experts(Step3p7TextConfig(), 6.5),
        "softcapped:4.0:25.0": lambda: Inkling2Experts(Inkling2TextConfig()),
    }
    with torch.device("meta"):
        module = made[name]()
    both = torch.stack((GATE, UP), -1).flatten(-2) if name == "gpt_oss" else torch.cat((GATE, UP), -1)
    result: Tensor = module._apply_gate(both)
    return result


@pytest.mark.parametrize("name", ["gpt_oss", "clamped_silu:6.5", "silu_clamped:6.5", "softcapped:4.0:25.0"])
def test_forms_are_those_of_transformers(name: str) -> None:
    torch.testing.assert_close(gate_fn(name)(GATE, UP), by_transformers(name), rtol=1e-6, atol=1e-6)
