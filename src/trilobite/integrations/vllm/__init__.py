"""vLLM runs packed checkpoints unchanged: the plugin behind the entry point `vllm.general_plugins`.

Arithmetic is ours, everything else vLLM's. vLLM hands every layer its tensors as they are stored; a layer keeps them,
cuts out this rank's part when all are there (`formats/slicing.py`), and runs them by `kernels/ops.py`: the CPU engine
from the mapped file, or Triton.

    manifest.py   which layers are packed, and what vLLM cannot run        (needs no vLLM)
    threads.py    our threads on the cores that vLLM bound its own to      (needs no vLLM)
    layers.py     parts of layers, and calls that run them; the operators  (needs no vLLM)
    config.py     what vLLM asks for: which layer loads and runs how
    methods.py    linear layers, the head, and experts
"""


def register() -> None:
    """Make vLLM know `quant_method: trilobite`; called in each of its processes."""
    from trilobite.integrations.vllm import config  # noqa: F401 - registers when it is imported
