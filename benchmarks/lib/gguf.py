"""A random file for llama.cpp with the shapes of `synthetic.write_mixtral`: Q3_K, 3.44 bits a weight.

pip install gguf
python -m benchmarks.lib.gguf FILE --layers 6
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, EXPERTS, ACTIVE, VOCABULARY = 4096, 14336, 8, 2, 32000
VALUES, BYTES = 256, 110
"""Of a block of Q3_K: 32 bytes of high bits, 64 of low bits, 12 of scales, a scale of all in fp16."""
STEP = np.float16(5e-4)
"""That makes weights of a standard deviation near 0.02."""


def expert_bytes(layers: int) -> int:
    """Of all experts of a file."""
    return layers * EXPERTS * 3 * HIDDEN * INTERMEDIATE // VALUES * BYTES


def blocks(*shape: int) -> np.ndarray:
    """A random tensor [.., K] as rows of blocks [.., bytes] uint8."""
    data = np.random.default_rng(1).integers(
        0, 256, (*shape[:-1], shape[-1] // VALUES, BYTES), dtype=np.uint8
    )
    data[..., -2:] = np.frombuffer(STEP.tobytes(), np.uint8)
    return data.reshape(*shape[:-1], -1)


def tokens() -> tuple[list[bytes], list[int]]:
    """A vocabulary that llama.cpp loads, and the types of its entries."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = itertools.chain.from_iterable(itertools.product(letters, repeat=n) for n in itertools.count(1))
    found = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
    count = VOCABULARY - len(found)
    found += ["".join(word).encode() for word in itertools.islice(words, count)]
    return found, [2, 3, 3, *[6] * 256, *[1] * count]


def write(path: Path, layers: int) -> None:
    """Write the file; all layers and experts have the same bytes."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q3_K
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(128)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(ACTIVE)
    writer.add_vocab_size(VOCABULARY)
    words, types = tokens()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(VOCABULARY)])
    writer.add_token_types(types)
    one = np.ones(HIDDEN, np.float32)
    wide, tall = blocks(EXPERTS, INTERMEDIATE, HIDDEN), blocks(EXPERTS, HIDDEN, INTERMEDIATE)
    square, narrow, words_ = blocks(HIDDEN, HIDDEN), blocks(1024, HIDDEN), blocks(VOCABULARY, HIDDEN)
    router = np.random.default_rng(2).standard_normal((EXPERTS, HIDDEN), np.float32) * 0.02
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", words_, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", one)
    for i in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", one)
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", np.roll(router, i, 1))
        for name, data in (
            ("attn_q", square),
            ("attn_k", narrow),
            ("attn_v", narrow),
            ("attn_output", square),
            ("ffn_gate_exps", wide),
            ("ffn_up_exps", wide),
            ("ffn_down_exps", tall),
        ):
            writer.add_tensor(f"blk.{i}.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("file", type=Path)
    options.add_argument("--layers", type=int, default=6)
    chosen = options.parse_args()
    write(chosen.file, chosen.layers)


if __name__ == "__main__":
    main()
