"""`TokenBackend`: what backends share that write prompts as segments of tokens, wherever these are continued."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from stillroom.backends.base import PreparedPrompt
from stillroom.backends.chat_prompt import chat_prompt
from stillroom.backends.conversation import NO_HISTORY, History
from stillroom.backends.prompt_builder import PromptBuilder, ask_for_citations, raw_tokens
from stillroom.backends.tool_chat import (
    NO_PARAMETERS,
    CallFormat,
    ToolChat,
    call_grammar,
    call_schema,
    tool_prompt,
)
from stillroom.core.document import Chunk
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import SamplingParams, TokenConstraint
from stillroom.errors import ModelError, UsageError
from stillroom.models.json_constraint import JsonConstraints
from stillroom.models.source_numbers import source_number_grammar
from stillroom.models.tokenizer import Tokenizer
from stillroom.models.vocabulary import Vocabulary

_NUM_CONTEXT = 8
"""Tokens before an answer that the text of its first token may depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBackend(ABC):
    """Prepares prompts and their constraints with a model's tokenizer."""

    vocabulary: Vocabulary
    prompts: PromptBuilder
    constraints: JsonConstraints
    call_format: CallFormat | None = None
    asks_for_citations: bool = False
    """Whether answers shall name their sources as `[n]`, and no others (`generation.ask_for_citations`)."""
    salt: str = ""
    """Cache salt of all requests: KV is not shared between salts."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Prompt plus answer, in tokens."""

    @abstractmethod
    def max_output_tokens(self, segment_lengths: Sequence[int]) -> int:
        """Return how many tokens fit behind segments of these lengths into an empty KV pool; may be negative."""

    @property
    def name(self) -> str:
        return self.vocabulary.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self.vocabulary.tokenizer

    @property
    def may_speculate(self) -> bool:
        return True

    @property
    def writes_json(self) -> bool:
        return self.constraints.are_possible

    @property
    def quotes(self) -> bool:
        return False

    def prepare_prompt(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        cites = self.asks_for_citations and schema is None
        prompt = self.prompts.build(chunks, ask_for_citations(question) if cites else question, max_tokens, history)
        self._check_tokens(prompt)
        prepared = self._prepared(prompt, schema, len(self.tokenizer.encode_text(history.answer_start)))
        return replace(prepared, constraint=self._source_numbers(len(prompt.chunk_ids))) if cites else prepared

    def prepare_chat(
        self,
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        prompt = chat_prompt(self.tokenizer, question, max_tokens, history)
        self._check_tokens(prompt)
        return self._prepared(prompt, schema, len(self.tokenizer.encode_text(history.answer_start)))

    def prepare_tool_chat(self, chat: ToolChat) -> PreparedPrompt:
        form = self.call_format
        if form is None:
            raise UsageError(f"the chat template of {self.name} knows no tools; leave tools out, or use another model")
        if not chat.tools:
            return self._prepared(tool_prompt(self.tokenizer, chat), None, 0)
        form = replace(form, is_demanded=chat.is_call_demanded)
        constraint = self._call_constraint(form, chat.tools)
        prompt = tool_prompt(self.tokenizer, chat, form.opening if form.is_demanded else "")
        return replace(self._prepared(prompt, None, 0), constraint=constraint, call_format=form)

    def prepare_raw(self, prompt: str | Sequence[int], schema: Mapping[str, Any] | None = None) -> PreparedPrompt:
        ids = raw_tokens(self.tokenizer, prompt) if isinstance(prompt, str) else _integers(prompt)
        num_known = self.vocabulary.size
        if not ids:
            raise UsageError("the prompt is empty")
        if not all(0 <= token_id < num_known for token_id in ids):
            raise UsageError(f"the prompt holds a token that the model does not have; it has 0 to {num_known - 1}")
        return self._prepared(SegmentedPrompt((Segment(SegmentKind.QUESTION, ids),)), schema, len(ids))

    def check_bias(self, sampling: SamplingParams) -> None:
        """Raise UsageError: `logit_bias` names a token that the model does not have."""
        size = self.vocabulary.size
        unknown = [token_id for token_id in sampling.logit_bias if not 0 <= token_id < size]
        if unknown:
            raise UsageError(f"logit_bias names token {unknown[0]}; the model has tokens 0 to {size - 1}")

    def _call_constraint(self, form: CallFormat, tools: Sequence[Mapping[str, Any]]) -> TokenConstraint:
        """Return the constraint to text and calls. Raises UsageError: a schema cannot be enforced; names its tool."""
        try:
            rule = self.constraints.lark_rule(call_schema(form, tools))
            return self.constraints.compile_lark(call_grammar(self.tokenizer, form, rule))
        except UsageError:
            for function in (tool["function"] for tool in tools):
                try:
                    self.constraints.compile(function.get("parameters") or NO_PARAMETERS)
                except UsageError as error:
                    raise UsageError(f"tools: the parameters of {function['name']!r}: {error}") from None
            raise

    def _prepared(
        self, prompt: SegmentedPrompt, schema: Mapping[str, Any] | None, num_continued: int
    ) -> PreparedPrompt:
        """
        Args:
            num_continued: tokens at the end of the prompt that the answer continues as text.
        """
        constraint = None if schema is None else self.constraints.compile(schema)
        fitting = self.max_output_tokens(prompt.lengths)
        max_answer_tokens = max(1, min(fitting, self.max_model_len - prompt.num_tokens))
        last = prompt.segments[-1].token_ids[::-1][: min(num_continued, _NUM_CONTEXT)]
        continues = tuple(takewhile(lambda token_id: token_id not in self.tokenizer.special_ids, last))[::-1]
        return PreparedPrompt(prompt, prompt.chunk_ids, prompt.num_tokens, max_answer_tokens, continues, constraint)

    def _source_numbers(self, num_sources: int) -> TokenConstraint | None:
        """Return the constraint to numbers of sources that exist; None for a model that writes no brackets."""
        if "[1]" not in self.tokenizer.decode(self.tokenizer.encode_text("[1]")):
            return None
        return self.constraints.compile_lark(source_number_grammar(num_sources))

    def _check_tokens(self, prompt: SegmentedPrompt) -> None:
        """Raises ModelError: a token has no embedding. Some checkpoints have such tokens, but do not use them."""
        if self.vocabulary.knows_all_tokens:
            return
        if (last := max(prompt.token_ids, default=0)) >= self.vocabulary.size:
            raise ModelError(
                f"the tokenizer of {self.name} makes token {last} of this prompt, and its weights know 0 to "
                f"{self.vocabulary.size - 1}; the folder may hold the tokenizer of another model"
            )


def _integers(prompt: Sequence[int]) -> tuple[int, ...]:
    found = np.asarray(prompt)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "iu"):
        raise UsageError("the prompt is neither text nor a list of tokens, which are whole numbers")
    return tuple(found.tolist())
