"""EPUB: chapters in the order of the spine, labels of the contents, metadata, protection, and bombs of entities."""

import pytest

from stillroom.errors import DocumentError
from tests.retrieval.loaders.make import archive, epub, parsed, says

CHAPTERS = {
    "z first.xhtml": "<h1>Iron</h1><p>First &amp; <b>foremost</b>.</p><h2>Rust</h2><p>Beware.</p>",
    "a.xhtml": "<p>No heading of its own.</p>",
}


def test_chapters_are_read_in_spine_order() -> None:
    book = epub(CHAPTERS, toc={"a.xhtml": "The second chapter"})
    document = parsed("book.epub", book)
    assert document.title == "The book of keys"
    assert says(document) == [
        (("Iron",), "First & foremost."),
        (("Iron", "Rust"), "Beware."),
        (("The second chapter",), "No heading of its own."),
    ]
    assert document.paragraphs[0].start_line == 0, "lines of a part of an archive are of no use"
    assert document.metadata == {"author": ("Ann Ash", "Bo Birch"), "created": "2020-02-03", "language": "en"}


def encryption(target: str, method: str) -> dict[str, str]:
    return {
        "META-INF/encryption.xml": f'<encryption><EncryptedData><EncryptionMethod Algorithm="{method}"/>'
        f'<CipherData><CipherReference URI="{target}"/></CipherData></EncryptedData></encryption>'
    }


def test_encrypted_book_is_refused_and_obfuscated_fonts_are_not() -> None:
    aes = "http://www.w3.org/2001/04/xmlenc#aes128-cbc"
    with pytest.raises(DocumentError, match="DRM"):
        parsed("a.epub", epub(CHAPTERS, extra=encryption("OEBPS/a.xhtml", aes)))
    fonts = encryption("OEBPS/font.otf", "http://www.idpf.org/2008/embedding")
    assert parsed("a.epub", epub(CHAPTERS, extra=fonts)).paragraphs


def test_entities_are_not_expanded() -> None:
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><container>&b;</container>'
    with pytest.raises(DocumentError, match="damaged, or not an EPUB"):
        parsed("a.epub", archive({"META-INF/container.xml": bomb}))
