"""PDF: order, paragraphs, headings by bookmark and by size, pages, and unreadable files."""

import pytest

from stillroom.errors import DocumentError
from tests.retrieval.loaders.make import image_pdf, pages, parsed, pdf, says

BODY, GAP = 11, (11.0, "")


def test_larger_type_is_a_heading_across_pages() -> None:
    document = parsed(
        "vault.pdf",
        pdf(
            [
                [
                    (20, "The vault"),
                    (BODY, "The vault keeps the keys of every"),
                    (BODY, "service. It is made of iron."),
                    GAP,
                    (BODY, "Nobody enters it alone."),
                    GAP,
                    (15, "Rotation of the"),
                    (15, "keys"),
                    (BODY, "Rotate each key every thirty days."),
                ],
                [(BODY, "The log says who did it."), (15, "Access"), (BODY, "Only the keepers may open it.")],
            ]
        ),
    )
    assert document.title == "The vault"
    assert says(document) == [
        ((), "The vault keeps the keys of every\nservice. It is made of iron."),
        ((), "Nobody enters it alone."),
        (("Rotation of the keys",), "Rotate each key every thirty days."),
        (("Rotation of the keys",), "The log says who did it."),
        (("Access",), "Only the keepers may open it."),
    ]
    assert pages(document) == [(1, 1), (1, 1), (1, 1), (2, 2), (2, 2)]


def test_bookmarks_become_headings_at_their_words_or_page_start() -> None:
    document = parsed(
        "book.pdf",
        pdf(
            [
                [(BODY, "Before."), (BODY, "1.2 Keys"), (BODY, "Turn them.")],
                [(BODY, "Then leave."), (BODY, "At night"), (BODY, "Sleep.")],
            ],
            bookmarks={"Keys": (1, 0), "By day": (2, 0), "At night": (2, 1)},
        ),
    )
    assert says(document) == [
        ((), "Before."),
        (("Keys",), "Turn them."),
        (("By day",), "Then leave."),
        (("By day", "At night"), "Sleep."),
    ]


def test_hyphenated_word_is_joined() -> None:
    document = parsed("a.pdf", pdf([[(BODY, "The vault keeps the keys of every ser-"), (BODY, "vice of the house.")]]))
    assert says(document) == [((), "The vault keeps the keys of every service of the house.")]


def test_headers_and_footers_are_kept_once() -> None:
    document = parsed(
        "a.pdf",
        pdf(
            [
                [(9, "Confidential"), GAP, (BODY, f"Text {'abcde'[n]}."), GAP, (9, f"Page {n + 1} of 5")]
                for n in range(5)
            ]
        ),
    )
    texts = [paragraph.text for paragraph in document.paragraphs]
    assert texts == ["Confidential", "Text a.", "Page 1 of 5", "Text b.", "Text c.", "Text d.", "Text e."]


def test_pdf_metadata_is_read() -> None:
    lines = [[(BODY, "Text.")]]
    document = parsed(
        "a.pdf", pdf(lines, info={"Title": "The handbook", "Author": "Ann Ash", "Keywords": "iron, keys"})
    )
    assert document.title == "The handbook"
    assert document.metadata["author"] == "Ann Ash" and document.metadata["keywords"] == "iron, keys"
    assert str(document.metadata["created"]).startswith("20") and document.metadata["num_pages"] == 1
    plain = parsed("plain.pdf", pdf(lines))
    assert plain.title == "plain" and "author" not in plain.metadata, "what the program filled in says nothing"
    assert parsed("a.pdf", pdf(lines, info={"Title": "Microsoft Word - draft7.doc"})).title == "a"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdf([[(BODY, "secret")]], password="open sesame"), "protected by a password"),
        (image_pdf(), "no text on its 1 pages.*ocrmypdf"),
        (b"", "damaged, cut off, or not a PDF"),
        (b"%PDF-1.7\n", "damaged, cut off, or not a PDF"),
        (b"<html>not found</html>", "damaged, cut off, or not a PDF"),
    ],
)
def test_unreadable_pdf_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason):
        parsed("a.pdf", data)


def test_text_limit_applies_to_pdf() -> None:
    with pytest.raises(DocumentError, match=r"documents\.max_text_bytes"):
        parsed("a.pdf", pdf([[(BODY, "word " * 10)] * 30]), max_text_bytes=1000)


def test_table_rows_at_page_edges_are_kept() -> None:
    rows = [f"2024-03-05 transfer no. {1011 + n} {187.11 + n:.2f} EUR" for n in range(60)]
    document = parsed("a.pdf", pdf([[(BODY, row) for row in rows[n : n + 10]] for n in range(0, 60, 10)]))
    assert "\n".join(text for _, text in says(document)).split("\n") == rows


def test_page_numbers_may_begin_anywhere() -> None:
    lines = [[(BODY, f"Text {'abcde'[n]}."), GAP, (9, f"Iron 2024, vol. 7, {340 + n}")] for n in range(5)]
    texts = [text for _, text in says(parsed("a.pdf", pdf(lines)))]
    assert [text for text in texts if "vol" in text] == ["Iron 2024, vol. 7, 340"]


def test_numbers_in_content_are_kept() -> None:
    lines = [
        [(BODY, f"Invoice {1001 + n}"), GAP, (BODY, f"Text {'abcde'[n]}."), GAP, (9, f"{2001 + n}")] for n in range(5)
    ]
    words = " ".join(text for _, text in says(parsed("a.pdf", pdf(lines)))).split()
    assert [word for word in words if word.isdigit()] == ["1001", "2001", "1002", "1003", "1004", "1005"]
