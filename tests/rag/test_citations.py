"""Citations of an answer: sentences, numbers, quotes, support."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.rag.answer import Source, Support
from stillroom.rag.citations import MAX_EMBEDDED, cite, states_something
from stillroom.rag.markers import statements
from stillroom.rag.support import verbatim
from stillroom.rag.terms import stem, terms_of


def source(position: int, text: str, heading: str = "", lines: tuple[int, int] = (0, 0)) -> Source:
    return Source(f"d{position}.md", f"c{position}", text, 1.0, {}, position, heading, *lines)


LIMITS = source(
    1,
    "Requests are limited.\nThe maximum request size is 8 MiB, set by\n`server.max_body`.\n\nOther text stands here.",
    "Server > Limits",
    (10, 14),
)
KEYS = source(2, "Keys rotate every 30 days. They do not expire.", "Keys", (3, 3))
BOTH = (LIMITS, KEYS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 8 MiB [1].", [("It is 8 MiB", (1,))]),
        ("It is 8 MiB. [1]", [("It is 8 MiB.", (1,))]),
        ("It is 8 MiB.[1][2] Keys rotate.", [("It is 8 MiB.", (1, 2)), ("Keys rotate.", ())]),
        ("It is 8 MiB [1, 2]. Keys rotate [2].", [("It is 8 MiB", (1, 2)), ("Keys rotate", (2,))]),
        ("It is 8 MiB. [1] [1]\nKeys rotate.", [("It is 8 MiB.", (1,)), ("Keys rotate.", ())]),
        ("By [1], it is 8 MiB.", [("By [1], it is 8 MiB.", (1,))]),
        ("[2] Keys rotate. They stay.", [("Keys rotate.", (2,)), ("They stay.", ())]),
        ("- one is here [1]\n- two is there [2]", [("one is here", (1,)), ("two is there", (2,))]),
        ("1. First, start it [1].\n2. Then stop it.[2]", [("First, start it", (1,)), ("Then stop it.", (2,))]),
        ("Use `args[1]` now, e.g. here [2].", [("Use `args[1]` now, e.g. here", (2,))]),
        ("See [1](a.md) for that.", [("See [1](a.md) for that.", ())]),
        ("Dr. Smith wrote it \u30103\u3011. It is old.", [("Dr. Smith wrote it", (3,)), ("It is old.", ())]),
        ("Nothing [].", [("Nothing [].", ())]),
    ],
)
def test_numbers_belong_to_the_sentence_before_them(text: str, expected: list[tuple[str, tuple[int, ...]]]) -> None:
    found = [(text[one.start : one.end], one.numbers) for one in statements(text)]
    assert found == expected


def test_number_that_was_copied_with_its_words_is_no_citation() -> None:
    [one] = statements("The dome is gold.[3] [1]", ["The dome is gold.[3] It is high."])
    assert one.numbers == (1,)
    [one] = statements("[3] https://example.org/dome [1]", ["[2] nothing\n[3] https://example.org/dome"])
    assert (one.numbers, one.text) == ((1,), "[3] https://example.org/dome")


@given(st.text(alphabet="ab. \n[]12,-`?A", max_size=60))
def test_sentences_stand_in_order_inside_the_text(text: str) -> None:
    found = statements(text)
    assert all(0 <= one.start < one.end <= len(text) for one in found)
    assert all(first.end <= second.start for first, second in zip(found, found[1:], strict=False))


def test_copied_sentence_is_quoted_exactly_with_its_line() -> None:
    [one] = cite("the maximum request size is  8 MiB, set by `server.max_body`. [1]", BOTH)
    assert one.quote == "The maximum request size is 8 MiB, set by\n`server.max_body`."
    assert (one.source, one.document, one.chunk_id, one.heading) == (1, "d1.md", "c1", "Server > Limits")
    assert (one.start_line, one.end_line, one.support, one.is_explicit) == (11, 12, Support.SUPPORTED, True)
    assert LIMITS.text[one.quote_start : one.quote_end] == one.quote


def test_sentence_without_a_number_gets_the_source_that_supports_it() -> None:
    found = cite("Keys are rotated every 30 days. The maximum request size: 8 MiB.", BOTH)
    assert [(one.source, one.is_explicit, one.support) for one in found] == [
        (2, False, Support.SUPPORTED),
        (1, False, Support.SUPPORTED),
    ]
    assert found[0].quote == "Keys rotate every 30 days."


def test_number_without_a_source_is_not_supported_and_names_none() -> None:
    found = cite("Keys rotate every 30 days [2][9]. Bananas are yellow [7].", BOTH)
    assert [(one.source, one.is_explicit, one.support) for one in found] == [
        (2, True, Support.SUPPORTED),
        (0, True, Support.UNSUPPORTED),
        (0, True, Support.UNSUPPORTED),
    ]
    assert (found[2].document, found[2].quote, found[2].start_line) == ("", "", 0)


def test_named_source_that_does_not_support_is_kept_without_a_quote() -> None:
    [one] = cite("Bananas are yellow fruits of the tropics [2].", BOTH)
    assert (one.source, one.quote, one.support, one.start_line) == (2, "", Support.UNSUPPORTED, 3)


def test_number_that_no_source_holds_is_at_most_partly_supported() -> None:
    [one] = cite("Keys rotate every 40 days [2].", BOTH)
    assert one.support is not Support.SUPPORTED


def test_negation_of_one_side_is_at_most_partly_supported() -> None:
    [one] = cite("They do expire.", (KEYS,))
    assert one.support is not Support.SUPPORTED


@pytest.mark.parametrize(
    "sentence",
    [
        "Sure!",
        "Is that all?",
        "Yes.",
        "The steps are:",
        "The documents do not say.",
        "Unfortunately, the provided documents don't contain the answer.",
        "There is no information about this in the documents.",
        "I cannot answer this from the sources.",
    ],
)
def test_sentences_that_state_nothing_are_not_cited(sentence: str) -> None:
    assert not states_something(sentence)
    assert cite(sentence, BOTH) == ()


def test_copied_question_is_cited_if_the_answer_names_its_source() -> None:
    asked = source(1, "What are keys? Keys open doors. I cannot open them.")
    for text in ("What are keys? [1]", "I cannot open them. [1]"):
        [one] = cite(text, (asked,))
        assert (one.source, one.support) == (1, Support.SUPPORTED)
    assert cite("What are keys? I cannot open them.", (asked,)) == ()


def test_short_answer_is_quoted_with_its_sentence_where_the_question_is() -> None:
    other = source(3, "The buffer has 8 MiB. A row of the cache has 8 MiB too.")
    [one] = cite("8 MiB", (other, LIMITS), question="What is the maximum request size?")
    assert (one.source, one.quote[:24], one.support) == (1, "The maximum request size", Support.SUPPORTED)


def test_row_of_a_table_has_its_own_line() -> None:
    rows = source(1, "item: Jug; price: 9\n\nitem: Pan; price: 20\n\nitem: Lid; price: 3", lines=(11, 13))
    (one,) = cite("item: Pan; price: 20 [1]", [rows])
    assert (one.start_line, one.end_line) == (12, 12)


def test_lines_are_the_chunks_where_its_text_does_not_have_the_lines_of_the_file() -> None:
    joined = dataclasses.replace(LIMITS, end_line=19)
    [one] = cite("The maximum request size is 8 MiB.", (joined,))
    assert (one.start_line, one.end_line) == (10, 19)


def test_meaning_decides_where_words_do_not() -> None:
    def embed_as(vector: list[float]) -> Support:
        def embed(texts: object) -> np.ndarray:
            rows = [[1.0, 0.0] if "rotated" in text else vector for text in texts]  # type: ignore[attr-defined]
            return np.array(rows, np.float32)

        [one] = cite("A key is rotated monthly by the server.", (KEYS,), embed)
        return one.support

    assert embed_as([1.0, 0.0]) is not Support.UNSUPPORTED
    assert embed_as([0.0, 1.0]) is Support.UNSUPPORTED


def test_few_texts_are_embedded() -> None:
    numbers: list[int] = []

    def embed(texts: object) -> np.ndarray:
        numbers.append(len(texts))  # type: ignore[arg-type]
        return np.ones((numbers[-1], 2), np.float32)

    text = " ".join(f"Some keys of kind {index} rotate over there." for index in range(60))
    assert len(cite(text, BOTH, embed)) == 60
    assert numbers == [number for number in numbers if number <= MAX_EMBEDDED] and len(numbers) == 1


@given(st.text(alphabet="Ke ysro.3[1]\n", max_size=40), st.text(alphabet="Ke ysro.3\n`", max_size=60))
def test_quotes_are_parts_of_their_sources(text: str, held: str) -> None:
    for one in cite(text, [source(1, held, lines=(1, 1 + held.count("\n")))]):
        assert one.quote == held[one.quote_start : one.quote_end]
        assert (one.source == 1) or (not one.quote and one.support is Support.UNSUPPORTED)
        assert not re.match(r"\s|$", text[one.start : one.end])


def test_verbatim_text_is_whole_words() -> None:
    assert verbatim("8 MiB", "at 18 MiB, 8\nMiB and 8 MiBs") == [(11, 16)]
    assert verbatim("...", "a ... b") == []


def test_terms_separate_numbers_code_names_and_stems() -> None:
    terms = terms_of("The server's `--max-body` isn't 1,024 bytes in Rome; use max_size of two files.")
    assert terms.numbers == {"1024"} and terms.codes == {"max-body", "max_size"}
    assert terms.names == {stem("rome")} and terms.is_negated
    assert terms.words >= {"server", "2", "1024", "max_size", stem("files")}
    assert stem("rotates") == stem("rotated") == stem("rotation")
