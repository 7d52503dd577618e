"""reStructuredText: headers, sections, unknown markup, and files that docutils cannot read."""

from pathlib import Path

import pytest

from stillroom.core.document import Paragraph
from stillroom.retrieval.loaders import rst
from stillroom.retrieval.loaders.rst import parse_rst

PEP = """PEP: 8
Title: Style Guide for
       Python Code
Author: Guido van Rossum

Introduction
============

This gives
conventions; see :pep:`20`.

Lay-out
-------

Use 4 spaces::

    if x:

        y()

- one
- two

.. comment: not shown
"""


def test_pep_title_comes_from_its_header() -> None:
    document = parse_rst(Path("/x/pep-0008.rst"), PEP)
    assert document.title == "PEP 8: Style Guide for Python Code"
    assert not any("Guido" in paragraph.text for paragraph in document.paragraphs)


def test_blocks_become_paragraphs_with_heading_path_and_lines() -> None:
    document = parse_rst(Path("/x/pep-0008.rst"), PEP)
    assert document.paragraphs == (
        Paragraph("This gives\nconventions; see PEP 20.", ("Introduction",), 9, 10),
        Paragraph("Use 4 spaces:", ("Introduction", "Lay-out"), 15, 15),
        Paragraph("if x:\n\n    y()", ("Introduction", "Lay-out"), 17, 19),
        Paragraph("- one", ("Introduction", "Lay-out"), 21, 21),
        Paragraph("- two", ("Introduction", "Lay-out"), 22, 22),
    )


def test_header_without_title_is_text() -> None:
    document = parse_rst(Path("/x/a.rst"), "Note: this\nThat: too\n\ntext\n")
    assert [paragraph.text for paragraph in document.paragraphs] == ["Note: this\nThat: too", "text"]


def test_unknown_directives_and_roles_are_read_for_their_text() -> None:
    text = """Title
=====

.. versionmade:: 3.1
   It *can* be
   :thing:`done <target>`.

.. frobnicate::

   Inner text.

.. image:: x.png
   :alt: a vault
"""
    document = parse_rst(Path("/x/a.rst"), text)
    texts = [paragraph.text for paragraph in document.paragraphs]
    assert texts == ["3.1\nIt can be\ndone.", "Inner text.", "a vault"]


def test_tables_definitions_and_footnotes_are_kept() -> None:
    text = """Head
====

===  ===
a    b
===  ===
1    2
===  ===

term : kind
    meaning

| verse one
| verse two

.. [1] A note.
.. note:: Mind the step.
"""
    document = parse_rst(Path("/x/a.rst"), text)
    texts = [paragraph.text for paragraph in document.paragraphs]
    assert texts == [
        *("a | b", "1 | 2", "term : kind", "meaning", "verse one\nverse two", "[1] A note.", "Mind the step.")
    ]


def placed(text: str) -> list[tuple[str, int, int]]:
    """Text, first and last line of each paragraph."""
    document = parse_rst(Path("/x/a.rst"), text)
    return [(paragraph.text, paragraph.start_line, paragraph.end_line) for paragraph in document.paragraphs]


def test_table_row_has_its_own_lines() -> None:
    grid = """+---+----------+
| a | bb       |
+===+==========+
| 1 | two      |
|   |          |
|   | - more   |
+---+----------+
| 3 | .. code::|
|   |          |
|   |    four  |
+---+----------+
"""
    assert placed(grid) == [("a | bb", 2, 2), ("1 | two more", 4, 6), ("3 | four", 8, 10)]
    listed = """.. list-table:: Keys

   * - a
     - b

       c
   * -
     - d
"""
    assert placed(listed) == [("Keys", 1, 1), ("a | b c", 3, 6), (" | d", 8, 8)]


def test_csv_table_row_has_its_own_lines() -> None:
    text = """one

.. csv-table:: Keys
   :header: "a", "b"

   "1
   2", 3
   4, "5

   6"

end
"""
    assert placed(text) == [
        *(("one", 1, 1), ("Keys", 3, 3), ("a | b", 3, 5), ("1 2 | 3", 6, 7), ("4 | 5 6", 8, 10), ("end", 12, 12))
    ]


def test_argument_of_an_unknown_directive_has_its_lines() -> None:
    text = "one\n\n.. c:thing:: two\n   three\n\n   .. inner::\n      four\n\n.. c:thing:: five::\n"
    assert placed(text) == [("one", 1, 1), ("two\nthree", 3, 4), ("four", 7, 7), ("five:", 9, 9)]


def test_header_decoration_does_not_move_other_blocks() -> None:
    text = "Head\n====\n\none\n\nDeep\n----\n\n.. header:: two\n\nthree\n"
    assert placed(text) == [("two", 9, 9), ("one", 4, 4), ("three", 11, 11)]


def test_markup_refused_by_docutils_is_text() -> None:
    wide = "+---+---+\n| a | b |\n+---+---+\n| 1 | much too long |\n+---+---+"
    over = "=== ===\na   b\n=== ===\nover the margin\n=== ==="
    code = ".. code-block:: python\n   :caption: Keys\n\n   turn()"
    found = placed(f"one\n\n{wide}\n\n{over}\n\n{code}\n\n.. note::\n\n   Inner\n   -----\n\n   end\n")
    assert found == [
        *(("one", 1, 1), (wide, 3, 7), (over, 9, 13), (code, 15, 18)),
        *(("Inner\n-----", 22, 23), ("end", 25, 25)),
    ]


def test_docutils_messages_are_not_text() -> None:
    text = "+-----+------+\n| one | ++   |\n+-----+------+\n\nTwo\n---\n\n`three\n\nLonger title\n------\n\nfour\n"
    assert [text for text, _, _ in placed(text)] == ["one | ++", "`three", "four"]


def test_other_files_are_not_included(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the password")
    document = parse_rst(tmp_path / "a.rst", f"text\n\n.. include:: {tmp_path}/secret.txt\n")
    assert [paragraph.text for paragraph in document.paragraphs] == ["text"]


def test_broken_markup_loses_no_text() -> None:
    document = parse_rst(Path("/x/a.rst"), "Head\n==\n\n*open and ``half`\n\n    odd\n  indents\n")
    text = " ".join(paragraph.text for paragraph in document.paragraphs)
    assert all(word in text for word in ("open", "half", "odd", "indents"))


def test_file_is_plain_text_if_docutils_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def throw(text: str) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(rst, "_parse", throw)
    document = parse_rst(Path("/x/a.rst"), "one\n\ntwo\n")
    assert [paragraph.text for paragraph in document.paragraphs] == ["one", "two"]


def test_text_similar_to_a_header_is_text() -> None:
    text = "Key:        value\n" * 2000 + "x"  # could it be matched in two ways, this would take for ever
    (paragraph,) = parse_rst(Path("/x/a.rst"), text).paragraphs
    assert (paragraph.start_line, paragraph.end_line) == (1, 2001)


def test_long_names_and_labels_are_read_in_linear_time() -> None:
    assert rst._ROLE.findall(":a" * 200_000) == []
    (paragraph,) = parse_rst(Path("/x/a.rst"), ":thing:`a" + " " * 200_000 + "b <c`").paragraphs
    assert paragraph.text.split() == ["a", "b", "<c"]


def test_long_line_is_read() -> None:
    (paragraph,) = parse_rst(Path("/x/a.rst"), "word " * 5000).paragraphs
    assert len(paragraph.text.split()) == 5000


def test_rst_line_ends_at_a_newline_only() -> None:
    document = parse_rst(Path("/x/a.rst"), "one\u2028two\x0bthree\x85four\x1cfive\n\nsix\n")
    found = [(paragraph.text.split(), paragraph.start_line, paragraph.end_line) for paragraph in document.paragraphs]
    assert found == [(["one", "two", "three", "four", "five"], 1, 1), (["six"], 3, 3)]


def test_a_file_with_a_date_has_the_same_text_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Written on |today| at |time|.\n\n.. |today| date::\n.. |time| date:: %H:%M\n\n.. date:: %d\n"
    found = []
    for day in ("2026-11-26", "2026-11-27"):
        monkeypatch.setattr("time.strftime", lambda *_, day=day: day)
        found.append([one.text for one in parse_rst(Path("/x/a.rst"), text).paragraphs])
    assert found[0] == found[1] and found[0][0] == "Written on %Y-%m-%d at %H:%M."
