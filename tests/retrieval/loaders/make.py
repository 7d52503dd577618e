"""Makes small real files with the libraries of their formats."""

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import docx
import openpyxl
import pypdfium2 as pdfium
from PIL.Image import Image
from pptx import Presentation
from pptx.util import Inches
from reportlab.lib.pagesizes import A4
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document
from stillroom.retrieval.loaders.load_file import parse
from stillroom.retrieval.loaders.source import File

Line = tuple[float, str]
"""Type size in points and text; an empty text is a gap."""


def parsed(name: str, data: bytes | str, **settings: Any) -> Document:
    """What a loader makes of these bytes."""
    data = data.encode() if isinstance(data, str) else data
    return parse(File(Path("/files") / name, data, DocumentsConfig(**settings)))


def says(document: Document) -> list[tuple[tuple[str, ...], str]]:
    """Heading path and text of each paragraph."""
    return [(paragraph.heading_path, paragraph.text) for paragraph in document.paragraphs]


def pages(document: Document) -> list[tuple[int, int]]:
    return [(paragraph.start_page, paragraph.end_page) for paragraph in document.paragraphs]


def pdf(
    pages: Iterable[Sequence[Line]],
    *,
    bookmarks: Mapping[str, tuple[int, int]] | None = None,
    info: Mapping[str, str] | None = None,
    password: str = "",
) -> bytes:
    """A PDF with these lines on its pages.

    Args:
        bookmarks: title -> (page from 1, level from 0).
    """
    target = BytesIO()
    canvas = Canvas(target, encrypt=password or None, invariant=True)
    for name, value in (info or {}).items():
        getattr(canvas, f"set{name}")(value)
    for number, lines in enumerate(pages, start=1):
        for title, (page, level) in (bookmarks or {}).items():
            if page == number:
                canvas.bookmarkPage(title)
                canvas.addOutlineEntry(title, title, level)
        y = 800.0
        for size, text in lines:
            y -= size * 1.2
            canvas.setFont("Helvetica", size)
            canvas.drawString(72, y, text)
        canvas.showPage()
    canvas.save()
    return target.getvalue()


def image_pdf() -> bytes:
    """A page on which there is a drawing and no text, as of a scan."""
    target = BytesIO()
    canvas = Canvas(target, invariant=True)
    canvas.rect(100, 100, 300, 300, fill=1)
    canvas.showPage()
    canvas.save()
    return target.getvalue()


def scan(lines: Sequence[Line], dpi: float = 120) -> Image:
    """The picture of the upper third of a page, with these lines, in grey."""
    page = pdfium.PdfDocument(pdf([lines]))[0]
    picture: Image = page.render(scale=dpi / 72).to_pil().convert("L")
    return picture.crop((0, 0, picture.width, picture.height // 3))


def scanned_pdf(pictures: Iterable[Image | None]) -> bytes:
    """A PDF with a picture on each page; None is a blank page."""
    target = BytesIO()
    canvas = Canvas(target, invariant=True)
    for picture in pictures:
        if picture is not None:
            canvas.setPageSize((A4[0], A4[0] * picture.height / picture.width))
            canvas.drawImage(ImageReader(picture), 0, 0, *canvas._pagesize)
        canvas.showPage()
    canvas.save()
    return target.getvalue()


def word(fill: Callable[[Any], object]) -> bytes:
    document = docx.Document()
    fill(document)
    target = BytesIO()
    document.save(target)
    return target.getvalue()


def slides(fill: Callable[["Slides"], None], title: str = "") -> bytes:
    presentation = Presentation()
    presentation.core_properties.title = title
    fill(Slides(presentation))
    target = BytesIO()
    presentation.save(target)
    return target.getvalue()


class Slides:
    """Adds slides with a title and a text."""

    def __init__(self, presentation: Any) -> None:
        self.presentation = presentation

    def add(self, title: str, text: str, notes: str = "") -> Any:
        slide = self.presentation.slides.add_slide(self.presentation.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = text
        if notes:
            slide.notes_slide.notes_text_frame.text = notes
        return slide

    def box(self, slide: Any, text: str, left: float, top: float) -> None:
        slide.shapes.add_textbox(Inches(left), Inches(top), Inches(2), Inches(1)).text_frame.text = text


def workbook(sheets: Mapping[str, Sequence[Sequence[object]]], hidden: Sequence[str] = ()) -> bytes:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(list(row))
        if name in hidden:
            sheet.sheet_state = "hidden"
    target = BytesIO()
    book.save(target)
    return target.getvalue()


def epub(
    chapters: Mapping[str, str], *, toc: Mapping[str, str] | None = None, extra: Mapping[str, str] | None = None
) -> bytes:
    """A book of these chapters (file name -> XHTML body); `toc` names chapters in its table of contents."""
    manifest = "".join(
        f'<item id="i{n}" href="{quote(name)}" media-type="application/xhtml+xml"/>' for n, name in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="i{n}"/>' for n in range(len(chapters)))
    links = "".join(f'<li><a href="{quote(name)}#top">{label}</a></li>' for name, label in (toc or {}).items())
    files = {
        "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>',
        "OEBPS/book.opf": '<package xmlns="http://www.idpf.org/2007/opf"><metadata '
        'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The book of keys</dc:title>'
        "<dc:creator>Ann Ash</dc:creator>"
        "<dc:creator>Bo Birch</dc:creator><dc:date>2020-02-03</dc:date><dc:language>en</dc:language>"
        "</metadata><manifest>"
        f'<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>{manifest}</manifest>'
        f'<spine><itemref idref="nav"/>{spine}</spine></package>',
        "OEBPS/nav.xhtml": f"<html><body><nav><ol>{links}</ol></nav></body></html>",
        **{
            f"OEBPS/{name}": f'<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml">'
            f"<head><title>x</title></head><body>{body}</body></html>"
            for name, body in chapters.items()
        },
        **(extra or {}),
    }
    return archive(files)


def archive(files: Mapping[str, str | bytes]) -> bytes:
    target = BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as written:
        for name, data in files.items():
            written.writestr(name, data)
    return target.getvalue()


def edited(data: bytes, name: str, change: Mapping[str, str]) -> bytes:
    """The package with texts in one of its files replaced."""
    source = zipfile.ZipFile(BytesIO(data))
    files = {entry: source.read(entry) for entry in source.namelist()}
    text = files[name].decode()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    return archive({**files, name: text.encode()})
