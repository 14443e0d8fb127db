"""What can be wrong with a file of a checkpoint: seeded changes of bytes, headers, JSON and the folder itself."""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e308, 10**9, 2**31, 2**63, -(2**63), 10**30, float("nan"), float("inf"),
    "", "x", "bfloat16", "../../etc/passwd", "/dev/zero", "\ud800", "\x00", "é" * 50, "{{", "{% raise %}",
    [], {}, [[]], [None], {"a": 1}, [1, "x"], [-1, 2**40], ["model"], {"model_type": "mixtral"},
]  # fmt: skip
"""Values that take the place of others in JSON."""


def damage(folder: Path, chance: random.Random, *, endless: bool) -> str:
    """Change one file of `folder`, or two; returns what was done. endless: by pipes and devices, too."""
    done = [_once(folder, chance, endless)]
    if chance.random() < 0.15:
        done.append(_once(folder, chance, endless))
    return "; ".join(done)


def _once(folder: Path, chance: random.Random, endless: bool) -> str:
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.is_symlink())
    tensors = [p for p in files if p.suffix == ".safetensors"]
    texts = [p for p in files if p.suffix == ".json"]
    kind = chance.random()
    if kind < 0.35 and tensors:
        path, how = chance.choice(tensors), chance.choice(HEADERS)
        return f"{path.name}: {how(path, chance)}"
    if kind < 0.75 and texts:
        path, how = chance.choice(texts), chance.choice(JSONS)
        return f"{path.name}: {how(path, chance)}"
    if not files:
        return "nothing is left"
    path, how = (
        chance.choice(files),
        chance.choice(BYTES if kind < 0.93 else PLACES if endless else PLACES[2:]),
    )
    return f"{path.name}: {how(path, chance)}"


# Bytes


def _flip(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    if not data:
        return "empty already"
    head = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    most = min(len(data), head) if chance.random() < 0.5 else len(data)
    spot, bit = chance.randrange(max(1, most)), chance.randrange(8)
    data[spot] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {spot} flipped"


def _noise(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    spot, length = chance.randrange(len(data) + 1), chance.choice((1, 8, 100, 5000))
    data[spot : spot + length] = chance.randbytes(length)
    path.write_bytes(data)
    return f"{length} random bytes at {spot}"


def _cut(path: Path, chance: random.Random) -> str:
    size = path.stat().st_size
    left = chance.choice((0, 1, 7, 8, 9, size // 2, max(0, size - 1), chance.randrange(size + 1)))
    os.truncate(path, min(left, size))
    return f"cut to {left} bytes"


def _append(path: Path, chance: random.Random) -> str:
    extra = chance.choice((b"\0", b"{}", b"\n", chance.randbytes(100), bytes(5000)))
    with path.open("ab") as file:
        file.write(extra)
    return f"{len(extra)} bytes more"


def _zeros(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    spot = chance.randrange(len(data) + 1)
    data[spot : spot + 4096] = bytes(len(data[spot : spot + 4096]))
    path.write_bytes(data)
    return f"zeros from {spot} on"


BYTES: list[Callable[[Path, random.Random], str]] = [_flip, _flip, _flip, _noise, _cut, _append, _zeros]


# Where files lie


def _remove(path: Path, chance: random.Random) -> str:
    path.unlink()
    return "removed"


def _link(path: Path, chance: random.Random) -> str:
    target = chance.choice((path.name, "nowhere", ".", "/dev/zero", "/dev/full", "/proc/self/mem"))
    path.unlink()
    path.symlink_to(target)
    return f"a link to {target}"


def _folder(path: Path, chance: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def _pipe(path: Path, chance: random.Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a pipe that nobody writes"


def _rename(path: Path, chance: random.Random) -> str:
    name = chance.choice(
        ("model.safetensors", f"{path.name}.bak", "model-00001-of-00009.safetensors", "x.bin")
    )
    path.rename(path.with_name(name))
    return f"renamed to {name}"


PLACES: list[Callable[[Path, random.Random], str]] = [_link, _pipe, _remove, _folder, _rename]


# Headers of safetensors files


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _edit(change: Callable[[dict[str, Any], random.Random], str]) -> Callable[[Path, random.Random], str]:
    def apply(path: Path, chance: random.Random) -> str:
        try:
            header, data = _header(path)
            said = change(header, chance)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error):
            return "damaged too much already"
        text = json.dumps(header).encode("utf-8", "surrogatepass")
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return said

    return apply


def _some(header: dict[str, Any], chance: random.Random) -> str:
    return chance.choice(sorted(k for k in header if k != "__metadata__"))


def _field(header: dict[str, Any], chance: random.Random) -> str:
    name, key = _some(header, chance), chance.choice(("dtype", "shape", "data_offsets"))
    header[name][key] = chance.choice(
        [*ODD, "F32", "U8", "I64", "F64", "F8_E4M3", "I16", [0], [1, 1], [2**62, 4]]
    )
    return f"{key} of {name} is {header[name][key]!r}"


def _dtype(header: dict[str, Any], chance: random.Random) -> str:
    name = _some(header, chance)
    header[name]["dtype"] = {"BF16": "F16", "F16": "I16", "U8": "I8", "F32": "I32"}.get(
        header[name]["dtype"], "U8"
    )
    return f"dtype of {name} is {header[name]['dtype']}"


def _shape(header: dict[str, Any], chance: random.Random) -> str:
    name = _some(header, chance)
    shape = header[name]["shape"]
    if len(shape) > 1 and chance.random() < 0.5:
        shape[0], shape[-1] = shape[-1], shape[0]
    elif shape and shape[0] % 2 == 0:
        shape[:1] = [shape[0] // 2, 2] if chance.random() < 0.5 else [shape[0] // 2]
    else:
        shape.append(1)
    return f"shape of {name} is {shape}"


def _offsets(header: dict[str, Any], chance: random.Random) -> str:
    name = _some(header, chance)
    shift = chance.choice((-(2**40), -64, -1, 1, 64, 2**40))
    header[name]["data_offsets"] = [o + shift for o in header[name]["data_offsets"]]
    return f"{name} moved by {shift}"


def _swap(header: dict[str, Any], chance: random.Random) -> str:
    name = _some(header, chance)
    same = [
        n
        for n in sorted(header)
        if n not in ("__metadata__", name) and header[n]["shape"] == header[name]["shape"]
    ]
    other = chance.choice(same)
    header[name], header[other] = header[other], header[name]
    return f"{name} and {other} swapped"


def _name(header: dict[str, Any], chance: random.Random) -> str:
    name = _some(header, chance)
    new = chance.choice(
        ("", "x", "model.layers.99.mlp.weight", "../x", "\ud800", "a" * 10000, f"{name}_scale", "__proto__")
    )
    header[new] = header.pop(name)
    return f"{name} is called {new[:40]!r}"


def _drop(header: dict[str, Any], chance: random.Random) -> str:
    """The tensor goes, with a hole in its place."""
    name = _some(header, chance)
    del header[name]
    return f"{name} dropped"


def _add(header: dict[str, Any], chance: random.Random) -> str:
    header["more"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return "an empty tensor more"


def _metadata(header: dict[str, Any], chance: random.Random) -> str:
    header["__metadata__"] = chance.choice(
        [*ODD, {"format": 3}, {"rows": "[]"}, {"rows": '{"x": -1}'}, {"rows": "{"}]
    )
    return f"metadata {header['__metadata__']!r}"


def _length(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    length = chance.choice(
        (0, 1, 2**63, 2**64 - 1, 100_000_001, int.from_bytes(data[:8], "little") + chance.choice((-1, 1)))
    )
    data[:8] = struct.pack("<Q", length % 2**64)
    path.write_bytes(data)
    return f"a header of {length} bytes"


def _twice(path: Path, chance: random.Random) -> str:
    try:
        header, data = _header(path)
        name = _some(header, chance)
    except (ValueError, IndexError, TypeError, AttributeError, struct.error):
        return "damaged too much already"
    text = (json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return f"{name} twice"


HEADERS: list[Callable[[Path, random.Random], str]] = [
    *map(_edit, (_field, _field, _dtype, _shape, _offsets, _swap, _name, _drop, _add, _metadata)),
    _length,
    _twice,
]


# JSON


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values are, down to a depth that tokenizers do not drown."""
    if isinstance(value, dict):
        inner = list(value.items())[:200]
    else:
        inner = list(enumerate(value))[:50] if isinstance(value, list) else []
    return [at, *(path for key, part in inner for path in _paths(part, (*at, key)))] if len(at) < 4 else [at]


def _value(path: Path, chance: random.Random) -> str:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "no JSON any more"
    places = _paths(found)
    place = chance.choice(places[1:] or places)
    new = chance.choice(ODD)
    if not place:
        found = new
    else:
        part = found
        for key in place[:-1]:
            part = part[key]
        if chance.random() < 0.25:
            del part[place[-1]]
            new = "gone"
        else:
            part[place[-1]] = new
    path.write_bytes(json.dumps(found).encode("utf-8", "surrogatepass"))
    return f"{'.'.join(map(str, place))[:80]} is {new!r}"


def _key(path: Path, chance: random.Random) -> str:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "no JSON any more"
    if not isinstance(found, dict):
        return "no object any more"
    new = chance.choice(KEYS)
    found[new] = chance.choice(ODD)
    path.write_bytes(json.dumps(found).encode("utf-8", "surrogatepass"))
    return f"{new} is {found[new]!r}"


KEYS = (
    "auto_map", "quantization_config", "architectures", "model_type", "num_hidden_layers", "num_local_experts", "dtype",
    "rope_parameters", "rope_scaling", "torch_dtype", "sliding_window", "text_config", "layer_types", "chat_template",
    "tokenizer_class", "added_tokens_decoder", "eos_token_id", "max_length", "num_beams", "do_sample", "temperature",
    "stop_strings", "id2label", "pad_token_id", "head_dim", "tie_word_embeddings", "attn_implementation", "checksums",
    "_attn_implementation", "weight_map", "tensors", "format_version", "vocab_size", "initializer_range", "",
    "transformers_weights",
)  # fmt: skip


WHOLE = (
    b"", b"null", b"[]", b"{}", b"3", b'"x"', b"{", b"NaN", b"{}{}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"1" * 5000,
    b"[" * 200_000, b'{"a":' * 100_000,
)  # fmt: skip


def _whole(path: Path, chance: random.Random) -> str:
    text = chance.choice(WHOLE)
    path.write_bytes(text)
    return f"is {text[:12]!r}"


JSONS: list[Callable[[Path, random.Random], str]] = [_value, _value, _value, _value, _key, _key, _whole]
