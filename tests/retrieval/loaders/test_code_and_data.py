"""Source code by definitions, notebooks by cells, tables by rows."""

import json

import pytest

from stillroom.errors import DocumentError
from tests.retrieval.loaders.make import parsed, says

PYTHON = '''"""Keys."""
import os

LIMIT = 3


# Holds keys.
@final
class Vault:
    """It is iron."""

    def rotate(self, key):
        x = 1

        def inner():
            return key
        return inner

    async def open(self):
        pass


def main():
    return Vault()
'''


def test_python_splits_at_definitions() -> None:
    document = parsed("vault.py", PYTHON)
    assert document.title == "vault.py"
    found = [(path, text.strip().split("\n")[0]) for path, text in says(document)]
    assert found == [
        ((), '"""Keys."""'),
        ((), "LIMIT = 3"),
        (("Vault",), "# Holds keys."),
        (("Vault", "rotate"), "def rotate(self, key):"),
        (("Vault", "rotate", "inner"), "def inner():"),
        (("Vault", "rotate"), "return inner"),
        (("Vault", "open"), "async def open(self):"),
        (("main",), "def main():"),
    ]
    third = document.paragraphs[2]
    assert (third.start_line, third.end_line) == (7, 10)
    assert "".join(text for _, text in says(document)).count("return") == 3, "nothing is lost, nothing is there twice"


def test_unparsable_python_splits_by_indentation() -> None:
    document = parsed("old.py", "class Old:\n    def say(self):\n        print 'hello'\n\nprint 'end'\n")
    assert says(document) == [
        (("Old",), "class Old:"),
        (("Old", "say"), "    def say(self):\n        print 'hello'"),
        ((), "print 'end'"),
    ]


@pytest.mark.parametrize(
    ("name", "source", "paths"),
    [
        ("a.rs", "pub struct Key {\n  id: u8,\n}\n\nimpl Key {\n  pub fn turn(&self) {\n  }\n}\n", [("Key",), ("Key",), ("Key", "turn"), ("Key",)]),  # noqa: E501
        ("a.go", "package a\n\nfunc (v *Vault) Open(x int) error {\n\treturn nil\n}\n", [(), ("Open",)]),
        ("a.ts", "export default class Vault {\n  private x = 1\n}\n\nexport async function open() {\n}\n", [("Vault",), ("open",)]),  # noqa: E501
        ("a.c", "#include <a.h>\n\nstatic int turn(struct key *k)\n{\n  if (k) {\n    go();\n  }\n}\n\nint x;\n", [(), ("turn",), ()]),  # noqa: E501
        ("A.java", "public class A {\n  public void open(int x) {\n    while (x > 0) { }\n  }\n}\n", [("A",), ("A", "open"), ("A",)]),  # noqa: E501
        ("a.rb", "module Keys\n  def turn\n    1\n  end\nend\nputs 1\n", [("Keys",), ("Keys", "turn"), ("Keys",), ()]),
        ("a.yaml", "keys:\n  days: 30\n\nowner: ann\n", [(), ()]),
        ("Makefile", "all:\n\tmake keys\n", [()]),
    ],
)  # fmt: skip
def test_other_languages_split_by_keyword_and_indentation(name: str, source: str, paths: list[tuple[str, ...]]) -> None:
    document = parsed(name, source)
    assert [paragraph.heading_path for paragraph in document.paragraphs] == paths
    assert "\n".join(text for _, text in says(document)).split() == source.split()


def notebook(*cells: dict[str, object], **metadata: object) -> str:
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def test_notebook_cells_become_paragraphs_in_order() -> None:
    outputs = [
        {"output_type": "stream", "text": ["turned\n", "twice\n"]},
        {"output_type": "execute_result", "data": {"text/plain": "3", "image/png": "AAAA"}},
        {"output_type": "display_data", "data": {"image/png": "AAAA"}},
        {"output_type": "error", "ename": "KeyError", "evalue": "'cellar'", "traceback": ["..."]},
        {"output_type": "stream", "text": "x" * 5000},
    ]
    text = notebook(
        {"cell_type": "markdown", "source": ["# Keys\n", "\n", "Why they *turn*<br>round."]},
        {"cell_type": "code", "source": "turn(2)\n", "outputs": outputs},
        {"cell_type": "markdown", "source": "## Then"},
        {"cell_type": "raw", "source": "raw text"},
        kernelspec={"language": "python"},
        authors=[{"name": "Ann"}],
    )
    document = parsed("a.ipynb", text)
    assert document.title == "Keys"
    assert says(document)[:-2] == [
        ((), "Why they turn round."),
        ((), "turn(2)"),
        ((), "Output: turned\ntwice"),
        ((), "Output: 3"),
        ((), "Output: KeyError: 'cellar'"),
    ]
    assert says(document)[-2][1].startswith("Output: ... xxx") and len(says(document)[-2][1]) < 2100
    assert says(document)[-1] == (("Then",), "raw text")
    assert document.metadata == {"author": ("Ann",), "language": "python"}


def test_notebook_of_format_3_has_cells_in_worksheets() -> None:
    cells = [
        {"cell_type": "heading", "level": 1, "source": "Keys"},
        {"cell_type": "code", "input": ["turn()"], "outputs": []},
    ]
    document = parsed("a.ipynb", json.dumps({"worksheets": [{"cells": cells}], "nbformat": 3}))
    assert (document.title, says(document)) == ("Keys", [((), "turn()")])


@pytest.mark.parametrize("text", ["", "{}", "[]", "not JSON", '{"cells": 3}', '{"cells": [3]}'])
def test_invalid_notebook_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match=r"a\.ipynb: (not a Jupyter notebook|damaged)"):
        parsed("a.ipynb", text)


def test_table_rows_are_labelled_with_column_names() -> None:
    document = parsed("keys.csv", 'Name,Note\ncellar,"by the stairs,\nleft"\n\ngate,\n')
    assert says(document) == [((), "Name | Note"), ((), "Name: cellar; Note: by the stairs, left"), ((), "Name: gate")]
    assert [(paragraph.start_line, paragraph.end_line) for paragraph in document.paragraphs] == [(1, 1), (2, 3), (5, 5)]
    assert says(parsed("keys.csv", "Name;Days\ncellar;3,5\n"))[1] == ((), "Name: cellar; Days: 3,5")
    assert says(parsed("keys.tsv", "Name\tDays\ncellar\t3\n"))[1] == ((), "Name: cellar; Days: 3")
    assert says(parsed("numbers.csv", "1,2\n3,4\n")) == [((), "1 | 2"), ((), "3 | 4")]
    with pytest.raises(DocumentError, match="not a table"):
        parsed("a.csv", 'a,"' + "x" * 200_000)


def test_delimiter_is_counted_outside_quotation_marks() -> None:
    text = '"Name, Vorname";"Ort, ""PLZ"", Land\n(kurz), Tel."\n"Ash, Ann";5" Rohr\n'
    assert says(parsed("a.csv", text)) == [
        ((), 'Name, Vorname | Ort, "PLZ", Land (kurz), Tel.'),
        ((), 'Name, Vorname: Ash, Ann; Ort, "PLZ", Land (kurz), Tel.: 5" Rohr'),
    ]
    assert says(parsed("a.csv", '5" pipe;6" pipe, long;a\n')) == [((), '5" pipe | 6" pipe, long | a')]
    assert says(parsed("a.csv", '"' * 100_001))[0][1].startswith('"')


def test_row_ends_at_a_newline_only() -> None:
    document = parsed("a.csv", "Name,Note\nab\u2028c,d\x85e\x0bf\x1cg\ngate,\n")
    assert says(document)[1:] == [((), "Name: ab c; Note: d e f g"), ((), "Name: gate")]
    assert [paragraph.start_line for paragraph in document.paragraphs] == [1, 2, 3]


def test_repeated_column_names_count_as_text() -> None:
    with pytest.raises(DocumentError, match=r"a\.csv: more text than documents\.max_text_bytes"):
        parsed("a.csv", "Name" * 100 + ",Days\n" + "cellar,30\n" * 100, max_text_bytes=20_000)
