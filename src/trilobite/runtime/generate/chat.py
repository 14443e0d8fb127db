"""A conversation with a loaded model.

chat = Chat(model, tokenizer, Sampling(temperature=0.7))
chat.ask("Why is the sea salty?", tokens=256, on_text=print)
"""

from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import PromptError
from trilobite.runtime.generate.cache import GrowingCache, TextCache
from trilobite.runtime.generate.streamer import OnText, Unwanted
from trilobite.runtime.generate.text import Generated, Sampling, check_text, context_length, continue_ids

Messages = list[dict[str, str]]
"""Turns by turns, as chat templates take them: role (user, assistant) and content."""


class Chat:
    """A conversation that remembers: through the chat template where there is one, else as one growing text.

    When the model's context is full, the oldest turns are forgotten, and as many as make half of it free: the text then
    begins anew, and has to be read anew.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling | None = None,
        cache: TextCache | None = None,
    ) -> None:
        """Begin with an empty history. cache: of this model; None = one that remembers the conversation."""
        self.model, self.tokenizer = model, tokenizer
        self.sampling = sampling or Sampling()
        self.cache = GrowingCache(model) if cache is None and not model.config.is_encoder_decoder else cache
        self.messages: Messages = []
        self.system = ""

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def reset(self) -> None:
        """Forget everything said; the system prompt stays."""
        self.messages = []

    def ask(
        self, message: str, *, tokens: int, on_text: OnText | None = None, unwanted: Unwanted | None = None
    ) -> Generated:
        """Say something and get the answer, of at most `tokens` tokens, and of fewer where it is `unwanted()`.

        Raises PromptError for a message too long for the context, or refused by the chat template; the history
        stays as it was.
        """
        check_text(message)
        limit = context_length(self.model)
        room = max(1, limit - min(tokens, limit // 2)) if limit else None
        messages, ids = self._prompt([*self.messages, {"role": "user", "content": message}], room)
        answer = continue_ids(
            self.model,
            self.tokenizer,
            ids,
            tokens=tokens,
            sampling=self.sampling,
            on_text=on_text,
            cache=self.cache,
            unwanted=unwanted,
        )
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def _prompt(self, messages: Messages, room: int | None) -> tuple[Messages, Tensor]:
        """The turns that are still remembered, and their token ids [1, T], if possible at most `room`."""
        ids = self._ids(messages)
        if room is not None and ids.shape[1] > room:
            while ids.shape[1] > room // 2 and len(messages) > 1:
                messages = messages[2:]
                ids = self._ids(messages)
        return messages, ids

    def _ids(self, messages: Messages) -> Tensor:
        if self.system:
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.has_template:
            text = self._written(messages)
        else:
            text = "".join(m["content"] + "\n" * (m["role"] != "user") for m in messages)
        special = not self.has_template  # a template writes them itself
        ids: Tensor = self.tokenizer(
            text, add_special_tokens=special, return_tensors="pt", verbose=False
        ).input_ids
        return ids

    def _written(self, messages: Messages) -> str:
        """The conversation through the chat template, a program of the checkpoint's that may fail in any way."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as e:
            raise PromptError(
                f"the chat template of this checkpoint fails: {type(e).__name__}: {e}; correct it in "
                "chat_template.jinja or tokenizer_config.json"
            ) from e
        return text
