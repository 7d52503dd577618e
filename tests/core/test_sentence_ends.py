"""Where sentences end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.sentences import sentence_at, sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. A. B. Smith came. He left.", ["Dr. A. B. Smith came.", "He left."]),
        ("See Fig. 3 and No. 5. It shows x.", ["See Fig. 3 and No. 5.", "It shows x."]),
        ("No. It is not.", ["No.", "It is not."]),
        ("Wait 5 min. Then stop.", ["Wait 5 min.", "Then stop."]),
        ("Use names, e.g. Foo, etc. Then go.", ["Use names, e.g. Foo, etc. Then go."]),
        ("Version 2.0.1 is out. Set node.js in config.toml.", ["Version 2.0.1 is out.", "Set node.js in config.toml."]),
        ("It is 8 MiB (`max_body`). `foo` is it.", ["It is 8 MiB (`max_body`).", "`foo` is it."]),
        ('He said "Stop." Then left? Yes!', ['He said "Stop."', "Then left?", "Yes!"]),
        ("- one. two\n- Three\n\nAfter it.", ["- one. two", "- Three", "After it."]),
        ("1. First do it.\n2. Then stop.", ["1. First do it.", "2. Then stop."]),
        ("The first line\ngoes on. Next.", ["The first line\ngoes on.", "Next."]),
        ("", []),
        (" \n ", []),
        (
            "Resturlaub verf\u00e4llt am 31. M\u00e4rz des Jahres. Das gilt seit dem 2. Quartal. It was 12. Many left.",
            [
                "Resturlaub verf\u00e4llt am 31. M\u00e4rz des Jahres.",
                "Das gilt seit dem 2. Quartal.",
                "It was 12.",
                "Many left.",
            ],
        ),
    ],
)
def test_sentences_end_where_a_reader_stops(text: str, expected: list[str]) -> None:
    assert [text[slice(*span)] for span in sentences(text)] == expected


@given(st.text(alphabet="Aa .!?\n-1`|#*\u3002", max_size=80))
def test_sentences_hold_every_character_that_is_not_blank(text: str) -> None:
    spans = sentences(text)
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
    assert all(text[start:end] == text[start:end].strip() != "" for start, end in spans)
    outside = set(range(len(text))) - {place for start, end in spans for place in range(start, end)}
    assert all(text[place].isspace() for place in outside)
    for start, end in spans:
        assert sentence_at(spans, start, end) == (start, end)
