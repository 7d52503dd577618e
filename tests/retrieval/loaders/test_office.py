"""DOCX, PPTX and XLSX: order, headings, tables, notes, metadata; tracked changes; damage, passwords and ZIP bombs."""

import datetime
import re
import zipfile
from io import BytesIO
from typing import Any

import pytest
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches

from stillroom.errors import DocumentError
from tests.retrieval.loaders.make import Slides, archive, edited, pages, parsed, says, slides, word, workbook

# DOCX


def test_word_document_is_read_in_order_with_headings_lists_and_tables() -> None:
    def fill(document: Any) -> None:
        document.core_properties.author = "Ann Ash"
        document.core_properties.created = datetime.datetime(2024, 5, 6, 7, 8)
        document.add_heading("The vault", 0)
        document.add_paragraph("It keeps the keys.")
        document.add_heading("Rotation", 1)
        document.add_paragraph("Rotate them.", style="List Bullet")
        table = document.add_table(2, 2)
        for cell, text in zip(table._cells, ("Key", "Days", "cellar", "30"), strict=True):
            cell.text = text
        document.add_heading("By night", 2)
        document.add_paragraph("Not at all.")
        document.add_heading("Access", 1)

    document = parsed("a.docx", word(fill))
    assert document.title == "The vault"
    assert says(document) == [
        ((), "It keeps the keys."),
        (("Rotation",), "- Rotate them."),
        (("Rotation",), "Key | Days\ncellar | 30"),
        (("Rotation", "By night"), "Not at all."),
        ((), "Access"),
    ]
    assert document.metadata["author"] == "Ann Ash"
    assert str(document.metadata["created"]).startswith("2024-05-06T07:08")
    assert pages(document)[0] == (0, 0), "no program has laid it out"


def test_word_tracked_changes_links_text_boxes_and_pages() -> None:
    ns = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    data = edited(
        word(lambda document: document.add_paragraph("MARK")),
        "word/document.xml",
        {
            "<w:r><w:t>MARK</w:t></w:r>": f"<w:r {ns}><w:t>Open </w:t></w:r>"
            "<w:ins><w:r><w:t>the new </w:t></w:r></w:ins>"
            "<w:del><w:r><w:delText>the old </w:delText></w:r></w:del>"
            "<w:hyperlink><w:r><w:t>vault</w:t></w:r></w:hyperlink><w:r><w:t>.</w:t></w:r>"
            "<w:r><w:pict><w:txbxContent><w:p><w:r><w:t>Boxed.</w:t></w:r></w:p></w:txbxContent></w:pict></w:r></w:p>"
            "<w:p><w:r><w:lastRenderedPageBreak/><w:t>Next page </w:t></w:r>"
            "<w:r><w:lastRenderedPageBreak/><w:t>and on.</w:t></w:r></w:p>"
            "<w:sdt><w:sdtContent><w:p><w:r><w:t>Controlled.</w:t></w:r></w:p></w:sdtContent></w:sdt>"
            "<w:p><w:r><w:t>End.</w:t></w:r>"
        },
    )
    document = parsed("a.docx", data)
    assert [text for _, text in says(document)] == [
        "Open the new vault.",
        "Boxed.",
        "Next page and on.",
        "Controlled.",
        "End.",
    ]
    assert pages(document) == [(1, 1), (1, 1), (2, 3), (3, 3), (3, 3)]


def with_footnote(data: bytes) -> bytes:
    """The document, in which the footnote 2 is `From Sweden.`"""
    ns = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    base = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    data = edited(
        data,
        "word/_rels/document.xml.rels",
        {"</Relationships>": f'<Relationship Id="rId99" Type="{base}/footnotes" Target="notes.xml"/></Relationships>'},
    )
    source = zipfile.ZipFile(BytesIO(data))
    files: dict[str, str | bytes] = {entry: source.read(entry) for entry in source.namelist()}
    files["word/notes.xml"] = (
        f'<w:footnotes {ns}><w:footnote w:id="0" w:type="separator"><w:p/></w:footnote>'
        '<w:footnote w:id="2"><w:p><w:r><w:t>From Sweden.</w:t></w:r></w:p></w:footnote></w:footnotes>'
    )
    return archive(files)


def test_footnotes_follow_their_references() -> None:
    data = word(lambda document: document.add_paragraph("MARK"))
    data = edited(data, "word/document.xml", {"<w:t>MARK</w:t>": '<w:t>Iron</w:t><w:footnoteReference w:id="2"/>'})
    document = parsed("a.docx", with_footnote(data))
    assert [text for _, text in says(document)] == ["Iron[1]", "[1] From Sweden."]


def test_notes_and_text_boxes_of_cells_follow_their_table() -> None:
    def fill(document: Any) -> None:
        table = document.add_table(1, 2)
        table.cell(0, 0).text, table.cell(0, 1).text = "MARK", "30"
        document.add_paragraph("Then")

    box = "<w:txbxContent><w:p><w:r><w:t>{}</w:t>{}</w:r></w:p></w:txbxContent>"
    inner = f"<w:pict>{box.format('Inner.', '')}</w:pict>"
    data = with_footnote(
        edited(
            word(fill),
            "word/document.xml",
            {
                "<w:t>MARK</w:t>": "<w:t>Iron</w:t><w:lastRenderedPageBreak/>"
                f'<w:footnoteReference w:id="2"/><w:pict>{box.format("Boxed.", inner)}</w:pict>',
                "<w:t>Then</w:t>": '<w:t>Then</w:t><w:footnoteReference w:id="2"/>',
            },
        ),
    )
    document = parsed("a.docx", data)
    assert [text for _, text in says(document)] == [
        "Iron[1] | 30",
        "[1] From Sweden.",
        "Boxed.",
        "Inner.",
        "Then[2]",
        "[2] From Sweden.",
    ]
    assert pages(document)[0] == (1, 2)


# PPTX


def test_slides_are_pages_with_title_texts_tables_charts_and_notes() -> None:
    def fill(deck: Slides) -> None:
        first = deck.add("Keys", "Rotate them.\nLock them.", notes="Speak slowly.")
        deck.box(first, "to the right", 6, 6)
        deck.box(first, "to the left", 1, 6)
        second = deck.add("Figures", "")
        table = second.shapes.add_table(2, 2, Inches(1), Inches(2), Inches(4), Inches(1)).table
        for cell, text in zip(table.iter_cells(), ("Key", "Days", "cellar", "30"), strict=True):
            cell.text = text
        chart: Any = CategoryChartData()  # type: ignore[no-untyped-call]
        chart.categories = ["2023", "2024"]
        chart.add_series("Lost", (1234567, 1.5))
        second.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, Inches(1), Inches(4), Inches(4), Inches(3), chart)
        hidden = deck.add("Hidden", "nobody is shown this")
        hidden.element.set("show", "0")
        deck.add("", "No title here.")

    document = parsed("a.pptx", slides(fill, title="The vault"))
    assert document.title == "The vault"
    assert [(path, text, page) for (path, text), (page, _) in zip(says(document), pages(document), strict=True)] == [
        (("Keys",), "Rotate them.\nLock them.", 1),
        (("Keys",), "to the left", 1),
        (("Keys",), "to the right", 1),
        (("Keys",), "Notes: Speak slowly.", 1),
        (("Figures",), "Key | Days\ncellar | 30", 2),
        (("Figures",), "Chart\n2023: Lost 1234567\n2024: Lost 1.5", 2),
        (("Slide 4",), "No title here.", 4),
    ]
    assert document.metadata["num_pages"] == 4


# XLSX


def test_sheet_rows_are_labelled_below_their_sheet_name() -> None:
    rows: list[list[object]] = [
        ["Name", "Days", "Since", "Safe"],
        ["cellar", 30, datetime.date(2020, 1, 2), True],
        [],
        ["gate", 1234567890123.45, None, False, 0.1 + 0.2],
    ]
    data = workbook({"Keys": rows, "Numbers": [[1, 2], [3, 4]], "Empty": [], "Lists": [["x"]]}, hidden=["Lists"])
    document = parsed("house.xlsx", data)
    assert document.title == "house"
    assert says(document) == [
        (("Keys",), "Name | Days | Since | Safe"),
        (("Keys",), "Name: cellar; Days: 30; Since: 2020-01-02; Safe: yes"),
        (("Keys",), "Name: gate; Days: 1234567890123.45; Safe: no; 0.3"),
        (("Numbers",), "1 | 2"),
        (("Numbers",), "3 | 4"),
        ((), "Empty"),
    ]
    assert [paragraph.start_line for paragraph in document.paragraphs] == [1, 2, 4, 1, 2, 0]


def test_wrong_sheet_dimensions_are_ignored() -> None:
    data = workbook({"Keys": [["cellar", 30]]})
    name = "xl/worksheets/sheet1.xml"
    text = zipfile.ZipFile(BytesIO(data)).read(name).decode()
    dimension = re.search(r'<dimension ref="[^"]*"\s*/>', text)
    assert dimension is not None
    document = parsed("a.xlsx", edited(data, name, {dimension.group(): '<dimension ref="A1:XFD1048576"/>'}))
    assert says(document) == [(("Keys",), "cellar | 30")]


# All of them


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.xlsx", "a.epub"])
def test_invalid_office_file_is_refused_with_a_reason(name: str) -> None:
    cases = {
        b"": "empty",
        b"PK\x03\x04 and then nothing": "damaged or cut off",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512): "protected by a password, or in Office's old format",
        archive(
            {"hello.txt": "a ZIP file of something else"}
        ): "not a (Word|presentation|workbook)|not an EPUB|damaged",
    }
    for data, reason in cases.items():
        with pytest.raises(DocumentError, match=reason):
            parsed(name, data)


def test_zip_bomb_is_not_unpacked() -> None:
    bomb = archive({"word/document.xml": bytes(4 << 20)})
    assert len(bomb) < 10_000
    with pytest.raises(DocumentError, match=r"unpacks to more than documents\.max_unpacked_bytes \(1 MiB\)"):
        parsed("a.docx", bomb, max_unpacked_bytes=1 << 20)


def test_unsupported_formats_are_refused_with_advice() -> None:
    for name, advice in (("a.doc", "as .docx"), ("a.xls", "as .xlsx"), ("a.odt", "as .docx or .pdf")):
        with pytest.raises(DocumentError, match=f"does not read this format; save it {advice}"):
            parsed(name, b"anything")
