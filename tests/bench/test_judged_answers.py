"""Judging one answer, and the share of refusals at a threshold."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import RequestId
from stillroom.rag.answer import Answer, Citation, ReuseReport, Source, Support, Timing
from stillroom_bench.quality.end_to_end_answers import abstention, refused_share
from stillroom_bench.quality.judged_answers import COMPARED, abstains, holds_answer, judged, refused

SENTENCE = "Rotate the keys of the vault every thirty days. [2]"


def source(position: int, text: str, document: str) -> Source:
    return Source(document, f"{position:016x}", text, 0.5, {}, position, "", 1, 1)


SOURCES = (source(1, "Cats sleep.", "/docs/cats.md"), source(2, SENTENCE[:-4], "/docs/vault.md"))
CITATION = Citation(2, "/docs/vault.md", "2", "", 1, 1, 0, 0, SENTENCE[:-4], 0, 47, 0, 47, True, Support.SUPPORTED)
ANSWER = Answer(
    RequestId("req"),
    SENTENCE,
    (),
    "stop",
    SOURCES,
    Timing(0.1, 0.2, 0.0, 0.3),
    ReuseReport(9, 4),
    2,
    citations=(CITATION,),
    highlight=(SENTENCE.index("thirty"), SENTENCE.index(".")),
    confidence=0.75,
)
SAYS_NOTHING = replace(ANSWER, text="The documents do not say.", citations=(), highlight=None, confidence=0.2)


def test_marked_span_is_compared_and_the_text_is_the_quote() -> None:
    found = judged(ANSWER, ["30 days", "thirty days"], ["/docs/vault.md"], 0.5)

    assert (found.exact_match, found.f1, found.quoted, found.is_cited, found.is_retrieved) == (1, 1, 1, 1, 1)
    assert (found.is_answered, found.confidence, found.answer_seconds) == (1, 0.75, 0.5)
    assert found.after_search_seconds == pytest.approx(0.2)


def test_text_without_numbers_is_compared_where_no_span_is_marked() -> None:
    answer = replace(ANSWER, text="thirty days [2].", highlight=None)

    found = judged(answer, ["thirty days"], [], 0.5)

    assert (found.exact_match, found.quoted, found.is_cited) == (1, 1, 1)  # source 2 holds the answer
    assert judged(ANSWER, ["every thirty days or so"], [], 0.5).quoted == 0


def test_citation_of_another_source_is_wrong() -> None:
    wrong = replace(ANSWER, citations=(replace(CITATION, source=1),))
    none = replace(ANSWER, citations=(replace(CITATION, source=0),))

    for answer in (wrong, none, replace(ANSWER, citations=())):
        found = judged(answer, ["thirty days"], ["/docs/vault.md"], 0.5)
        assert (found.is_cited, found.is_retrieved) == (0, 1)
    assert judged(wrong, ["never"], ["/docs/cats.md"], 0.5).is_cited == 1


@pytest.mark.parametrize(
    ("text", "is_abstention"),
    [
        ("The documents do not say.", True),
        ("The documents do not say. [1]", True),
        ("The provided context does not mention it.", True),
        ("I do not know.", True),
        ("", True),
        ("thirty days", False),
        ("It is not known, but the vault has two keys.", False),
    ],
)
def test_abstention_is_recognised_in_the_words_of_any_model(text: str, is_abstention: bool) -> None:
    assert abstains(replace(ANSWER, text=text, highlight=None)) == is_abstention


def test_quoted_sentence_that_sounds_like_an_abstention_is_an_answer() -> None:
    text = "The documents do not say who signed. [1]"

    assert not abstains(replace(ANSWER, text=text, highlight=(0, 10)))


def test_abstention_is_wrong_with_accepted_answers_and_only_counted_without() -> None:
    there = judged(SAYS_NOTHING, ["thirty days"], ["/docs/vault.md"], 0.5)
    without = judged(SAYS_NOTHING, [], ["/docs/vault.md"], 0.5)

    assert (there.exact_match, there.quoted, there.is_retrieved, there.is_answered) == (0, 0, 1, 0)
    assert math.isnan(there.is_cited)
    assert all(math.isnan(getattr(without, name)) for name in COMPARED) and without.is_answered == 0
    assert (refused(["x"], 0.1).exact_match, refused([], 0.1).is_answered) == (0, 0)


def test_answers_are_found_as_whole_words() -> None:
    assert holds_answer("They gave up just 308 points.", ["308"])
    assert not holds_answer("They gave up just 1308 points.", ["308", "the"])


def test_threshold_answers_the_share_and_refuses_what_is_below() -> None:
    there, without = np.arange(1, 11) / 10, np.array([0.05, 0.05, 0.15, 0.95])

    found = refused_share(there, without, 0.9, seed=1)

    # nine of ten are at or above 0.1 .. 1.0's lower tenth, which is 0.1
    assert found.value == 0.5 and 0 <= found.low <= found.value <= found.high <= 1
    assert refused_share(there, without, 0.5, seed=1).value == 0.75


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_a_lower_share_of_answers_refuses_no_less(there: list[float], without: list[float]) -> None:
    own, other = np.array(there), np.array(without)

    shares = [refused_share(own, other, share, 0, num_resamples=2).value for share in (0.95, 0.9, 0.5, 0.1)]

    assert shares == sorted(shares)
    assert refused_share(own, np.full(3, -1.0), 0.9, 0, num_resamples=2).value == 1.0


def test_models_without_a_confidence_have_no_figure_at_a_threshold() -> None:
    there = [judged(replace(ANSWER, confidence=None), ["thirty days"], [], 0.5)] * 4
    without = [judged(replace(SAYS_NOTHING, confidence=None), [], [], 0.5)] * 3

    row = abstention(there, without, seed=0)

    assert (row["questions"], row["refused without"]) == (3, "1 [1, 1]")
    assert row["answered with the passage"] == "1 [1, 1]" and row["refused where 90% are answered"] == "-"
    assert abstention([], without, seed=0)["answered with the passage"] == "-"
