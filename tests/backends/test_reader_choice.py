"""The answer that is written for readings: which chunk, what is quoted, and where the span is in it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.backends.reader.choose import NO_ANSWER, ScoreScale, choose, quote, ranked_score
from stillroom.core.sentences import sentence_at, sentences
from stillroom.models.reader import Reading


def quoted(text: str, words: str) -> tuple[str, str]:
    """The quote of the sentence around some words, and the words that it highlights."""
    start = text.index(words)
    span = start, start + len(words)
    shown, highlight = quote(text, span, sentence_at(sentences(text), *span))
    return shown, shown[slice(*highlight)]


def test_the_best_reading_is_quoted_with_the_number_of_its_source() -> None:
    texts = ["Lima is large. It lies in Peru.", "Cusco lies at 3,400 m."]
    readings = [Reading((26, 30), (15, 31), 1.0), Reading((14, 21), (0, 22), 2.0)]
    answer = choose(texts, readings, ScoreScale.of({}))
    assert answer.text == "Cusco lies at 3,400 m. [2]"
    assert answer.highlight is not None and answer.text[slice(*answer.highlight)] == "3,400 m"
    assert answer.confidence == pytest.approx(0.7058, abs=1e-4), "of the score lowered by its rank"


def test_a_score_below_the_threshold_is_no_answer() -> None:
    answer = choose(["Lima lies in Peru."], [Reading((0, 4), (0, 18), -1.0)], ScoreScale.of({"threshold": -0.5}))
    assert (answer.text, answer.highlight) == (NO_ANSWER, None)
    assert answer.confidence == pytest.approx(0.4378, abs=1e-4)


def test_chunks_without_words_are_no_answer() -> None:
    assert choose(["", ""], [None, None], ScoreScale.of({"threshold": -100})).text == NO_ANSWER
    assert choose([], [], ScoreScale.of({"threshold": -100})).confidence == 0.0


def test_of_equal_scores_the_earlier_chunk_answers() -> None:
    texts = ["One two three.", "Four five six."]
    equal = [Reading((0, 3), (0, 14), 1.0), Reading((0, 4), (0, 14), 1.0)]
    assert choose(texts, equal, ScoreScale.of({})).text.endswith("[1]")
    later_is_better = [equal[0], Reading((0, 4), (0, 14), 1.4)]
    assert choose(texts, later_is_better, ScoreScale.of({})).text.endswith("[2]")
    assert choose(texts, equal, ScoreScale.of({})).confidence == pytest.approx(0.6225, abs=1e-4)


def test_later_chunks_need_a_higher_score_up_to_the_fifth() -> None:
    lowered = [2.0 - ranked_score(2.0, rank) for rank in range(8)]
    assert lowered[0] == 0 and lowered == sorted(lowered)
    assert lowered[1] == 0.25 and lowered[4] == lowered[7] == pytest.approx(0.5805, abs=1e-4)


def test_line_breaks_in_a_sentence_become_blanks() -> None:
    text = "First one.\nThe limit of a\n  request is\n32 MiB by default. Last one."
    assert quoted(text, "32 MiB") == ("The limit of a request is 32 MiB by default.", "32 MiB")


def test_a_span_over_a_line_break_is_highlighted_whole() -> None:
    assert quoted("It is called the\nknowledge tree today.", "the\nknowledge")[1] == "the knowledge"


def test_a_list_marker_is_left_out_unless_it_is_the_answer() -> None:
    text = "Steps\n\n1. Stop the server.\n2. Copy the folder.\n"
    assert quoted(text, "Copy") == ("Copy the folder.", "Copy")
    assert quoted(text, "2") == ("2. Copy the folder.", "2")


def test_an_item_of_a_short_list_is_shown_with_the_list_and_its_introduction() -> None:
    items = "- a signed form,\n- your old card or\n  a passport,\n\n- two photographs.\n"
    text = f"Come early. To renew a card, bring:\n\n{items}\nThe office closes at noon."
    shown, highlight = quoted(text, "a signed form")
    assert shown == "To renew a card, bring:\n" + items.rstrip() and highlight == "a signed form"
    assert quoted(text, "a passport") == (shown, "a passport")
    assert quoted(text, "two photographs") == (shown, "two photographs")
    assert quoted(text, "noon")[0] == "The office closes at noon."
    assert quoted("Bring:\n" + "- one more form\n" * 40, "one more")[0] == "one more form", "the list is too long"


def test_lines_that_are_no_sentence_stay_lines() -> None:
    text = "Run these two commands.\n\npip install stillroom\nstillroom serve"
    calls = "first = open(name)\nsecond = ask(first)"
    assert quoted(f"Call them so.\n\n{calls}", "second")[0] == calls
    assert quoted(text, "serve") == ("pip install stillroom\nstillroom serve", "serve")


def test_a_list_after_a_colon_is_shown_up_to_its_end() -> None:
    text = "The modes are these three:\n\n- exact,\n- anywhere, which\n  changes answers,\n- off.\n\nAnother paragraph."
    shown, highlight = quoted(text, "three")
    assert shown == "The modes are these three:\n- exact,\n- anywhere, which\n  changes answers,\n- off."
    assert highlight == "three"


def test_code_after_a_colon_keeps_its_marks_and_the_number_stands_below() -> None:
    text = "To start the server, run this command:\n\n```sh\nstillroom serve\n```\nThen open the page."
    span = (0, 8)
    answer = choose([text], [Reading(span, sentence_at(sentences(text), *span), 3.0)], ScoreScale.of({}))
    assert answer.text == "To start the server, run this command:\n```sh\nstillroom serve\n```\n[1]"


def test_a_long_list_is_cut_between_lines_and_cut_code_is_closed() -> None:
    items = "\n".join(f"- item number {number} of a long list" for number in range(40))
    shown, _ = quoted("All of the items:\n" + items, "items")
    lines = shown.splitlines()
    assert 5 < len(lines) < 20 and len(shown) < 17 + 402
    assert all(line.endswith("of a long list") for line in lines[1:])
    code = "\n".join(f"line_{number} = {number}" for number in range(60))
    assert quoted(f"This is the code:\n```\n{code}\n```", "code")[0].endswith("\n```")


def test_a_paragraph_after_a_colon_is_not_added() -> None:
    assert quoted("This is what we know:\n\nNothing at all is known.", "what")[0] == "This is what we know:"


def test_a_fragment_is_shown_with_the_lines_around_it() -> None:
    text = "Limits of the server.\n\n| limit | value |\n|---|---|\n| body | 32 MiB |\n\n" + "Other text. " * 40
    start = text.index("32 MiB")
    shown, highlight = quote(text, (start, start + 6), (start, start + 6))
    assert shown == "| limit | value |\n|---|---|\n| body | 32 MiB |"
    assert shown[slice(*highlight)] == "32 MiB"


def test_a_fragment_of_code_is_shown_as_code() -> None:
    text = "Install it.\n\n```\npip install stillroom\nstillroom serve\n```\n"
    start = text.index("stillroom serve")
    shown, highlight = quote(text, (start, start + 9), (start, start + 15))
    assert shown == "```\npip install stillroom\nstillroom serve\n```"
    assert shown[slice(*highlight)] == "stillroom"


def test_a_row_of_a_table_is_quoted_without_the_other_rows() -> None:
    text = "code | meaning of it\n408 | the request is incomplete\n429 | the queue is full"
    assert quoted(text, "incomplete")[0] == "408 | the request is incomplete"


WORDS = st.sampled_from(
    [
        "Lima",
        "the limit",
        "e.g. one",
        "32 MiB",
        "- ",
        "\n",
        "\n\n",
        ". ",
        ": ",
        ":\n",
        " | ",
        "```",
        "\n    x",
        "#",
        "1.",
    ]
)


def test_a_bullet_that_introduces_a_list_is_no_item_of_it() -> None:
    text = "- Rotate:\n  daily or weekly"
    shown, highlight = quote(text, (2, 8), (0, 9))
    assert shown[slice(*highlight)] == "Rotate"


@given(st.lists(WORDS, min_size=1, max_size=30), st.data())
def test_the_highlight_is_the_span_whatever_the_text(words: list[str], data: st.DataObject) -> None:
    text = "".join(f"{word} " for word in words)
    tokens = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    if not tokens:
        return
    first = data.draw(st.integers(0, len(tokens) - 1))
    last = data.draw(st.integers(first, min(first + 5, len(tokens) - 1)))
    span = tokens[first][0], tokens[last][1]
    answer = choose([text], [Reading(span, sentence_at(sentences(text), *span), 1.0)], ScoreScale.of({}))
    assert answer.highlight is not None and answer.text.endswith("[1]")
    assert answer.text[slice(*answer.highlight)].split() == text[slice(*span)].split()
    body = answer.text.removesuffix("[1]").replace("```", "").split()
    assert " ".join(body) in " ".join(text.replace("```", "").split()), "a quote adds and changes no word"
