"""HTML: every text node once, in blocks."""

import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stillroom.retrieval.loaders.html import parse_html
from tests.retrieval.loaders.make import parsed

PAGE = """<!DOCTYPE html>
<html><head><title>The Vault | Docs</title><style>p {}</style></head>
<body><nav><a href="/">Home</a></nav>
<h1>The Vault</h1>
<div>Loose <b>text</b> &amp; more
<p>First   paragraph.</p>
tail
<ul><li>one<li>two <p>deep</p></ul>
</div>
<h2>Code</h2>
<pre>if x:
    y()</pre>
<table><tr><th>key</th><th>age</th></tr><tr><td>a</td><td>3</td></tr></table>
<script>alert("no")</script>
<!-- no -->
</body></html>
"""


def test_blocks_become_paragraphs() -> None:
    document = parse_html(Path("/x/page.html"), PAGE)
    assert document.title == "The Vault | Docs"
    assert [(paragraph.text, paragraph.heading_path) for paragraph in document.paragraphs] == [
        ("Loose text & more", ()),
        ("First paragraph.", ()),
        ("tail", ()),
        ("- one", ()),
        ("- two", ()),
        ("deep", ()),
        ("if x:\n    y()", ("Code",)),
        ("key | age", ("Code",)),
        ("a | 3", ("Code",)),
    ]


def test_lines_point_into_the_file() -> None:
    lines = PAGE.split("\n")
    for paragraph in parse_html(Path("/x/page.html"), PAGE).paragraphs:
        word = paragraph.text.split()[-1]
        assert any(word in line for line in lines[paragraph.start_line - 1 : paragraph.end_line + 1]), paragraph


def test_html_fragment_without_structure_is_read() -> None:
    document = parse_html(Path("/x/page.html"), "just <i>some</i> words<br>and more")
    assert [paragraph.text for paragraph in document.paragraphs] == ["just some words and more"]
    assert document.title == "page"


def test_layout_table_is_read_as_a_page() -> None:
    page = """<table><tr><td>Menu<td>
<h2>Keys</h2>
<p>Turn them.</p>
<pre>a
  b</pre>
<table><tr><td>cellar</td><td><p>30</p></td></tr>
<tr><th>gate<td></table>
after
</td></tr></table>
end"""
    document = parse_html(Path("/x/page.html"), f"<h1>One</h1>{page}<h1>Two</h1>")
    assert [(one.text, one.heading_path, one.start_line, one.end_line) for one in document.paragraphs] == [
        ("Menu", ("One",), 1, 1),
        ("Turn them.", ("One", "Keys"), 3, 3),
        ("a\n  b", ("One", "Keys"), 4, 5),
        ("cellar | 30", ("One", "Keys"), 6, 6),
        ("gate |", ("One", "Keys"), 7, 7),
        ("after", ("One", "Keys"), 8, 8),
        ("end", ("One", "Keys"), 10, 10),
        ("Two", (), 10, 10),
    ]


def test_cell_with_several_blocks_is_not_part_of_a_row() -> None:
    assert texts("<tr><td>a<td><p>b<p>c</td><td>d<td>-<tr><td>e") == ["a", "b", "c", "d | -", "e"]
    assert texts("<table><tr><td>a</td>loose<td>b</table>") == ["a", "loose", "b"]
    assert texts("<table><caption>Keys</caption><tbody><tr><td><td></tbody></table>") == ["Keys"]


def test_nested_tables_are_read_once() -> None:
    depth = 500
    assert texts("".join(f"<table><tr><td>{number}" for number in range(depth))) == list(map(str, range(depth)))


def test_unclosed_elements_are_read() -> None:
    assert texts("<p>word" * 3000) == ["word"] * 3000
    assert texts("<html><head><title>Keys</title><body>word") == ["word"]


def test_dropped_elements_count_for_line_numbers() -> None:
    page = "<script>\n\n</script>one\n<!--\n-->two<nav><b>\n</b></nav> three<pre>\n\nfour</pre>five<tr>\n<td>six</tr>7"
    document = parse_html(Path("/x/page.html"), page)
    found = [(paragraph.text, paragraph.start_line, paragraph.end_line) for paragraph in document.paragraphs]
    assert found == [("one two three", 3, 6), ("four", 8, 8), ("five", 8, 8), ("six", 9, 9), ("7", 9, 9)]


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("Key<b>s</b><div>of iron</div><svg><title>icon</title></svg>", "Keys of iron"),
        ("<div>Chapter 1</div>Keys", "Chapter 1 Keys"),
        ("<p>1.2</p><span>Keys</span>", "1.2 Keys"),
        ('Keys<a class="headerlink" href="#keys">\u00b6</a>', "Keys"),
    ],
)
def test_heading_with_nested_elements_is_one_text(heading: str, title: str) -> None:
    assert parse_html(Path("/x/page.html"), f"<h1>{heading}</h1>x").title == title


def test_blocks_in_a_pre_become_lines() -> None:
    assert texts("<pre><div>a</div><div>b\n</div>c</pre>") == ["a\nb\nc"]


def texts(page: str) -> list[str]:
    return [paragraph.text for paragraph in parse_html(Path("/x/page.html"), page).paragraphs]


@pytest.mark.parametrize("mark", ["<a ", "<a b=", "<a b='", "<p a=b "])
def test_many_unclosed_tags_are_parsed_in_linear_time(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    check = HTMLParser.check_for_whole_start_tag

    def counted(parser: HTMLParser, start: int) -> int:
        looks.append(start)
        return int(check(parser, start))

    monkeypatch.setattr(HTMLParser, "check_for_whole_start_tag", counted)
    document = parsed("a.html", f"<p>Kept</p>{mark * 2000}")
    assert document.paragraphs[0].text.startswith("Kept")
    assert len(looks) < 10


def test_titles_of_nested_drawings_are_visited_once() -> None:
    def num_calls(depth: int) -> int:
        calls = 0

        def count(_: object, event: str, __: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            document = parsed("a.html", "<svg>" + "<title>" * depth + "x</svg>" + "<p>Kept.</p>")
        finally:
            sys.setprofile(None)
        assert document.title == "a"
        return calls

    num_calls(10)  # what is imported with the first file
    assert num_calls(1000) < 3 * num_calls(500)
