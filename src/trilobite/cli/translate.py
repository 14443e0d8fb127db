"""translate: sentences from standard input, one a line, into another language."""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.cli.console import Progress, note, quiet
from trilobite.cli.memory import GpuMemoryOption, MemoryOption, load_within, place_of
from trilobite.cli.options import ActivationsOption, DeviceOption, usable_device
from trilobite.cli.run import ModelArgument
from trilobite.cli.threads import wait_briefly
from trilobite.errors import DestinationError
from trilobite.signals import tell_state

if TYPE_CHECKING:
    from trilobite.runtime.translate.journal import TranslationFile
    from trilobite.runtime.translate.translator import Search, Translation, Translator

WINDOW = 20
"""Batches whose sentences are sorted by length together, and printed together."""

ToOption = Annotated[
    str | None,
    typer.Option(
        "--to", help="Target language: de, or the checkpoint's own code (deu_Latn).", metavar="LANGUAGE"
    ),
]
FromOption = Annotated[
    str | None,
    typer.Option("--from", help="Source language; default: the checkpoint's.", metavar="LANGUAGE"),
]
BeamsOption = Annotated[int, typer.Option("--beams", help="Beams; 1 = greedy.", min=1, metavar="K")]
SentencesOption = Annotated[
    int, typer.Option("--batch", help="At most so many sentences at a time.", min=1, metavar="N")
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--batch-tokens", help="Also at most so many tokens at a time, padding included.", min=1, metavar="N"
    ),
]
LengthPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--length-penalty",
        help="Above 1 prefers longer translations; default: the checkpoint's.",
        metavar="X",
    ),
]
RatioOption = Annotated[
    float,
    typer.Option(
        "--max-ratio",
        help="Most tokens of a translation for each of its source, and 10 more.",
        metavar="R",
    ),
]


def translate(
    model: ModelArgument,
    to: ToOption = None,
    source: FromOption = None,
    beams: BeamsOption = 5,
    batch: SentencesOption = 64,
    batch_tokens: TokensOption = None,
    n_best: Annotated[
        int | None,
        typer.Option(
            "--n-best",
            help="The N best of each sentence, as `number ||| text ||| score`.",
            min=1,
            metavar="N",
        ),
    ] = None,
    length_penalty: LengthPenaltyOption = None,
    max_ratio: RatioOption = 3.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write to this file; where part of it is there, continue.",
            metavar="FILE",
        ),
    ] = None,
    pruning: Annotated[
        bool,
        typer.Option("--pruning/--no-pruning", help="Whether finished sentences leave their batch."),
    ] = True,
    device: DeviceOption = "auto",
    activations: ActivationsOption = "exact",
    memory: MemoryOption = "auto",
    gpu_memory: GpuMemoryOption = None,
) -> None:
    """Translate the lines of standard input with an encoder-decoder model.

    One sentence a line, in UTF-8; empty lines stay empty. Translations come in the order of the input, speed and
    progress go to standard error.

    \b
    Example: trilobite translate nllb-moe-3bit --from en --to de --beams 5 < in.txt > out.txt
    """
    wait_briefly()
    from trilobite.runtime.load import load_tokenizer
    from trilobite.runtime.translate.translator import Search, Translator

    search = Search(
        beams=beams,
        n_best=n_best or 1,
        length_penalty=length_penalty,
        max_ratio=max_ratio,
        batch=batch,
        batch_tokens=batch_tokens,
        pruning="compact" if pruning else "off",
    )
    with quiet():
        on = usable_device(place_of(device, memory, gpu_memory))
        sentences = _read(output)
        file = _begun(output, sentences, _made_of(model, to, source, search, n_best, sentences))
        if file is not None and file.complete:
            note(f"{output}: is complete already; delete it to translate again")
            return
        loaded = load_within(model, memory, gpu_memory=gpu_memory, device=on, activations=activations)
        translator = Translator(loaded, load_tokenizer(model), to=to, source=source, search=search)
        if to and not translator.direction.declared:
            note(f"this model does not say its languages: --to {to} is taken for the one it was made for")
        with Progress(prints=file is None) as bars:
            _Run(translator, sentences, file, n_best, bars).all()


def _read(output: Path | None) -> list[str]:
    """The lines of standard input. Raises PromptError for bytes that are no text."""
    from trilobite.models.lines import read_lines

    if output is not None and output.exists() and os.path.samestat(os.fstat(0), output.stat()):
        raise DestinationError(f"{output}: is the input itself; choose another file")
    if sys.stdin.isatty():
        note("one sentence a line; Ctrl-D ends the input")
    return read_lines(sys.stdin.buffer.read())


def _made_of(
    model: str, to: str | None, source: str | None, search: "Search", n_best: int | None, sentences: list[str]
) -> dict[str, Any]:
    """All that a translation depends on."""
    return {
        "model": str(Path(model).resolve()) if Path(model).exists() else model,
        "input": hashlib.sha256("\n".join(sentences).encode()).hexdigest(),
        "--to": to,
        "--from": source,
        "--beams": search.beams,
        "--n-best": n_best,
        "--length-penalty": search.length_penalty,
        "--max-ratio": search.max_ratio,
    }


def _begun(output: Path | None, sentences: list[str], made_of: dict[str, Any]) -> "TranslationFile | None":
    from trilobite.runtime.translate.journal import TranslationFile

    if output is None:
        return None
    each = made_of["--n-best"] or 1
    file = TranslationFile(output, made_of, sentences=len(sentences), each=each)
    if not file.complete and file.done + len(file.found):
        note(f"{output}: {file.done + len(file.found)} of {len(sentences)} sentences are there; continuing")
    return file


class _Run:
    """One call: windows of sentences, each sorted into batches, printed in the order of the input."""

    def __init__(
        self,
        translator: "Translator",
        sentences: list[str],
        file: "TranslationFile | None",
        n_best: int | None,
        bars: Progress,
    ) -> None:
        self.translator, self.file, self.n_best, self.bars = translator, file, n_best, bars
        self.ids = translator.encode(sentences)
        self.kept = file.done if file is not None else 0
        known = {} if file is None else file.found
        self.left = sum(len(row) for i, row in enumerate(self.ids) if i >= self.kept and i not in known) or 1
        self.read = self.sentences = self.tokens = 0
        self.started = time.monotonic()

    def all(self) -> None:
        """Translate everything that is not there yet."""
        if self.file is not None:
            self.file.begin()
        tell_state(self._state)
        for start in range(self.kept, len(self.ids), WINDOW * self.translator.search.batch):
            self._window(start, min(start + WINDOW * self.translator.search.batch, len(self.ids)))
        tell_state(None)
        if self.file is not None:
            self.file.finish()
        seconds = time.monotonic() - self.started
        note(f"{self.sentences} sentences, {self.tokens} tokens in {seconds:.1f} s: {self._speed()}")

    def _window(self, start: int, stop: int) -> None:
        known = {} if self.file is None else self.file.found
        places = [place for place in range(start, stop) if place not in known]
        found: dict[int, list[str]] = {}
        for batch, translations in self.translator.run([self.ids[place] for place in places]):
            for i, translation in zip(batch, translations, strict=True):
                found[places[i]] = self._lines(places[i], translation)
                if self.file is not None:
                    self.file.note(places[i], found[places[i]])
                self.read += len(self.ids[places[i]])
                self.tokens += translation.tokens
            self.sentences += len(batch)
            self.bars.show("translate", self.read, self.left, self._speed())
        if self.file is not None:
            self.file.advance()
        else:
            text = "".join(line + "\n" for place in range(start, stop) for line in found[place])
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()
        self.kept = stop

    def _lines(self, place: int, translation: "Translation") -> list[str]:
        if self.n_best is None:
            return translation.texts[:1]
        pairs = zip(translation.texts, translation.scores, strict=True)
        return [f"{place} ||| {text} ||| {score:.4f}" for text, score in pairs]

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-9)
        return f"{self.sentences / seconds:.1f} sentences/s, {self.tokens / seconds:.0f} tokens/s"

    def _state(self) -> str:
        if self.file is None:
            return f"{self.kept} of {len(self.ids)} sentences are printed; -o FILE would be continued"
        done = self.file.done + len(self.file.found)
        return f"{done} of {len(self.ids)} sentences are done; run the same command to continue"
