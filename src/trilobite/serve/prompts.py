"""Prompts: token ids out of what a request says, within the bounds of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import PromptError

Message = Mapping[str, Any]


class Prompter:
    """The tokenizer as transformers' handlers ask for it, which does not let every prompt through.

    inner: the tokenizer itself; were it called `tokenizer`, handlers would ask it instead
    context: tokens of prompt and answer together    vocabulary: of the model
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: int, vocabulary: int) -> None:
        """Of one model."""
        self.inner, self.context, self.vocabulary = tokenizer, context, vocabulary

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(getattr(self.inner, "chat_template", None))

    @property
    def response_template(self) -> Any:
        """How the checkpoint says that its answers are to be parsed, where it does."""
        return getattr(self.inner, "response_template", None)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template does something about tools."""
        template = getattr(self.inner, "chat_template", None)
        return "tools" in str(template or "")

    def __call__(self, prompt: str, return_tensors: None = None) -> dict[str, list[int]]:
        """Token ids of a text. Raises PromptError."""
        try:
            ids = self.inner(prompt, verbose=False).input_ids
        except (UnicodeEncodeError, TypeError) as e:
            raise PromptError("the prompt holds half a character (a lone surrogate); send whole ones") from e
        return {"input_ids": self._checked(list(ids))}

    def apply_chat_template(
        self, messages: Sequence[Message], *, tools: Any, load_audio_from_video: bool, **kwargs: Any
    ) -> dict[str, list[int]]:
        """Token ids of a conversation. Raises PromptError, also for a template that fails: it is a program."""
        if not self.has_template:
            raise PromptError("this model has no chat template: use /v1/completions")
        try:
            found = self.inner.apply_chat_template(messages, tools=tools, **kwargs)
        except Exception as e:
            raise PromptError(f"the chat template refuses these messages: {type(e).__name__}: {e}") from e
        return {"input_ids": self._checked(list(found["input_ids"]))}

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        """The text of token ids."""
        text: str = self.inner.decode(ids, **kwargs)
        return text

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise PromptError("the prompt is empty; give it at least one word")
        if len(ids) >= self.context:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, texts of this server may have {self.context}; make it shorter"
            )
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise PromptError(
                f"the prompt holds token {max(ids)}, the model's vocabulary has {self.vocabulary}"
            )
        return ids
