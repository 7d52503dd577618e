"""Malformed input: valid files with a few bytes changed, also inside archives, and texts of odd tokens."""

import random
import zipfile
from collections.abc import Mapping
from io import BytesIO

from stillroom.errors import DocumentError
from tests.retrieval.loaders.make import Slides, archive, epub, parsed, pdf, slides, word, workbook

LIMITS: Mapping[str, int] = {"max_text_bytes": 1 << 20, "max_unpacked_bytes": 1 << 24}
_INTERESTING = (
    b"",
    b"\0",
    b"\xff",
    b"<",
    b">",
    b"&",
    b'"',
    b"/",
    b"0",
    b"-1",
    b"99999999999",
    b"\xed\xa0\x80",
    b"\n" * 50,
)


def seeds() -> dict[str, bytes]:
    """A small valid file of each format, by name."""

    def letter(document: object) -> None:
        document.add_heading("Keys", 1)  # type: ignore[attr-defined]
        document.add_paragraph("Rotate them.", style="List Bullet")  # type: ignore[attr-defined]
        document.add_table(2, 2).cell(0, 0).text = "cell"  # type: ignore[attr-defined]

    def deck(slides: Slides) -> None:
        slides.add("Keys", "Rotate.", notes="Slowly.").shapes.add_table(1, 2, 0, 0, 9, 9)

    pages = [
        [(20.0, "Keys"), (11.0, "Rotate them."), (11.0, "")],
        [(11.0, "And again."), (15.0, "Old"), (11.0, "Rust.")],
    ]
    return {
        "a.pdf": pdf(pages, bookmarks={"Old": (2, 0)}, info={"Title": "Keys", "Author": "Ann"}),
        "a.docx": word(letter),
        "a.pptx": slides(deck),
        "a.xlsx": workbook({"Keys": [["Name", "Days"], ["cellar", 30.5], [None, True]]}),
        "a.epub": epub({"a.xhtml": "<h1>Keys</h1><p>Iron &amp; rust.</p>"}, toc={"a.xhtml": "Keys"}),
        "a.html": b'<html lang="en"><meta name=author content=Ann><title>t</title><h1>Keys</h1>'
        b"<p>a<table><tr><td>x</table>",
        "a.md": b"---\ntitle: Keys\nyear: 2020\nby: {name: [a, b]}\n---\n# Keys\n\n- a\n"
        b"  - b\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
        "a.rst": b"Keys\n====\n\n.. note:: a\n\n   b :role:`c <d>` [1]_\n\n.. [1] foot\n\n+---+\n| a |\n+---+\n",
        "a.ipynb": b'{"cells": [{"cell_type": "code", "source": ["a"], '
        b'"outputs": [{"data": {"text/plain": "1"}}]}], "metadata": {}}',
        "a.png": b"\x89PNG\r\n\x1a\n",
        "a.csv": b'Name;Days\ncellar;"3\n4"\n',
        "a.py": b"# coding: utf-8\n@a\nclass A:\n    def b(self):\n        return '''x'''\n",
        "a.rs": b"pub struct Key {\n  id: u8,\n}\nimpl Key {\n  pub fn turn(&self) {\n  }\n}\n",
        "a.txt": "one\n\ntwo \u00fc\n".encode("utf-16"),
        "a.jsonl": b'{"_id": "a", "title": "t", "text": "x\\ud800", "metadata": {"year": 2020}}\n',
    }


def mutated(name: str, data: bytes, seed: int) -> bytes:
    """The file with a few changes, which depend on the seed alone; in half of the archives, inside one of its files."""
    chance = random.Random(seed)
    if zipfile.is_zipfile(BytesIO(data)) and chance.random() < 0.7:
        source = zipfile.ZipFile(BytesIO(data))
        files: dict[str, str | bytes] = {entry: source.read(entry) for entry in source.namelist()}
        target = chance.choice(sorted(files))
        whole = files[target]
        assert isinstance(whole, bytes)
        files[target] = _changed(whole, chance)
        return archive(files)
    return _changed(data, chance)


def _changed(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 6)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((0, 1, 1, 2, 8, 64, 1 << 20)))
        match chance.randrange(4):
            case 0:
                data = data[:start] + chance.choice(_INTERESTING) + data[end:]
            case 1:
                data = data[:start] + data[start:end] * chance.choice((2, 3, 50)) + data[end:]
            case 2:
                data = data[:start] + chance.randbytes(end - start if end - start < 100 else 4) + data[end:]
            case _:
                other = chance.randrange(len(data) + 1)
                data = data[:start] + data[other : other + 40] + data[end:]
        data = data[: 1 << 17]
    return data


def check(name: str, data: bytes) -> None:
    """A loader gives a document that can be stored, or says why not; nothing else comes out of it."""
    try:
        document = parsed(name, data, **LIMITS)
    except DocumentError as error:
        assert str(error).startswith("/files/a"), error
        return
    for paragraph in document.paragraphs:
        assert paragraph.text.strip() and "\0" not in paragraph.text
        "".join((document.title, paragraph.text, *paragraph.heading_path)).encode()
        assert 0 <= paragraph.start_line <= paragraph.end_line
        assert 0 <= paragraph.start_page <= paragraph.end_page
