"""HTML: every text node once, in blocks."""

from pathlib import Path

from stillroom.retrieval.loaders.html import parse_html

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


def test_a_fragment_without_structure_is_read() -> None:
    document = parse_html(Path("/x/page.html"), "just <i>some</i> words<br>and more")
    assert [paragraph.text for paragraph in document.paragraphs] == ["just some words and more"]
    assert document.title == "page"
