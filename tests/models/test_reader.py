"""The reader's choice of an answer against a slow search of all answers."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.core.sentences import sentences
from stillroom.models.reader import MAX_ANSWER_TOKENS, best_reading
from stillroom.models.reader_model import span_scores

WORDS = ("Lima", "lies", "in", "Peru", "It", "is", "large.", "Cusco.", "Who?")


def _slow_score(outputs: NDArray[np.float32], first: int, last: int) -> float:
    size = (outputs.shape[1] - 2) // 2
    product = sum(float(outputs[first, 2 + i]) * float(outputs[last, 2 + size + i]) for i in range(size))
    return float(outputs[first, 0]) + float(outputs[last, 1]) + (product / math.sqrt(size) if size else 0.0)


@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=60),
    seed=st.integers(0, 99),
    size=st.sampled_from((0, 4)),
)
def test_the_best_answer_of_the_likeliest_sentence_is_found(words: list[str], seed: int, size: int) -> None:
    text = " ".join(words)
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    offsets = np.stack([ends - [len(word) for word in words], ends], axis=1)
    outputs = np.random.default_rng(seed).normal(size=(len(words), 2 + 2 * size)).astype(np.float32)
    scores: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    found = sentences(text)
    for start, end in [span for span in found if text[span[1] - 1] != "?"] or found:
        own = [token for token in range(len(words)) if start <= offsets[token, 0] < end]
        scores[start, end] = {
            (int(offsets[first, 0]), int(offsets[last, 1])): _slow_score(outputs, first, last)
            for first in own
            for last in own
            if first <= last < first + MAX_ANSWER_TOKENS
        }
    sums = {sentence: math.log(sum(map(math.exp, answers.values()))) for sentence, answers in scores.items()}
    reading = best_reading(text, offsets, outputs)
    assert reading.score == pytest.approx(max(sums.values()), rel=1e-4, abs=1e-4)
    assert reading.score == pytest.approx(sums[reading.sentence], rel=1e-4, abs=1e-4)
    assert scores[reading.sentence][reading.span] == pytest.approx(max(scores[reading.sentence].values()), rel=1e-4)


def test_a_pair_of_vectors_joins_start_and_end() -> None:
    outputs = np.zeros((2, 10), np.float32)
    outputs[0, 2:6], outputs[1, 6:10] = 1.0, 2.0
    assert span_scores(outputs).tolist() == [[0.0, 4.0], [0.0, 0.0]]


def test_questions_and_tables_of_contents_are_quoted_only_alone() -> None:
    lines = ["What is the limit?", "The limit . . . . . . . . . 12", "The limit is high."]
    text = "\n\n".join(lines)
    offsets = np.array([match.span() for match in re.finditer(r"\S+", text)])
    outputs = np.zeros((len(offsets), 2), np.float32)
    outputs[:-4] = 9.0  # the words of the first two
    reading = best_reading(text, offsets, outputs)
    assert text[slice(*reading.sentence)] == lines[2]
    for echo in ("Q: The limit, in short", 'ask("Is the limit high")'):
        text = f"{echo}\n\n{lines[2]}"
        offsets = np.array([match.span() for match in re.finditer(r"\S+", text)])
        reading = best_reading(text, offsets, outputs[: len(offsets)], "Is the limit high?")
        assert text[slice(*reading.sentence)] == lines[2]
    offsets = np.array([match.span() for match in re.finditer(r"\S+", lines[0])])
    alone = best_reading(lines[0], offsets, outputs[: len(offsets)])
    assert alone.sentence == (0, len(lines[0]))
