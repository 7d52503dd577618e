"""Constrains answers to JSON of a given schema or to another grammar, with llguidance (chosen in docs/adr/0006).

Separators are fixed to `", "` and `": "`: with free white space a small model may write blanks until `max_tokens`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.core.panics import NativePanicError, panics_as_errors
from stillroom.errors import UsageError
from stillroom.models.tokenizer import Tokenizer

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_MAX_SCHEMA_CHARACTERS = 100_000
_MAX_COMMON_MULTIPLE = 20_000
"""Bound on the least common multiple of all `multipleOf`: the library makes a state for each remainder, without a limit
or a deadline of its own."""
_MAX_LEXER_STATES = 50_000
"""Lexer states that one mask may make, about 0.1 s, in which the whole step waits."""
_NUM_FORCED = 16
"""Forced first tokens that are tried when a schema is compiled."""


class JsonConstraint:
    """State of one answer in its schema or grammar; a `TokenConstraint`."""

    def __init__(self, matcher: Any, grammar: str) -> None:
        """
        Args:
            grammar: llguidance's serialised grammar.
        """
        self._matcher = matcher
        self.grammar = grammar
        """Makes the same constraint in another process (`JsonConstraints.compile_grammar`)."""

    @panics_as_errors("llguidance")
    def copy(self) -> "JsonConstraint":
        """Return an independent constraint in the same state."""
        return JsonConstraint(self._matcher.deep_copy(), self.grammar)

    @panics_as_errors("llguidance")
    def allowed(self) -> NDArray[np.int32]:
        """Return one bit per token, lowest first. The bits are meaningless if `error` is set afterwards."""
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)

    @panics_as_errors("llguidance")
    def allows(self, token_id: int) -> bool:
        """Whether this token may come next."""
        return bool(self._matcher.validate_tokens([token_id]))

    @panics_as_errors("llguidance")
    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    @panics_as_errors("llguidance")
    def is_complete(self) -> bool:
        """Whether no token can follow."""
        return bool(self._matcher.is_stopped())

    @property
    @panics_as_errors("llguidance")
    def error(self) -> str | None:
        """Why the constraint cannot be continued; None if it can."""
        return _error_of(self._matcher)


class JsonConstraints:
    """Makes constraints for one model. Thread-safe; the first call prepares the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids
        self._lock = Lock()

    def compile(self, schema: Mapping[str, Any]) -> JsonConstraint:
        """Return a constraint at the beginning of an answer.

        Raises:
            UsageError: the schema is invalid, cannot be enforced or is too complex, or the model cannot write JSON.
        """
        from llguidance import LLMatcher

        try:
            text = json.dumps(schema)
            _check_size(schema, len(text))
            with panics_as_errors("llguidance"):
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=_LAYOUT)
        except (ValueError, TypeError, ArithmeticError, RecursionError, NativePanicError) as error:
            raise UsageError(f"the JSON schema cannot be read: {error}") from None
        return self._at_start(grammar, "the JSON schema")

    def lark_rule(self, schema: Mapping[str, Any]) -> str:
        """Return JSON of a schema as the right side of a rule in llguidance's Lark. Raises as `compile`."""
        try:
            text = json.dumps({**schema, "x-guidance": _LAYOUT})
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"the JSON schema cannot be read: {error}") from None
        _check_size(schema, len(text))
        return f"%json {text}"

    def compile_lark(self, grammar: str) -> JsonConstraint:
        """Return a constraint to a grammar in llguidance's form of Lark.

        Raises:
            UsageError: the grammar or the model cannot be used.
        """
        from llguidance import LLMatcher

        return self._at_start(LLMatcher.grammar_from_lark(grammar), "the grammar")

    def compile_grammar(self, grammar: str) -> JsonConstraint:
        """Return the constraint of a serialised grammar (`JsonConstraint.grammar`), at the beginning of an answer.

        Raises:
            UsageError: the grammar or the model cannot be used.
        """
        return self._at_start(grammar, "the grammar")

    def _at_start(self, grammar: str, name: str) -> JsonConstraint:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        with (
            self._lock,
            panics_as_errors("llguidance"),
        ):  # one at a time: a large schema takes a core for seconds
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
            error_text = _error_of(matcher) or _early_error(matcher.deep_copy())
        if error_text is not None:
            raise UsageError(f"{name} cannot be enforced: {error_text}")
        return JsonConstraint(matcher, grammar)

    @property
    def are_possible(self) -> bool:
        """Whether the model can be held to JSON: its tokens can spell it, and it has an end token."""
        try:
            with self._lock:
                return self._tokenizer is not None
        except UsageError:
            return False

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not self._stop_token_ids:
            raise UsageError("this model has no end token, which answers with a JSON schema need")
        try:
            return from_tokenizer(
                self._source.hf_tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._stop_token_ids)
            )
        except ValueError as error:
            raise UsageError(
                "this model cannot write JSON, because its tokens cannot spell every text; leave out the JSON schema "
                "and the tools, or use another model"
            ) from error


def _error_of(matcher: Any) -> str | None:
    return str(matcher.get_error()).partition("\n")[0] if matcher.is_error() else None


def _early_error(matcher: Any) -> str | None:
    """Return the error that every answer would reach before its first choice, if any."""
    for _ in range(_NUM_FORCED):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if len(allowed) != 1 or matcher.is_stopped():
            break
        matcher.consume_token(int(allowed[0]))
    return _error_of(matcher)


def _check_size(schema: Mapping[str, Any], num_characters: int) -> None:
    if num_characters > _MAX_SCHEMA_CHARACTERS:
        raise UsageError(
            f"the JSON schema has {num_characters} characters, more than {_MAX_SCHEMA_CHARACTERS}; simplify it"
        )
    common = 1
    for value in _multiples(schema):
        common = math.lcm(common, _digits(value))  # the cost where several rules apply to one number (allOf, anyOf)
        if common > _MAX_COMMON_MULTIPLE and str(common).strip("0") != "1":  # powers of ten cost nothing
            raise UsageError(
                "the numbers of `multipleOf` in the JSON schema are too complex together: their least common multiple, "
                f"decimal points left out, must be a power of ten or at most {_MAX_COMMON_MULTIPLE}"
            )


def _multiples(schema: Mapping[str, Any]) -> Iterator[int | float]:
    """Yield every `multipleOf` at any depth: a `$ref` may point anywhere."""
    rest: list[Any] = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, Mapping):
            rest += part.values()
            value = part.get("multipleOf")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value and abs(value) < math.inf:
                yield value
        elif isinstance(part, list | tuple):
            rest += part


def _digits(value: float) -> int:
    """Return a number without sign and decimal point: 0.25 as 25."""
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    return int("".join(map(str, digits)) + "0" * max(int(exponent), 0))
