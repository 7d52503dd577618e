"""With the grammar of source numbers, no answer names a source that does not exist; all other text is free."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.models.json_constraint import JsonConstraint, JsonConstraints
from stillroom.models.source_numbers import source_number_grammar
from stillroom.models.tokenizer import Tokenizer
from stillroom.rag.markers import statements
from tests.engine.harness import Run, engine_on, random_segments, request
from tests.fakes import byte_tokenizer, random_checkpoint

EOS = 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> JsonConstraints:
    return JsonConstraints(tokenizer, 301, frozenset({EOS}))


def is_allowed(tokenizer: Tokenizer, constraint: JsonConstraint, text: str) -> bool:
    constraint = constraint.copy()
    for token in tokenizer.encode_text(text):
        if not constraint.allowed()[token // 32] >> (token % 32) & 1:
            return False
        constraint.advance(token)
    return bool(constraint.allowed()[EOS // 32] >> (EOS % 32) & 1)


@pytest.mark.parametrize("num_sources", [1, 9, 10, 12, 99])
def test_numbers_up_to_the_last_source_are_allowed(
    tokenizer: Tokenizer, constraints: JsonConstraints, num_sources: int
) -> None:
    constraint = constraints.compile_lark(source_number_grammar(num_sources))
    tried = (0, 1, 2, 8, 9, 10, 11, 12, 13, 19, 20, 21, 98, 99, 100, 120, 1000)
    allowed = [number for number in tried if is_allowed(tokenizer, constraint, f"It is so [{number}].")]
    assert allowed == [number for number in tried if 1 <= number <= num_sources]


@pytest.mark.parametrize(
    ("text", "is_free"),
    [
        ("[1][2] and [1, 2]; [ 2 ]", True),
        ("[note] [] [[ ]] [2024 edition] [a1] [-3] 17] [3", True),
        ("[1, 3]", False),
        ("[3;1]", False),
        ("\u30103\u3011", False),
        ("[[3]]", False),
        ("[0003]", False),
        ("[1]\n\nline [ 3\n]", False),
    ],
)
def test_only_numbers_of_sources_are_restricted(
    tokenizer: Tokenizer, constraints: JsonConstraints, text: str, is_free: bool
) -> None:
    constraint = constraints.compile_lark(source_number_grammar(2))
    assert is_allowed(tokenizer, constraint, text) is is_free


@given(text=st.text(alphabet="[]12309, ;a", max_size=14))
def test_allowed_text_names_sources_that_exist(tokenizer: Tokenizer, constraints: JsonConstraints, text: str) -> None:
    constraint = constraints.compile_lark(source_number_grammar(3))
    found = [int(number) for marker in re.findall(r"\[([\d,; ]+)\]", text) for number in re.findall(r"\d+", marker)]
    if is_allowed(tokenizer, constraint, text):
        assert all(1 <= number <= 3 for one in statements(text) for number in one.numbers)
    elif found:
        assert not all(1 <= number <= 3 for number in found)


def test_random_model_at_a_high_temperature_names_only_sources_that_exist(
    tmp_path: Path, tokenizer: Tokenizer, constraints: JsonConstraints
) -> None:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    rng = np.random.default_rng(0)
    liked = dict.fromkeys(tokenizer.encode_text("[]0123456789"), 9.0)
    run = Run(engine_on(tmp_path, max_num_seqs=8))
    constraint = constraints.compile_lark(source_number_grammar(3))
    names = []
    for index in range(16):
        plain = request(
            f"r{index}", random_segments(rng, 301, [8]), max_tokens=60, stop=[EOS], temperature=2.0, seed=index
        )
        sampling = dataclasses.replace(plain.sampling, logit_bias=liked)
        names.append(plain.request_id)
        bound = constraint if index else None
        run.submit(dataclasses.replace(plain, sampling=sampling, constraint=bound))
    run.finish()
    texts = [tokenizer.decode(run.tokens[name]) for name in names]
    numbers = [[int(number) for number in re.findall(r"\[(\d+)\]", text)] for text in texts]
    assert any(numbers[1:]) and {one for found in numbers[1:] for one in found} <= {1, 2, 3}
    assert set(numbers[0]) - {1, 2, 3}, "without the constraint the model names others"
