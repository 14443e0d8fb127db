"""What to calibrate on: windows of token ids, drawn from a text by a seed."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trilobite.checkpoint.roles import text_config
from trilobite.checkpoint.source import Source
from trilobite.errors import CalibrationError, CheckpointError, MissingExtraError

if TYPE_CHECKING:  # brings transformers along
    from trilobite.models.pairs import Pair

SAMPLES = 128
CONTEXT = 2048
"""Longest window that is taken by default; models that are made for less get theirs."""
CHARACTERS = 8
"""Characters per token to begin with when a window is cut from a long text."""
PROPAGATIONS = ("quantized", "original")
PAPER = "paper-"
FINETUNES = ("block", "full", f"{PAPER}block", f"{PAPER}full")
MEMORY = 8 * 2**30


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How to calibrate. All but `memory` and the folders is part of a run's identity.

    text: a UTF-8 text file, a .jsonl or .parquet file with a column "text", or a folder of such files
    target: for encoder-decoders, the translation of the text: two UTF-8 files whose lines belong together
    samples, context: windows or pairs (None = 128 or 8192), and tokens of each (0 = the model's own, at most 2048)
    propagate: what enters a block: outputs of the `quantized` blocks before it, or of the `original` ones
    memory: bytes for activations and Hessians; activations beyond a quarter of it lie in a mapped file
    save, hessians: a folder to keep Hessians in, or to take them from (original propagation only)
    finetune: train what is not codes: "" = no, `block` by block, or `full`: block by block, then the whole model;
    `paper-block`, `paper-full`: after each matrix of a block, those of it included that are not quantized yet
    sampled: in the place of a text, windows that the model writes itself (calibrate/sampled.py)
    """

    text: Path | None = None
    target: Path | None = None
    samples: int | None = None
    context: int = 0
    seed: int = 0
    propagate: str = "quantized"
    memory: int = MEMORY
    save: Path | None = None
    hessians: Path | None = None
    finetune: str = ""
    sampled: bool = False

    @property
    def brought(self) -> bool:
        """Whether the user has a text, or Hessians of one; else the model writes its own."""
        return bool(self.text or self.hessians)

    def __post_init__(self) -> None:
        """Take strings for paths, too."""
        for name in ("text", "target", "save", "hessians"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value))


@dataclass(frozen=True, kw_only=True)
class Windows:
    """ids: [S, T] int64    identity: what an interrupted run must have in common with its continuation.

    pairs: token ids of sentences and their translations, for encoder-decoders; ids are the sentences, padded, then
    """

    ids: Tensor
    identity: Mapping[str, Any]
    pairs: "Sequence[Pair]" = ()


def draw_windows(source: Source, calibration: Calibration) -> Windows:
    """Tokenise the calibration text and draw windows from it, the same ones for the same seed.

    A long text is cut into as many stretches as there are samples, and one window begins at a random word of each; of
    a short one all windows without overlap are taken, or as many of them as there are samples. Each begins with the
    token that the tokenizer begins a text with, if any.
    Raises CalibrationError for a text shorter than one window, and for a tokenizer that does not fit the model.
    """
    assert calibration.text is not None
    config = text_config(source)
    samples = SAMPLES if calibration.samples is None else calibration.samples
    context = window_length(source, calibration)
    text = _read(calibration.text)
    tokenizer = calibration_tokenizer(source)
    first = tokenizer("a", verbose=False).input_ids[:1]
    start = first if first and first[0] in tokenizer.all_special_ids else []

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        return ids

    chance = random.Random(calibration.seed)
    body = context - len(start)
    if len(text) > CHARACTERS * context * samples:
        rows = [r for part in _stretches(text, samples) if (r := _cut(part, body, encode, chance))]
    else:
        ids = encode(text)
        rows = [ids[i : i + body] for i in range(0, len(ids) - body + 1, body)]
        if not rows:
            raise CalibrationError(
                f"{calibration.text}: {len(ids)} tokens, a window needs {body}; give a longer text or a smaller "
                "--context"
            )
        rows = [rows[i] for i in sorted(chance.sample(range(len(rows)), min(samples, len(rows))))]
    if not rows:
        raise CalibrationError(f"{calibration.text}: no stretch of it holds a window of {body} tokens")
    windows = torch.tensor([start + row for row in rows], dtype=torch.int64)
    vocabulary = int(config.get("vocab_size") or 0)
    if vocabulary and int(windows.max()) >= vocabulary:
        raise CalibrationError(
            f"{source}: its tokenizer gives token {int(windows.max())}, the model's vocabulary has {vocabulary}; "
            "copy the tokenizer that belongs to this checkpoint"
        )
    return Windows(ids=windows, identity=_identity(windows, calibration))


def window_length(source: Source, calibration: Calibration) -> int:
    """Tokens of a window at most. Raises CalibrationError for settings that make no sense."""
    longest = int(text_config(source).get("max_position_embeddings") or CONTEXT)
    context = calibration.context or min(CONTEXT, longest)
    if not 2 <= context <= longest:
        raise CalibrationError(f"context {context}: the model takes 2 to {longest} tokens; change --context")
    if calibration.samples is not None and calibration.samples < 1:
        raise CalibrationError(f"{calibration.samples} samples: expected at least one; change --samples")
    return context


def _identity(windows: Tensor, calibration: Calibration) -> dict[str, Any]:
    """What makes two calibrations the same: the tokens themselves, and what flows from block to block."""
    digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
    samples, context = windows.shape
    return {
        "digest": digest,
        "samples": samples,
        "context": context,
        "seed": calibration.seed,
        "propagate": calibration.propagate,
    }


def _stretches(text: str, count: int) -> Iterator[str]:
    for i in range(count):
        yield text[len(text) * i // count : len(text) * (i + 1) // count]


def _cut(part: str, length: int, encode: Any, chance: random.Random) -> list[int]:
    """`length` tokens from a random word of a stretch on; [] where it holds too few."""
    room = max(1, len(part) - CHARACTERS * length)
    begin = chance.randrange(room)
    space = part.find(" ", begin)
    begin = space + 1 if 0 <= space < room else begin
    size = CHARACTERS * length
    while True:
        first = max(0, min(begin, len(part) - size))
        ids: list[int] = encode(part[first : first + size])
        if len(ids) >= length:
            return ids[:length]
        if size >= len(part):
            return []
        size *= 2


def calibration_tokenizer(source: Source) -> Any:
    """The tokenizer beside a checkpoint. Raises CalibrationError when there is none."""
    from trilobite.models.auto import read_tokenizer  # brings transformers along

    try:
        return read_tokenizer(source.path)
    except CheckpointError as e:
        raise CalibrationError(f"{e}; calibration needs them beside the weights") from e


def _read(path: Path) -> str:
    """All text of a file or a folder. Raises CalibrationError, MissingExtraError."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".txt", ".md", ".jsonl", ".parquet"))
        if not files:
            raise CalibrationError(f"{path}: no .txt, .jsonl or .parquet file; give a text to calibrate on")
        return "\n\n".join(_read(p) for p in files)
    if not path.is_file():
        raise CalibrationError(
            f"{path}: no such file or folder; calibration data is never downloaded: give a text file, a .jsonl or "
            ".parquet file, or a folder of them"
        )
    if path.suffix == ".parquet":
        return "\n\n".join(_parquet(path))
    try:
        text = path.read_bytes().decode()
    except OSError as e:
        raise CalibrationError(f"{path}: cannot be read ({e.strerror}); give a UTF-8 text file") from e
    except UnicodeDecodeError as e:
        raise CalibrationError(f"{path}: not UTF-8 at byte {e.start}; convert it with iconv") from e
    return "\n\n".join(_records(path, text)) if path.suffix == ".jsonl" else text


def _records(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            raise CalibrationError(f"{path}: line {number} is not JSON; expected one object a line") from e
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise CalibrationError(f'{path}: line {number} has no string "text"; expected {{"text": …}}')
        yield row["text"]


def _parquet(path: Path) -> list[str]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError as e:
        raise MissingExtraError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from e
    try:
        column: list[Any] = parquet.read_table(path, columns=["text"]).column("text").to_pylist()
    except (OSError, KeyError, ValueError, ArrowException) as e:
        raise CalibrationError(f'{path}: no readable column "text"; expected a parquet file with one') from e
    return [row for row in column if isinstance(row, str)]
