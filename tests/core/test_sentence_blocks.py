"""Sentences in code blocks and tables: each line is one."""

from stillroom.core.sentences import sentences


def _texts(text: str) -> list[str]:
    return [text[slice(*span)] for span in sentences(text)]


def test_each_line_of_a_code_block_is_a_sentence() -> None:
    text = "Run this:\n```sh\nstillroom add docs\nstillroom serve --port 80\n```\nThen open\nthe page."
    assert _texts(text) == [
        "Run this:",
        "```sh",
        "stillroom add docs",
        "stillroom serve --port 80",
        "```",
        "Then open\nthe page.",
    ]


def test_a_code_block_without_an_end_reaches_to_the_end() -> None:
    assert _texts("~~~\na = 1\nb = 2") == ["~~~", "a = 1", "b = 2"]


def test_each_row_of_a_table_without_outer_marks_is_a_sentence() -> None:
    assert _texts("code | meaning\n408 | too late\n429 | full") == ["code | meaning", "408 | too late", "429 | full"]
