"""A layer's own routing code, run alone: it says what the layer then does, for every architecture."""

from typing import Any

import pytest
import torch
from support.architectures import SEQ2SEQ, TINY_CONFIGS, build_model
from torch import Tensor, nn

from trilobite.runtime.routing import NormListener, index_of, moe_layers

MOE = [name for name in TINY_CONFIGS if name not in ("llama", "qwen3", *SEQ2SEQ)]


def ask_everything(model_type: str, width: int) -> list[dict[str, Tensor | None]]:
    """For every MoE layer: what it chose, and what `route` and `route_without_attention` say of the same inputs."""
    model = build_model(model_type)
    asked: list[dict[str, Tensor | None]] = []
    for layer in moe_layers(model):
        found: dict[str, Tensor | None] = {}
        asked.append(found)

        def chosen(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any = found
        ) -> None:
            found["chosen"] = index_of(args, kwargs)

        def route(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            found: Any = found,
            layer: Any = layer,
        ) -> None:
            if "route" not in found:
                found["route"] = None
                found["whole"] = layer.route((args, kwargs), layer.num_experts)
                found["route"] = layer.route((args, kwargs), width)

        layer.block.register_forward_pre_hook(route, with_kwargs=True)
        layer.experts.register_forward_pre_hook(chosen, with_kwargs=True)
    ids = torch.arange(3, 13)[None]
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(before, model(input_ids=ids, use_cache=False).logits), "asking changed the model"
    return asked


@pytest.mark.parametrize("model_type", MOE)
def test_the_routing_of_every_architecture(model_type: str) -> None:
    asked = ask_everything(model_type, 2)
    assert asked
    for found in asked:
        assert found["chosen"] is not None
        assert found["route"] is not None
        assert found["whole"] is not None
        active = found["chosen"].shape[1]
        assert found["route"].sort().values.tolist() == found["chosen"].sort().values.tolist()
        if found["whole"].shape[1] > active:
            assert found["whole"][:, :active].sort().values.tolist() == found["chosen"].sort().values.tolist()


@pytest.mark.parametrize("model_type", MOE)
def test_the_stream_in_front_of_a_norm(model_type: str) -> None:
    """Where a block gets what a norm returned, the layer's own norm on what it was given is the layer's own routing."""
    model = build_model(model_type)
    layers = moe_layers(model)
    listener, heard = NormListener(layers), list[str]()

    def check(layer: Any) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            normed = listener.heard((args, kwargs))
            if normed is not None:
                heard.append(normed.norm)
                again = layer.route_normed(normed, (args, kwargs), 2)
                assert torch.equal(again, layer.route((args, kwargs), 2))
                assert listener.heard((args, kwargs)) is None

        return hook

    for layer in layers:
        layer.block.register_forward_pre_hook(check(layer), with_kwargs=True)
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 13)[None], use_cache=False)
    listener.detach()
    assert len(heard) == len(layers)
