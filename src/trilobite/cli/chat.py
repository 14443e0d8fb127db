"""chat: a conversation, and its commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilobite.cli import run
from trilobite.cli.console import note, quiet
from trilobite.cli.memory import (
    AheadOption,
    GpuMemoryOption,
    GuessesOption,
    MemoryOption,
    Metrics,
    VerboseOption,
    load_within,
    place_of,
)
from trilobite.cli.options import ActivationsOption, DeviceOption
from trilobite.cli.terminal import Input, answer
from trilobite.errors import PromptError, TrilobiteError
from trilobite.signals import Patience

if TYPE_CHECKING:
    from trilobite.runtime.generate.chat import Chat
    from trilobite.runtime.generate.text import Generated

HELP = """\
/help          this
/system TEXT   set the system prompt; without TEXT show it, with - remove it
/reset         forget the conversation
/save FILE     write the conversation (JSON, as the page of `trilobite serve` imports it)
/load FILE     go on with one
/stats         tokens, speed, context
/quit          end (Ctrl-D)
End a line with \\ to go on in the next one, or write a block between lines of \"\"\". Ctrl-C stops an answer."""


def chat(
    model: run.ModelArgument,
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", help="At most so many tokens an answer.", min=1, metavar="N")
    ] = 256,
    seed: run.SeedOption = None,
    temperature: run.TemperatureOption = 0.0,
    top_p: run.TopPOption = 1.0,
    top_k: run.TopKOption = 0,
    repetition_penalty: run.PenaltyOption = None,
    stop: run.StopOption = None,
    device: DeviceOption = "auto",
    compiled: run.CompileOption = False,
    activations: ActivationsOption = "exact",
    memory: MemoryOption = "auto",
    gpu_memory: GpuMemoryOption = None,
    guesses: GuessesOption = 2,
    ahead: AheadOption = 1,
    verbose: VerboseOption = False,
) -> None:
    """Talk with a model.

    /help lists the commands: system prompt, reset, save and load, statistics. Ctrl-C stops an answer, /quit (or
    Ctrl-D) ends the conversation. Input may be piped, a message a line. Answers are formatted as Markdown in a
    terminal, unless NO_COLOR is set. A model without a chat template continues your text instead. A turn reads only
    what is new, unless the step is compiled.

    \b
    Example: trilobite chat mixtral-3bit --temperature 0.7
    """
    from trilobite.runtime.generate.chat import Chat
    from trilobite.runtime.generate.text import Sampling
    from trilobite.runtime.load import load_tokenizer

    with quiet():
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            stop=tuple(stop or ()),
            seed=seed,
        )
        loaded = load_within(
            model,
            memory,
            gpu_memory=gpu_memory,
            device=run.place(place_of(device, memory, gpu_memory), compiled, gpu_memory),
            activations=activations,
            guesses=guesses,
            ahead=ahead,
        )
        talk = Chat(loaded, load_tokenizer(model), sampling, run.fixed_cache(compiled, loaded))
        if not talk.has_template:
            note("this model has no chat template: it continues your text instead of answering")
        note("/help lists the commands, /quit ends")
        Conversation(talk, tokens, Metrics(loaded), verbose=verbose).run()


class Conversation:
    """Messages, commands and answers, until the end."""

    def __init__(self, talk: "Chat", tokens: int, metrics: Metrics, *, verbose: bool) -> None:
        """tokens: of an answer at most    verbose: say after each how the experts streamed."""
        self.talk, self.tokens = talk, tokens
        self.metrics, self.verbose = metrics, verbose
        self.messages, self.answers = Input(), list["Generated"]()

    def run(self) -> None:
        """Until the end of the input, or /quit."""
        while (message := self.messages.read()) is not None and message != "/quit":
            word, _, rest = message.partition(" ")
            command = getattr(self, f"do_{word[1:]}", None) if word[:1] == "/" else None
            try:
                if command is not None:
                    command(rest.strip())
                elif word[:1] == "/" and word[1:].isalpha():
                    raise PromptError(f"{word}: no such command; /help lists them")
                elif message:
                    self.ask(message)
            except TrilobiteError as e:
                if not isinstance(e, PromptError) and command is None:
                    raise
                note(f"error: {e}")

    def ask(self, message: str) -> None:
        """Show the answer as it comes; Ctrl-C ends it there."""
        shown = answer(markdown=self.talk.has_template)
        try:
            with Patience(wanted=self.messages.edits) as patience:
                made = self.talk.ask(
                    message, tokens=self.tokens, on_text=shown.write, unwanted=lambda: patience.asked
                )
        except TrilobiteError:
            shown.end(nothing=True)
            raise
        shown.end()
        self.answers.append(made)
        note(run.speed(made))
        if self.verbose:
            note(self.metrics.line())

    def do_help(self, _: str) -> None:
        """What can be said."""
        note(HELP)

    def do_reset(self, _: str) -> None:
        """Forget the conversation."""
        self.talk.reset()
        note("forgotten")

    def do_system(self, text: str) -> None:
        """Show, set or remove the system prompt."""
        if text:
            self.talk.system = "" if text == "-" else text
        note(f"system prompt: {self.talk.system or 'none'}")

    def do_save(self, name: str) -> None:
        """Write the conversation, with its system prompt."""
        from trilobite.runtime.generate.conversation import save_conversation

        save_conversation(_file(name, "/save"), self.talk.messages, system=self.talk.system)
        note(f"{len(self.talk.messages)} messages written to {name}")

    def do_load(self, name: str) -> None:
        """Go on with a conversation that was written."""
        from trilobite.runtime.generate.conversation import load_conversation

        self.talk.messages, self.talk.system = load_conversation(_file(name, "/load"))
        note(f"{len(self.talk.messages)} messages read from {name}")

    def do_stats(self, _: str) -> None:
        """What was said, how fast, and how much of the context that takes."""
        from trilobite.runtime.generate.text import context_length

        made = sum(a.tokens for a in self.answers)
        seconds = sum(a.seconds for a in self.answers)
        after_first = sum(max(0, a.tokens - 1) for a in self.answers)
        speed = f", {after_first / seconds:.1f} tokens/s" if seconds else ""
        used = self.answers[-1].prompt_tokens + self.answers[-1].tokens if self.answers else 0
        limit = context_length(self.talk.model)
        note(f"{len(self.answers)} answers of {made} tokens{speed}")
        note(f"the last one ended at token {used} of a context of {limit or 'unknown length'}")
        note(self.metrics.line())


def _file(name: str, command: str) -> Path:
    if not name:
        raise PromptError(f"{command}: names no file; write {command} FILE")
    return Path(name).expanduser()
