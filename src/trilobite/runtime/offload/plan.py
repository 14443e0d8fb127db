"""How a bound on memory is divided: what a model takes beside its experts, and how many of these fit in the rest."""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from trilobite.errors import OffloadError
from trilobite.runtime.latent import Latents
from trilobite.runtime.modules.experts import PackedExperts
from trilobite.runtime.offload.copies import CopyEngine

AUTO = "auto"
UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
ENGINE_BYTES = 48 * 2**20
"""Workspaces of the CPU engine and of torch, whatever the model."""
STAGED = 16 * 2**20
"""Bytes that staging buffers hold together, where that is more than two of them."""
GPU_STAGING = 4
"""Staging buffers of a GPU where nobody says: the paper's b."""
HEADROOM = 0.9
"""Share of the free memory that `auto` takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuMemory:
    """How a GPU, or what stands in its place, gets its experts.

    memory: bytes there, for everything: weights that stay, experts, keys and values, activations
    engine: what copies; None: CUDA    slots: of all layers together; None: as many as fit
    share: let the host compute misses where that is faster than to copy them
    """

    memory: int
    engine: CopyEngine | None = None
    slots: int | None = None
    share: bool = True


@dataclass(frozen=True, kw_only=True)
class Offload:
    """How a model streams.

    memory: bytes for everything: the program, weights that stay, experts, keys and values, activations; None: no bound
    context: tokens of keys and values, and of the longest prompt    texts: that have some at the same time
    policy: of `POLICIES`
    ahead, guesses: speculative loading of so many experts a token, so many layers ahead; 0 guesses: none
    staging: buffers for guesses and prompts; None: few
    pool: one pool of slots even where each layer could have its own
    slots: of all layers together; None: as many as fit
    """

    memory: int | None
    context: int = 4096
    texts: int = 1
    policy: str = "lfru"
    ahead: int = 1
    guesses: int = 2
    staging: int | None = None
    pool: bool = False
    slots: int | None = None


def staging_of(settings: Offload, slot_bytes: int) -> int:
    """Buffers for guesses and prompts: as asked, or as many small ones as keep transfers going, two large ones."""
    return settings.staging or max(2, min(8, STAGED // slot_bytes))


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Bytes that experts do not get. program: what this process holds already."""

    program: int
    weights: int
    keys_and_values: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.program + self.weights + self.keys_and_values + self.activations


@dataclass(frozen=True, kw_only=True)
class Experts:
    """nbytes: of all    count: of them    active: A, which must fit at least    slot_bytes: the most that one needs."""

    nbytes: int
    count: int
    active: int
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """memory: bytes    slots, staging: how many experts fit    place: where, for people."""

    memory: int
    fixed: Fixed
    experts: Experts
    slots: int
    staging: int
    place: str

    @property
    def fits(self) -> bool:
        """Whether all experts fit, so that nothing needs to stream."""
        return self.slots >= self.experts.count

    def __str__(self) -> str:
        """One line for people."""
        f, experts = self.fixed, self.experts
        fixed = (
            f"{self.place} {_size(self.memory)}: program {_size(f.program)}, weights that stay {_size(f.weights)}, keys "
            f"and values {_size(f.keys_and_values)}, activations {_size(f.activations)}"
        )
        if self.fits:
            return f"{fixed}, all experts {_size(experts.nbytes)}: nothing needs to stream"
        slots = f"{self.slots} of {experts.count} experts {_size(self.slots * experts.slot_bytes)}"
        return f"{fixed}, {slots}, staging {_size(self.staging * experts.slot_bytes)}"


def divide(
    name: str, memory: int, fixed: Fixed, experts: Experts, *, slots: int | None, staging: int, place: str
) -> MemoryPlan:
    """Divide the memory of a place. name: of the model    slots: at most so many; None: as many as fit.

    Raises OffloadError with the smallest figure that works.
    """
    left, each = memory - fixed.total, experts.slot_bytes
    fit = experts.count if left >= experts.nbytes + each else left // each - staging
    fit = fit if slots is None else min(fit, slots)
    if fit < experts.active:
        needed = fixed.total + (staging + experts.active) * each
        raise OffloadError(
            f"{name}: {_size(memory)} of {place} do not suffice, the smallest that works is {-(-needed // 2**20)}MiB "
            f"(weights that stay {_size(fixed.weights)}, keys and values {_size(fixed.keys_and_values)}, one expert "
            f"{_size(each)}): ask for more, or for a shorter context"
        )
    return MemoryPlan(memory=memory, fixed=fixed, experts=experts, slots=fit, staging=staging, place=place)


def fixed_on_host(model: PreTrainedModel, settings: Offload, mapped: Container[int]) -> Fixed:
    """Of a model that runs on the host.

    mapped: addresses of tensors in mapped files; weights that lie elsewhere are part of the program already
    """
    context = within(model, settings.context)
    return Fixed(
        program=anonymous_bytes(),
        weights=sum(t.nbytes for t in _staying(model) if t.data_ptr() in mapped),
        keys_and_values=settings.texts * key_value_bytes(model, context),
        activations=activation_bytes(model, context),
    )


def fixed_beside_gpu() -> Fixed:
    """Of a model that runs on a GPU, on the host."""
    return Fixed(program=anonymous_bytes(), weights=0, keys_and_values=0, activations=ENGINE_BYTES)


def fixed_on_gpu(model: PreTrainedModel, settings: Offload, active: int, used: int | None) -> Fixed:
    """Of a model that runs on a GPU, there. active: A    used: what this process holds there already."""
    context = within(model, settings.context)
    hidden = model.config.get_text_config(decoder=True).hidden_size
    return Fixed(
        program=used or 0,
        weights=sum(t.nbytes for t in _staying(model)),
        keys_and_values=settings.texts * key_value_bytes(model, context),
        # What the experts make of each token is kept until it is added up.
        activations=activation_bytes(model, context) + 8 * context * active * hidden,
    )


def _staying(model: PreTrainedModel) -> Iterator[Tensor]:
    """Parameters and buffers that are not part of packed experts; shared ones once."""
    inside = {
        id(t)
        for m in model.modules()
        if isinstance(m, PackedExperts)
        for row in m.matrices()
        for matrix in row
        if matrix is not None
        for t in matrix.buffers()
    }
    seen = dict.fromkeys((*model.parameters(), *model.buffers()))
    return (t for t in seen if id(t) not in inside)


def key_value_bytes(model: PreTrainedModel, context: int) -> int:
    """Keys and values of one text of `context` tokens, as transformers keeps them; behind an encoder, of two.

    Where a model keeps latents: these, what a prompt makes of one layer's, and the halves that steps use in its place.
    """
    config = model.config.get_text_config(decoder=True)
    heads, size = config.num_attention_heads, model.dtype.itemsize
    if getattr(config, "kv_lora_rank", None):
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        both = heads * (config.qk_nope_head_dim + config.v_head_dim)
        width = both + heads * rope
        latents = sum(isinstance(m.__dict__.get("expand_kv"), Latents) for m in model.modules())
        if latents:
            return int((latents * ((rank + rope) * context + both * rank) + width * context) * size)
    else:
        dim = next(
            filter(None, (getattr(config, n, None) for n in ("head_dim", "d_kv"))),
            config.hidden_size // heads,
        )
        width = 2 * (getattr(config, "num_key_value_heads", None) or heads) * dim
    layers = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
    texts = 2 if model.config.is_encoder_decoder else 1
    return int(texts * layers * width * context * size)


def activation_bytes(model: PreTrainedModel, context: int) -> int:
    """What a prompt of `context` tokens needs at a time, in fp32 where the engine does."""
    config = model.config.get_text_config(decoder=True)
    sizes = (getattr(config, name, None) or 0 for name in ("intermediate_size", "d_ff", "encoder_ffn_dim"))
    widest = max(config.hidden_size, *sizes)
    return int(context * (8 * config.hidden_size + 4 * widest) * 4 + 12 * config.vocab_size + ENGINE_BYTES)


def automatic(model: PreTrainedModel, file_bytes: int, context: int) -> int | None:
    """A bound on memory for a model that the free memory does not hold; None where it does, or nobody knows.

    file_bytes: of the checkpoint
    """
    free, context = available_bytes(), within(model, context)
    needed = file_bytes + key_value_bytes(model, context) + activation_bytes(model, context)
    if free is None or needed <= HEADROOM * free:
        return None
    return int(HEADROOM * free) + anonymous_bytes()


def within(model: PreTrainedModel, context: int) -> int:
    """No more tokens than the model was made for."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(context, limit or context)


def parse_size(text: str | int) -> int:
    """`8GiB`, `8GB`, `8G`, `500M` or a number of bytes. Raises OffloadError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?)?b?\s*", str(text).lower())
    if match is None or not (found := int(float(match[1]) * UNITS[match[2] or ""])):
        raise OffloadError(f"memory {text!r}: expected a size such as 8GiB, 500MB, or auto")
    return found


def anonymous_bytes() -> int:
    """Memory of this process that no file backs; 0 where the system does not say."""
    return _kibibytes("/proc/self/status", "RssAnon") * 1024


def available_bytes() -> int | None:
    """Memory that this process could still get, by the system and by its control group; None where nobody says."""
    found = [n * 1024 for n in (_kibibytes("/proc/meminfo", "MemAvailable"),) if n]
    for limit, usage, statistics in _groups():
        try:
            most, used = int(limit.read_text()), int(usage.read_text())
            counts = dict(line.split() for line in statistics.read_text().splitlines())
        except (OSError, ValueError):  # no limit is called "max"
            continue
        cached = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
        found.append(max(0, most - used + cached))
    return min(found, default=None)


def _groups() -> Iterator[tuple[Path, Path, Path]]:
    """Files of limit, usage and statistics of every control group that this process is in, of both versions."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        for place in {folder / group.lstrip("/"), folder}:  # inside of a container only the latter is there
            yield place / names[0], place / names[1], place / "memory.stat"


def _kibibytes(path: str, key: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"
