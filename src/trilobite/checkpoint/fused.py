"""What a checkpoint has to be like for vLLM, which runs several matrices as one; and what is said where it is not."""

from collections.abc import Collection, Mapping, Sequence

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Linear layers of vLLM, and the matrices of checkpoints that each runs together."""


def refuse_lattice(name: str, bits: int) -> str:
    """What is said of a matrix in a lattice format."""
    return (
        f"{name}: is in a lattice format (QuIP#), which vLLM cannot run: compress the original with --for vllm and a "
        f"recipe of integers, for example --recipe super{max(2, bits)}"
    )


def partly_packed(layer: str, packed: Collection[str], names: Sequence[str]) -> str:
    """What is said of matrices that vLLM runs as one, some of which are packed."""
    rest = " and ".join(name.rpartition(".")[2] for name in names if name not in packed)
    return (
        f"{layer}: {rest} in 16 bit beside packed matrices, all of which vLLM runs as one: compress the original with "
        "--for vllm and a recipe that treats them alike, for example --recipe super3"
    )
