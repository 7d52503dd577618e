"""Tokens of prompts, and texts of tokens, by the tokenizer of the model that answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.backends.base import Backend, PreparedPrompt
from stillroom.core.prompt import SegmentedPrompt
from stillroom.errors import UsageError
from stillroom.models.tokenizer import Tokenizer
from stillroom.rag.answer import AskOptions
from stillroom.rag.question import history_without_search

_EMBEDDER = "send the embedder's name, from GET /v1/models, as model for the tokens of the embedder"
_ELSEWHERE = f"the tokenizer is at the server elsewhere; send texts to this server, or ask that one, or {_EMBEDDER}"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens of a prompt."""

    token_ids: tuple[int, ...]
    names: tuple[str, ...]
    """Each token as the vocabulary writes it."""
    max_model_len: int
    """Most tokens of a prompt and its answer."""


class PromptTokenizer:
    """Encodes prompts as a backend reads them. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def tokens_of_prompt(self, prompt: str, *, adds_special: bool = True) -> PromptTokens:
        """Encode a prompt that is continued as it is. Special tokens in it are recognised.

        Args:
            adds_special: add the begin token if it is missing, as generation does.

        Raises:
            UsageError: the prompt is empty, the model continues no prompts, or the tokenizer is at a server elsewhere.
        """
        self._check()
        prepared = self._backend.prepare_raw(prompt)
        if adds_special:
            return self._of(prepared)
        return self._described(self._tokenizer.encode_template(prompt))

    def tokens_of_chat(self, question: str, options: AskOptions) -> PromptTokens:
        """Encode the prompt of a chat without a search.

        Raises:
            UsageError: the model answers from documents only, or the tokenizer is at a server elsewhere.
        """
        self._check()
        return self._of(self._backend.prepare_chat(question, None, None, history_without_search(options)))

    def text_of(self, token_ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Decode tokens; `keeps_special`: with special ones.

        Raises:
            UsageError: there are none, the model has no such token or continues no prompts, or the tokenizer is at a
                server elsewhere.
        """
        self._check()
        self._backend.prepare_raw(token_ids)  # refuses unknown tokens
        return self._tokenizer.decode(token_ids, keeps_special=keeps_special)

    def _check(self) -> None:
        if self._backend.quotes:
            raise UsageError(
                f"{self._backend.name} quotes documents and cannot continue a prompt; {_EMBEDDER}, or use a model that "
                "generates text: --model with a checkpoint's folder or a hub name"
            )

    def _of(self, prepared: PreparedPrompt) -> PromptTokens:
        if not isinstance(prepared.prompt, SegmentedPrompt):
            raise UsageError(_ELSEWHERE)
        return self._described(prepared.prompt.token_ids)

    def _described(self, token_ids: Sequence[int]) -> PromptTokens:
        names = self._tokenizer.names_of(token_ids)
        return PromptTokens(tuple(token_ids), tuple(names), self._backend.max_model_len or 0)

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._backend.tokenizer is None:
            raise UsageError(_ELSEWHERE)
        return self._backend.tokenizer
