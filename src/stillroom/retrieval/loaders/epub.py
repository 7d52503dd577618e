"""Loader of EPUB: the chapters in spine order, each read as HTML."""

import posixpath
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag
from xml.etree.ElementTree import ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from stillroom.core.document import Document
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.html import read_html, soup_of
from stillroom.retrieval.loaders.office import open_package
from stillroom.retrieval.loaders.source import File, Outline, check_text, decode

_FONT_OBFUSCATION = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
_METADATA = {"title": "title", "creator": "author", "subject": "subject", "language": "language", "date": "created"}
_METADATA |= {"publisher": "publisher", "identifier": "identifier"}


@dataclass(frozen=True, slots=True)
class _Item:
    """One file of the book."""

    path: str
    """Path in the archive."""
    media_type: str
    properties: str


def parse_epub(file: File) -> Document:
    """Parse an EPUB. The title is the book's own, else the only top heading, else the file name.

    Raises:
        DocumentError: The book is damaged or encrypted.
    """
    with open_package(file) as archive:
        try:
            return _read_book(file, archive)
        except (KeyError, ParseError, DefusedXmlException, zipfile.BadZipFile, EOFError) as error:
            raise DocumentError(f"{file.path}: damaged, or not an EPUB: {error}") from error


def _read_book(file: File, archive: zipfile.ZipFile) -> Document:
    opf_path = next(_elements(_xml(archive, "META-INF/container.xml"), "rootfile")).get("full-path", "")
    opf = _xml(archive, opf_path)
    items = _items(opf, posixpath.dirname(opf_path))
    spine = [items[ref.get("idref")] for ref in _elements(opf, "itemref") if ref.get("idref") in items]
    chapters = [item for item in spine if "html" in item.media_type and "nav" not in item.properties.split()]
    _refuse_protected(file, archive, {item.path for item in chapters})
    labels = _labels(archive, items)
    outline = Outline()
    num_bytes = 0
    for chapter in chapters:
        text = decode(archive.read(chapter.path), f"{file.path}: {chapter.path}")
        num_bytes += len(text.encode())
        check_text(file.path, num_bytes, file.config)
        soup = soup_of(text)
        if soup.find(["h1", "h2", "h3"]) is None:
            outline.heading(1, labels.get(chapter.path, ""))
        read_html(outline, soup, keep_lines=False)
    metadata = _metadata(opf)
    own = metadata.get("title")
    title, paragraphs = outline.finish(own[0] if own else "", file.name)
    return file.document(
        title, paragraphs, {name: values if len(values) > 1 else values[0] for name, values in metadata.items()}
    )


def _xml(archive: zipfile.ZipFile, path: str) -> Any:
    return fromstring(archive.read(path), forbid_dtd=False)  # entity declarations are still refused


def _elements(root: Any, name: str) -> Iterator[Any]:
    """Return the elements with a local name, in any namespace."""
    found = (element for element in root.iter() if isinstance(element.tag, str))
    matches = [element for element in found if element.tag.rpartition("}")[2] == name]
    if not matches and name == "rootfile":
        raise KeyError("its container names no book")
    return iter(matches)


def _items(opf: Any, folder: str) -> dict[str, _Item]:
    return {
        item.get("id", ""): _Item(
            posixpath.normpath(posixpath.join(folder, unquote(item.get("href", "")))),
            item.get("media-type", ""),
            item.get("properties", ""),
        )
        for item in _elements(opf, "item")
    }


def _metadata(opf: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for element in opf.iter():
        tag = element.tag if isinstance(element.tag, str) else ""
        name = _METADATA.get(tag.rpartition("}")[2]) if "purl.org/dc" in tag else None
        text = " ".join((element.text or "").split())
        if name and text:
            found.setdefault(name, []).append(text)
    return found


def _labels(archive: zipfile.ZipFile, items: dict[str, _Item]) -> dict[str, str]:
    """Return the title of each chapter in the table of contents, by path; for chapters without headings."""
    found: dict[str, str] = {}
    for item in items.values():
        is_nav, is_ncx = "nav" in item.properties.split(), "dtbncx" in item.media_type
        if not (is_nav or is_ncx) or item.path not in archive.namelist():
            continue
        try:
            soup = soup_of(decode(archive.read(item.path), item.path))
        except DocumentError:  # chapters can be read without their titles
            continue
        links = [(link.get("href"), link.get_text(" ")) for link in soup("a")] if is_nav else []
        for point in soup("navpoint") if is_ncx else ():
            content, text = point.find("content"), point.find("text")
            links.append((content.get("src") if content else None, text.get_text(" ") if text else ""))
        for target, label in links:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(item.path), unquote(urldefrag(str(target))[0])))
            found.setdefault(path, label)
    return found


def _refuse_protected(file: File, archive: zipfile.ZipFile, chapters: set[str]) -> None:
    """Raises DocumentError if chapters are encrypted."""
    if "META-INF/encryption.xml" not in archive.namelist():
        return
    for data in _elements(_xml(archive, "META-INF/encryption.xml"), "EncryptedData"):
        method = next((element.get("Algorithm", "") for element in _elements(data, "EncryptionMethod")), "")
        targets = {unquote(element.get("URI", "")) for element in _elements(data, "CipherReference")}
        if method not in _FONT_OBFUSCATION and targets & chapters:
            raise DocumentError(f"{file.path}: protected against copying (DRM); Stillroom cannot read it")
