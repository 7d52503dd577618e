"""Answers with a JSON schema are always valid, whatever the model prefers and whatever else runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillroom.core.request import FinishReason, Request
from stillroom.errors import UsageError
from stillroom.models.json_constraint import JsonConstraint, JsonConstraints
from stillroom.models.tokenizer import Tokenizer
from stillroom.models.vocabulary import load_vocabulary
from tests.engine.harness import Run, engine_on, random_segments, request, samples_of
from tests.fakes import byte_tokenizer

EOS = 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "kind": {"enum": ["ship", "town"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "year", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> JsonConstraints:
    return JsonConstraints(tokenizer, 301, frozenset({EOS}))


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "year", "kind", "tags"]
    assert len(found["name"]) <= 6 and 0 <= found["year"] <= 2100 and found["kind"] in ("ship", "town")
    assert len(found["tags"]) <= 3 and set(found["tags"]) <= {True, False}


@given(
    seed=st.integers(0, 10_000),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    num_blocks=st.sampled_from([14, 200]),
)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_are_valid_and_the_same_alone(
    folder: Path, tokenizer: Tokenizer, constraints: JsonConstraints, seed: int, counts: list[int], num_blocks: int
) -> None:
    rng, constraint = np.random.default_rng(seed), constraints.compile(SCHEMA)
    groups = []
    for index, count in enumerate(counts):
        plain = request(
            f"r{index}",
            random_segments(rng, 301, [9, 5]),
            max_tokens=120,
            stop=[EOS],
            temperature=float(rng.choice([0.0, 1.0, 3.0])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            top_k=int(rng.choice([0, 3])),
            seed=index,
        )
        groups.append(samples_of(dataclasses.replace(plain, constraint=constraint), count))
    run = Run(engine_on(folder, num_blocks=num_blocks, max_num_seqs=4))
    run.submit(request("free", random_segments(rng, 301, [30]), max_tokens=30))
    for group in groups:
        run.submit_samples(*group)
    run.finish()
    for one in (one for group in groups for one in group):
        text = tokenizer.decode(run.tokens[one.request_id])
        assert run.reasons[one.request_id] is FinishReason.STOP
        check(text)
        assert run.tokens[one.request_id] == tokens_alone(folder, one)


def tokens_alone(folder: Path, one: Request) -> list[int]:
    run = Run(engine_on(folder))
    run.submit(one)
    run.finish()
    return run.tokens[one.request_id]


def test_text_that_follows_the_schema_is_allowed_and_completes_it(
    tokenizer: Tokenizer, constraints: JsonConstraints
) -> None:
    constraint = constraints.compile(SCHEMA)
    early = constraint.copy()
    for token in tokenizer.encode_text('{"name": "a", "year": 7, "kind": "ship", "tags": []}'):
        assert not constraint.is_complete
        assert constraint.allowed()[token // 32] >> (token % 32) & 1
        constraint.advance(token)
    assert constraint.is_complete and not early.is_complete


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
        ({"type": {1, 2}}, "cannot be read"),
        (nested(10_000), "cannot be read"),
        ({"enum": ["x" * 100_000]}, "characters"),
        ({"type": "integer", "multipleOf": 999_983}, "least common multiple"),
        ({"type": "number", "multipleOf": 9999.83}, "least common multiple"),
        ({"type": "number", "multipleOf": True}, "multipleOf"),
        ({"type": "integer", "multipleOf": 3 * 10**400}, "least common multiple"),
        ({"anyOf": [{"type": "integer", "multipleOf": m} for m in (997, 991)]}, "least common multiple"),
        ({"type": "string", "pattern": "^(abcdefghij){100000}$"}, "too many expressions"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(
    constraints: JsonConstraints, schema: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        constraints.compile(schema)


def accepts(constraint: JsonConstraint, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether this text may be a whole answer."""

    def is_allowed(token: int) -> bool:
        return bool(constraint.allowed()[token // 32] >> (token % 32) & 1)

    for token in tokenizer.encode_text(text):
        if not is_allowed(token):
            return False
        constraint.advance(token)
    return constraint.is_complete or is_allowed(EOS)


@pytest.mark.parametrize("multiple", [0.01, 60, 1000, 4096, 1_000_000])
def test_usual_multiples_are_enforced(constraints: JsonConstraints, tokenizer: Tokenizer, multiple: float) -> None:
    constraint = constraints.compile({"type": "number", "multipleOf": multiple})
    assert accepts(constraint.copy(), tokenizer, json.dumps(3 * multiple))
    assert not accepts(constraint, tokenizer, json.dumps(3.5 * multiple))


def test_multiple_of_outside_of_rules_is_ignored(constraints: JsonConstraints, tokenizer: Tokenizer) -> None:
    constant = constraints.compile({"const": {"multipleOf": True}})
    assert accepts(constant, tokenizer, '{"multipleOf": true}')
    named = constraints.compile({"properties": {"multipleOf": {"type": "string"}}})
    assert accepts(named, tokenizer, '{"multipleOf": "ab"}')


def test_answer_whose_schema_becomes_too_complex_ends_alone_with_an_error(
    folder: Path, constraints: JsonConstraints
) -> None:
    """After the choice between two keys the lexer needs more states than it may have."""
    long = {"type": "string", "pattern": "^[ab](abcdefghij){20000}$"}
    choice = [{"type": "object", "properties": {key: long}, "required": [key]} for key in ("a", "b")]
    constraint = constraints.compile({"anyOf": choice})
    prompt = random_segments(np.random.default_rng(0), 301, [9, 5])
    failing = dataclasses.replace(request("json", prompt, 120, [EOS]), constraint=constraint)
    run = Run(engine_on(folder))
    run.submit(request("free", prompt, 30))
    run.submit_samples(*samples_of(failing, 2))
    run.finish()
    assert run.reasons["json/0"] is run.reasons["json/1"] is FinishReason.ABORTED
    assert isinstance(run.errors["json/0"], UsageError) and "too complex" in str(run.errors["json/0"])
    assert len(run.tokens["free"]) == 30 and run.reasons["free"] is FinishReason.LENGTH


def test_model_without_end_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no end token"):
        JsonConstraints(tokenizer, 301, frozenset()).compile(SCHEMA)


def test_a_grammar_makes_the_same_constraint_in_another_process(tokenizer: Tokenizer) -> None:
    here, there = (JsonConstraints(tokenizer, 301, frozenset({EOS})) for _ in range(2))
    for constraint in (here.compile(SCHEMA), here.compile_lark("start: /[a-c]+/ | %json " + json.dumps(SCHEMA))):
        copy = there.compile_grammar(constraint.grammar)
        for _ in range(40):
            assert copy.is_complete == constraint.is_complete
            if constraint.is_complete:
                break
            allowed = constraint.allowed()
            assert np.array_equal(copy.allowed(), allowed)
            token_id = int(np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))[-1])
            constraint.advance(token_id)
            copy.advance(token_id)
        assert copy.copy().grammar == constraint.grammar


@pytest.mark.parametrize("grammar", ["", "{", "start: (", '{"grammars": [{"lark_grammar": "start: ("}]}', "x" * 1000])
def test_a_damaged_grammar_is_refused(constraints: JsonConstraints, grammar: str) -> None:
    with pytest.raises(UsageError, match="the grammar cannot be enforced"):
        constraints.compile_grammar(grammar)


def test_model_whose_tokens_cannot_spell_json_is_told_in_words_of_the_user() -> None:
    vocabulary = load_vocabulary("bundled:microworld")
    found = JsonConstraints(vocabulary.tokenizer, vocabulary.size, vocabulary.stop_token_ids)
    assert not found.are_possible
    with pytest.raises(UsageError, match="^this model cannot write JSON, because its tokens cannot spell every text"):
        found.compile(SCHEMA)
