"""Whether a model still is what it was when a step of it was recorded.

Hooks, parameters, buffers and submodules are looked through only after something of that kind was registered anywhere in
the process, which torch counts or tells: between two tokens, memory of a thousand dictionaries is far away. The rest is
looked through by loops that are not Python's: these wait for several of them at a time.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from trilobite.kernels import ops
from trilobite.runtime.modules.residence import PackedModule

_TRAINING, _RESIDENCE, _BINDING = itemgetter("training"), itemgetter("residence"), attrgetter("binding")


class _Registrations:
    """How many parameters, buffers and modules have got into modules since somebody watches."""

    count = 0
    counted = False

    @classmethod
    def count_on(cls) -> None:
        """Let torch tell of each."""
        if not cls.counted:
            cls.counted = True
            torch_modules.register_module_parameter_registration_hook(cls._one)
            torch_modules.register_module_buffer_registration_hook(cls._one)
            torch_modules.register_module_module_registration_hook(cls._one)

    @classmethod
    def _one(cls, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # a graph that counts would be made anew for every count
            cls.count += 1


class Watch:
    """What a recorded step depends on, as it is now."""

    def __init__(self, model: PreTrainedModel, called: Sequence[nn.Module], fixed: Sequence[Tensor]) -> None:
        """called: the modules that ran    fixed: tensors whose memory or values the step has."""
        _Registrations.count_on()
        self.model, self.fixed = model, fixed
        modules = list(dict.fromkeys(called))
        others = [m for m in modules if m is not model]
        self.own, self.training = [m.__dict__ for m in others], [m.training for m in others]
        packed = [m for m in modules if isinstance(m, PackedModule) and m.residence is not None]
        self.packed, self.residences = [m.__dict__ for m in packed], [m.residence for m in packed]
        self.bindings = list(map(_BINDING, self.residences))
        self.binding: ops.Binding[None] = ops.Binding(None, *fixed)
        self.hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
        self.hooks += [torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks]
        self.held: list[tuple[dict[str, Any], str, Any]] = []
        for m in modules:
            holders: list[dict[str, Any]] = [m._parameters, m._buffers]
            if not isinstance(m, PackedModule):
                holders.append(m._modules)
            self.held += [(holder, name, value) for holder in holders for name, value in holder.items()]
        self.look_at_configs()
        self.seen = self._seen()

    def look_at_configs(self) -> None:
        """Take settings as they are now for those of the recorded step."""
        self.configs = [(vars(c), dict(vars(c))) for c in {id(c): c for c in self._configs()}.values()]

    def _configs(self) -> tuple[Any, ...]:
        return self.model.config, self.model.config.get_text_config()

    @staticmethod
    def _seen() -> tuple[int, int]:
        return RemovableHandle.next_id, _Registrations.count

    def holds(self) -> bool:
        """Whether nothing has changed."""
        seen = self._seen()
        if seen != self.seen and not self._holds_all():
            return False
        self.seen = seen
        if any(map(contains, self.own, repeat("forward"))):
            return False
        if list(map(_TRAINING, self.own)) != self.training:
            return False
        if not all(map(is_, map(_RESIDENCE, self.packed), self.residences)):
            return False
        if not all(map(is_, map(_BINDING, self.residences), self.bindings)):
            return False
        with torch._C.DisableTorchFunctionSubclass():  # a router's weight would run Python for each question
            same = self.binding.holds(*self.fixed)
        return same and not self.model.training and all(now == then for now, then in self.configs)

    def _holds_all(self) -> bool:
        return not any(self.hooks) and all(holder.get(name) is value for holder, name, value in self.held)
