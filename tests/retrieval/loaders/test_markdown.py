"""Markdown to title, heading paths and paragraphs with lines."""

from pathlib import Path

from stillroom.core.document import Paragraph
from stillroom.retrieval.loaders.markdown import parse_markdown

PAGE = """---
title: "Key rotation"
tags: [a]
---
# Key rotation

Rotate keys *often*,
and [log](http://x.example) it.

## How

1. Open the `vault`.
2. Turn.

```python
def rotate():

    return 1
```

| key | age |
|---|---|
| a | 3 |

<p>Raw <b>markup</b></p>
"""


def test_blocks_become_paragraphs_with_heading_path_and_lines() -> None:
    document = parse_markdown(Path("/x/page.md"), PAGE)
    assert document.title == "Key rotation"
    assert document.paragraphs == (
        Paragraph("Rotate keys often,\nand log it.", (), 7, 8),
        Paragraph("1. Open the vault.", ("How",), 12, 12),
        Paragraph("2. Turn.", ("How",), 13, 13),
        Paragraph("def rotate():\n\n    return 1", ("How",), 16, 18),
        Paragraph("key | age\n\na | 3", ("How",), 21, 23),
        Paragraph("Raw markup", ("How",), 25, 25),
    )


def test_only_top_heading_is_the_title_without_front_matter() -> None:
    document = parse_markdown(Path("/x/page.md"), "# Vault\n\ntext\n")
    assert (document.title, document.paragraphs) == ("Vault", (Paragraph("text", (), 3, 3),))


def test_file_name_is_the_title_without_headings() -> None:
    assert parse_markdown(Path("/x/page.md"), "text").title == "page"


def test_leading_rule_is_not_front_matter() -> None:
    document = parse_markdown(Path("/x/page.md"), "---\n\nplain words\n")
    assert [paragraph.text for paragraph in document.paragraphs] == ["plain words"]


def test_nested_lists_and_quotes_are_read_once() -> None:
    document = parse_markdown(Path("/x/page.md"), "- one\n  - two\n    \n    more of two\n\n> quoted\n")
    assert [paragraph.text for paragraph in document.paragraphs] == ["- one", "- two", "more of two", "quoted"]


def test_the_alternative_text_of_an_image_is_text_and_scripts_are_not() -> None:
    document = parse_markdown(Path("/x/page.md"), "![a vault](v.png)\n\n<script>\nalert(1)\n</script>\n")
    assert [paragraph.text for paragraph in document.paragraphs] == ["a vault"]


def test_line_break_separates_words() -> None:
    text = (
        "| 7 | stopped<br>open<br />shut |\n|---|---|\n| 8 | H<sub>2</sub>O<BR>on |\n\none<br>two<br>\nthree<hr/>four\n"
    )
    document = parse_markdown(Path("/x/page.md"), text)
    assert document.paragraphs == (
        Paragraph("7 | stopped open shut\n\n8 | H2O on", (), 1, 3),
        Paragraph("one two\nthree four", (), 5, 6),
    )


def test_html_elements_separate_words() -> None:
    table = "<table><tr><td>a</td><td><b>b</b>c</td></tr></table><!-- no -->"
    text = f"<p>one</p><p>two<br>three</p>\n{table}\n<pre>\n  d\n</pre>\n"
    document = parse_markdown(Path("/x/page.md"), text)
    assert document.paragraphs == (Paragraph("one two three\na bc\n\n  d", (), 1, 5),)


def test_table_without_rows_has_lines() -> None:
    document = parse_markdown(Path("/x/page.md"), "| a | b |\n|---|---|\n")
    assert document.paragraphs == (Paragraph("a | b", (), 1, 2),)
