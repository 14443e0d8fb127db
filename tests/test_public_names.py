"""The public surface is what docs/api.md says, no more and no less."""

import re

import pytest
from support.paths import ROOT
from transformers import AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import trilobite

API = ROOT / "docs" / "api.md"


def test_public_names_are_those_documented() -> None:
    documented = re.findall(r"^\| `trilobite\.(\w+)", API.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(trilobite.__all__)
    assert dir(trilobite) == sorted(trilobite.__all__)


@pytest.mark.parametrize("name", trilobite.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(trilobite, name)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'decompress'"):
        trilobite.decompress  # noqa: B018


def test_import_registers_the_plugin() -> None:
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["trilobite"] is trilobite.TrilobiteConfig
    assert "trilobite" in AUTO_QUANTIZER_MAPPING
    assert AutoConfig.for_model("deepseek").model_type == "deepseek"
