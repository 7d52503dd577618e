"""Questions rewritten after one of their facts is known."""

import pytest

from stillroom.rag.follow_up import follow_up, whole_name

BAND = "Night Train is a song that the band The Lamps recorded in 1984."


@pytest.mark.parametrize(
    ("question", "sentence", "found", "expected"),
    [
        ("Who leads the band that recorded Night Train?", BAND, "The Lamps", "Who leads The Lamps?"),
        (
            "In which town was the author of The Salt Road born?",
            "The Salt Road is a novel by Ines Okafor.",
            "Ines Okafor",
            "In which town was the author of Ines Okafor born?",
        ),
        (
            "Night Train was recorded by a band; who leads it?",
            BAND,
            "The Lamps",
            "The Lamps; who leads it?",
        ),
    ],
)
def test_the_longest_run_that_a_sentence_explains_is_replaced(
    question: str, sentence: str, found: str, expected: str
) -> None:
    assert follow_up(question, sentence, found) == expected


@pytest.mark.parametrize(
    ("question", "sentence", "found"),
    [
        ("Which band recorded Night Train?", BAND, "The Lamps"),  # nothing is open
        ("Who leads the choir?", BAND, "The Lamps"),  # nothing is explained
        ("Who leads the band that recorded Night Train?", BAND, "Night Train"),  # nothing is new
        ("", BAND, "The Lamps"),
        ("Who is it?", "", ""),
    ],
)
def test_no_question_follows_an_answer_that_leaves_or_explains_nothing(
    question: str, sentence: str, found: str
) -> None:
    assert follow_up(question, sentence, found) is None


def test_words_are_compared_without_their_endings() -> None:
    assert follow_up("Who leads the bands recording night trains?", BAND, "The Lamps") == "Who leads The Lamps?"


@pytest.mark.parametrize(
    ("sentence", "found", "expected"),
    [
        ("The Zephyr kettle is made by Brandt Works in Ulm.", "Brandt", "Brandt Works"),
        ("The Zephyr kettle is made by Brandt Works in Ulm.", "Works", "Brandt Works"),
        ("In Brandt Works they met.", "Brandt", "Brandt Works"),  # not `In`
        ("It was made by Brandt, Works and others.", "Brandt", "Brandt"),
        ("It was founded in 1984 Hamburg style.", "1984", "1984"),
        ("It was made by art brut works.", "brut", "brut"),
        ("It was made by Brandtwerke AG.", "Brandt", "Brandt"),  # within a word
    ],
)
def test_part_of_a_name_becomes_the_whole_name(sentence: str, found: str, expected: str) -> None:
    start = sentence.index(found)
    assert whole_name(sentence, start, start + len(found)) == expected
