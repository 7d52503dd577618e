"""Answers that are JSON of a given schema: which tokens may come next, by llguidance. Why this library: docs/adr/0006

Separators are fixed to `", "` and `": "`: with free white space a small model may write blanks until its tokens are
used up.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import UsageError
from stillroom.models.tokenizer import Tokenizer

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonConstraint:
    """How far one answer has come in its schema; a `TokenConstraint`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> "JsonConstraint":
        """An independent constraint at the same place."""
        return JsonConstraint(self._matcher.deep_copy())

    def allowed(self) -> NDArray[np.int32]:
        """One bit per token, lowest first. If the schema is too complex to go on, only stop tokens are left."""
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)

    def advance(self, token_id: int) -> None:
        """The next token of the answer."""
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Nothing can follow."""
        return bool(self._matcher.is_stopped())


class JsonConstraints:
    """Makes constraints for one model. Thread-safe; the tokenizer is prepared with the first."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids
        self._lock = Lock()

    def compile(self, schema: Mapping[str, Any]) -> JsonConstraint:
        """A constraint at the beginning of an answer.

        Raises:
            UsageError: the schema is wrong or uses what cannot be enforced, or the model cannot write JSON.
        """
        from llguidance import LLMatcher

        with self._lock:
            tokenizer = self._tokenizer
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_LAYOUT)
        except (ValueError, TypeError) as error:
            raise UsageError(f"the JSON schema cannot be read: {error}") from None
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        if is_error:
            raise UsageError(f"the JSON schema cannot be enforced: {messages[0]}")
        return JsonConstraint(LLMatcher(tokenizer, grammar, log_level=0))

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not self._stop_token_ids:
            raise UsageError("this model has no end token, which answers of a JSON schema need")
        try:
            return from_tokenizer(
                self._source.hf_tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._stop_token_ids)
            )
        except ValueError as error:
            raise UsageError(f"this model cannot write JSON: {error}; take another model") from None
