"""Random files for llama.cpp with the shapes of `synthetic.write_mixtral` and `whole_models`: Q3_K, 3.44 bits a weight.

pip install gguf
python -m benchmarks.lib.gguf FILE --layers 6
python -m benchmarks.lib.gguf FILE --shape deepseek --layers 4
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 32000
VALUES, BYTES = 256, 110
"""Of a block of Q3_K: 32 bytes of high bits, 64 of low bits, 12 of scales, a scale of all in fp16."""
SMALL_VALUES, SMALL_BYTES = 32, 18
"""Of a block of IQ4_NL, which llama.cpp takes where rows are no multiple of 256: a scale in fp16, 16 bytes of codes."""
STEP = np.float16(5e-4)
"""That makes weights of a standard deviation near 0.02."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """architecture: llama.cpp's    shared: experts that all tokens use    keys: heads of keys and values

    head: width of a head where its heads together are wider than the model, and have norms
    """

    architecture: str
    hidden: int
    intermediate: int
    experts: int
    active: int
    heads: int
    keys: int
    shared: int = 0
    head: int | None = None

    @property
    def width(self) -> int:
        """Of a head."""
        return self.head or self.hidden // self.heads


SHAPES = {
    "mixtral": Shape(
        architecture="llama", hidden=4096, intermediate=14336, experts=8, active=2, heads=32, keys=8
    ),
    "deepseek": Shape(
        architecture="deepseek",
        hidden=2048,
        intermediate=1408,
        experts=64,
        active=6,
        heads=16,
        keys=16,
        shared=2,
    ),
    "qwen3": Shape(
        architecture="qwen3moe",
        hidden=2048,
        intermediate=768,
        experts=128,
        active=8,
        heads=32,
        keys=4,
        head=128,
    ),
}


def expert_bytes(layers: int) -> int:
    """Of all experts of a file of Mixtral's shape."""
    s = SHAPES["mixtral"]
    return layers * s.experts * 3 * s.hidden * s.intermediate // VALUES * BYTES


def blocks(*shape: int) -> np.ndarray:
    """A random tensor [.., K] as rows of blocks [.., bytes] uint8."""
    values, nbytes = (VALUES, BYTES) if shape[-1] % VALUES == 0 else (SMALL_VALUES, SMALL_BYTES)
    data = np.random.default_rng(1).integers(
        0, 256, (*shape[:-1], shape[-1] // values, nbytes), dtype=np.uint8
    )
    at = slice(-2, None) if nbytes == BYTES else slice(0, 2)
    data[..., at] = np.frombuffer(STEP.tobytes(), np.uint8)
    return data.reshape(*shape[:-1], -1)


def tokens() -> tuple[list[bytes], list[int]]:
    """A vocabulary that llama.cpp loads, and the types of its entries."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = itertools.chain.from_iterable(itertools.product(letters, repeat=n) for n in itertools.count(1))
    found = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
    count = VOCABULARY - len(found)
    found += ["".join(word).encode() for word in itertools.islice(words, count)]
    return found, [2, 3, 3, *[6] * 256, *[1] * count]


def layer(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The quantized tensors of a layer, with their shapes."""
    queries, keys = s.width * s.heads, s.width * s.keys
    yield from (("attn_q", (queries, s.hidden)), ("attn_output", (s.hidden, queries)))
    yield from ((f"attn_{name}", (keys, s.hidden)) for name in "kv")
    kinds: dict[str, tuple[tuple[int, ...], int]] = {"exps": ((s.experts,), s.intermediate)}
    if s.shared:
        kinds["shexp"] = ((), s.shared * s.intermediate)
    for kind, (stack, rows) in kinds.items():
        yield from ((f"ffn_{name}_{kind}", (*stack, rows, s.hidden)) for name in ("gate", "up"))
        yield f"ffn_down_{kind}", (*stack, s.hidden, rows)


def write(path: Path, s: Shape, layers: int) -> None:
    """Write the file; all layers and experts have the same bytes."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, s.architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(s.intermediate)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.keys)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(s.width)
    writer.add_key_length(s.width)
    writer.add_value_length(s.width)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.active)
    if s.shared or s.head:
        writer.add_expert_feed_forward_length(s.intermediate)
    if s.shared:
        writer.add_expert_shared_count(s.shared)
        writer.add_expert_weights_scale(1.0)
        writer.add_leading_dense_block_count(0)
    writer.add_vocab_size(VOCABULARY)
    words, types = tokens()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(VOCABULARY)])
    writer.add_token_types(types)
    one = np.ones(s.hidden, np.float32)
    words_ = blocks(VOCABULARY, s.hidden)
    router = np.random.default_rng(2).standard_normal((s.experts, s.hidden), np.float32) * 0.02
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", words_, raw_dtype=kinds.Q3_K)
    writer.add_tensor("output_norm.weight", one)
    quantized = [(name, shape, blocks(*shape)) for name, shape in layer(s)]
    for i in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", one)
        for name in ("attn_q_norm", "attn_k_norm") if s.head else ():
            writer.add_tensor(f"blk.{i}.{name}.weight", one[: s.head])
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", np.roll(router, i, 1))
        for name, shape, data in quantized:
            kind = kinds.Q3_K if shape[-1] % VALUES == 0 else kinds.IQ4_NL
            writer.add_tensor(f"blk.{i}.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("file", type=Path)
    options.add_argument("--shape", choices=list(SHAPES), default="mixtral")
    options.add_argument("--layers", type=int, default=6)
    chosen = options.parse_args()
    write(chosen.file, SHAPES[chosen.shape], chosen.layers)


if __name__ == "__main__":
    main()
