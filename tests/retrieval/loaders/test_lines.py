"""Line numbers of paragraphs are those of their words in the file, for random documents."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.document import Document
from tests.retrieval.loaders.make import parsed

_WORD = "w{:03}x"
_RST = (
    *("@\n@\n", "* @\n\n  @\n* @\n", "1. @\n2. @\n", "@ : @\n   @\n", ":@: @\n   @\n", "--all=@  @\n", "| @\n| @\n"),
    *("@\n==========\n", "@\n----------\n", "@\n\n  @\n  @\n\n  -- @\n", "@::\n\n   @\n\n   @\n", ">>> @\n@\n"),
    *(".. code-block:: python\n\n   @\n   @\n", ".. code-block:: python\n   :caption: @\n\n   @\n"),
    *(".. note:: @\n   @\n\n   .. code::\n\n      @\n", ".. topic:: @\n\n   @\n", ".. math::\n\n   @\n\n   @\n"),
    *(".. thing:: @\n   @\n\n   @\n", ".. thing::\n   @\n", ".. thing::\n\n   @\n   ------\n", ".. header:: @\n"),
    *(".. not shown\n   at all\n", ".. [1] @\n   @\n", ".. figure:: x.png\n   :alt: @\n\n   @\n\n   @\n"),
    "+-------+-------+\n| @ | @ |\n|       | @ |\n+=======+=======+\n| @ | - @|\n+-------+-------+\n",
    "===== =====\n@ @\n===== =====\n@ @\n      @\n\n@ @\n===== =====\n",
    ".. list-table:: @\n\n   * - @\n     - @\n\n       @\n   * - ::\n\n         @\n     - @\n",
    '.. csv-table:: @\n   :header: @, b\n\n   "@\n   @", @\n   @, "@\n\n   @"\n',
    "+---+\n| @ |\n+---+\n",
    "== ==\n@ @\n== ==\n",
)
_MARKDOWN = (
    *("@\n@\n", "- @\n- @\n\n  @\n", "1. @\n   1. @\n", "# @\n", "## @\n", "@\n===\n", "> @\n> @\n", "    @\n    @\n"),
    *(
        "```\n@\n\n@\n```\n",
        "***\n",
        "@<br>@\n@ `@` ![@](x.png)\n",
        "<p>@</p><p>@</p>\n",
        "<div>\n@\n<b>@</b>\n</div>\n",
    ),
    *("| @ | @ |\n|---|---|\n| @ | @<br>@ |\n| @ | |\n", "| @ | b |\n|---|---|\n", "<!-- no\n\nno -->\n"),
)
_CSV = ("@,@\n", '@,"@\n@"\n', '"@\n\n@",@\n', '"@\n","\n@"\n', "\n", ",\n")


def _words_in(text: str) -> set[str]:
    return set(re.findall(r"w\d{3}x", text))


def _check(name: str, text: str) -> None:
    """Every word is somewhere, and where it is, the lines are right."""
    numbers = itertools.count()
    text = re.sub("@", lambda _: _WORD.format(next(numbers)), text)
    places = {word: line for line, row in enumerate(text.split("\n"), start=1) for word in _words_in(row)}
    document = parsed(name, text)
    assert places.keys() <= _words_in(_all_text(document))
    for paragraph in document.paragraphs:
        assert paragraph.start_line >= 1
        for word in _words_in(paragraph.text):
            assert paragraph.start_line <= places[word] <= paragraph.end_line, (word, places[word], paragraph)


def _all_text(document: Document) -> str:
    headings = (heading for paragraph in document.paragraphs for heading in paragraph.heading_path)
    return " ".join([document.title, *headings, *(paragraph.text for paragraph in document.paragraphs)])


@pytest.mark.parametrize(
    ("name", "blocks", "start", "between"),
    [("a.rst", _RST, "", "\n"), ("a.md", _MARKDOWN, "", "\n"), ("a.csv", _CSV, "Name,Note\n", "")],
)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chunk_lines_contain_the_words_of_the_file(
    name: str, blocks: tuple[str, ...], start: str, between: str, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=8))
    _check(name, start + between.join(chosen))
