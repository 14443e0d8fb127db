"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1): a step of decoding attends to what is cached.

The cache holds a latent vector for each token, of which transformers makes the keys and values of all heads anew for
every token. For one new query there is less to do: a head's score q·(A c + ..) is (A^T q)·c, and its sum of values
Σ p B c is B Σ p c. So the query goes into the space of latents, all heads attend to the same rows there, and what they
find comes out of it; A and B are the two halves of `kv_b_proj`.
"""

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trilobite.kernels.ops import Binding, dense_heads
from trilobite.runtime.modules.dequantize import dense_linear
from trilobite.runtime.modules.linear import PackedLinear
from trilobite.runtime.modules.residence import modules_that_run

NAMES = ("kv_b_proj", "expand_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


@dataclass(frozen=True, kw_only=True)
class Halves:
    """`kv_b_proj` for each head. into: A^T [heads, rank, nope]    out: B [heads, v, rank], in the dtype of queries."""

    into: Tensor
    out: Tensor


class Latents:
    """What an attention module calls as its `expand_kv`: leaves latents as they are for an attention that asks for them.

    wanted: the name of that attention in transformers' registry
    """

    def __init__(self, module: nn.Module, wanted: str) -> None:
        """Of one module."""
        self.module: Any = module
        self.wanted = wanted
        self.binding: Binding[Halves] | None = None
        self.left: weakref.ref[Tensor] | None = None

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """latent: [B, 1, S, rank]    rotated: [B, 1, S, rope]    returns both, or keys and values."""
        if torch.compiler.is_compiling():
            return self.expanded(latent, rotated)
        self.left = None
        if self.module.config._attn_implementation != self.wanted or not self._plain():
            return self.expanded(latent, rotated)
        self.left = weakref.ref(latent)
        return latent, rotated

    def __reduce__(self) -> tuple[type, tuple[nn.Module, str]]:
        """Without what was made of weights."""
        return Latents, (self.module, self.wanted)

    def expanded(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, heads, S, nope + rope] and values [B, heads, S, v]."""
        return type(self.module).expand_kv(self.module, latent, rotated)  # type: ignore[attr-defined, no-any-return]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """What the halves are made of."""
        b = self.module.kv_b_proj
        return (*b.parameters(), *b.buffers())

    def _plain(self) -> bool:
        """Whether `kv_b_proj` is a product and nothing more: no adapter, no hook, no bias."""
        b = self.module.kv_b_proj
        own = getattr(inspect.unwrap(b.forward), "__func__", None) is type(b).forward
        known = type(b) in (nn.Linear, PackedLinear) and b.bias is None
        return known and own and not b._forward_hooks and not b._forward_pre_hooks

    @torch.inference_mode(False)
    @torch.no_grad()
    def halves(self, dtype: torch.dtype) -> Halves:
        """Of the weights as they are now; kept until these change."""
        m, b, weights = self.module, self.module.kv_b_proj, self.weights
        binding = self.binding
        if binding is None or not binding.holds(*weights) or binding.made.into.dtype != dtype:
            weight = dense_linear(b, dtype).weight if isinstance(b, PackedLinear) else b.weight
            heads = weight.detach().to(dtype).view(-1, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
            a, out = heads.split((m.qk_nope_head_dim, m.v_head_dim), 1)
            made = Halves(into=a.transpose(1, 2).contiguous(), out=out.contiguous())
            binding = self.binding = Binding(made, *weights)
        return binding.made

    def query(self, query: Tensor, halves: Halves) -> Tensor:
        """[B, heads, 1, nope + rope] -> [B, heads, 1, rank + rope]."""
        nope, rope = torch.split(query, [self.module.qk_nope_head_dim, self.module.qk_rope_head_dim], -1)
        into = dense_heads(nope[:, :, 0].transpose(0, 1).contiguous(), halves.into)
        return torch.cat((into.transpose(0, 1)[:, :, None], rope), -1)

    def values(self, sums: Tensor, halves: Halves) -> Tensor:
        """Sums of latents [B, 1, heads, rank + rope], the last of which are none -> [B, 1, heads, v]."""
        found = sums[:, 0, :, : self.module.kv_lora_rank].transpose(0, 1).contiguous()
        return dense_heads(found, halves.out).transpose(0, 1)[:, None]


def latents_of(module: nn.Module, key: Tensor) -> Latents | None:
    """Whether these keys are what a module's `expand_kv` left as it was."""
    if torch.compiler.is_compiling():
        return None
    found = module.__dict__.get("expand_kv")
    return found if isinstance(found, Latents) and found.left is not None and found.left() is key else None


def attend_to_latents(model: PreTrainedModel, wanted: str) -> None:
    """Let the modules of a model that have latents leave them for the attention of that name."""
    for module in modules_that_run(model):
        if all(hasattr(module, name) for name in NAMES):
            module.expand_kv = Latents(module, wanted)  # type: ignore[assignment]
