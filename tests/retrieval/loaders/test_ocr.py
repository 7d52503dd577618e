"""OCR of drawn pages: text, pages, order and limits. Needs the extra `ocr`."""

from io import BytesIO
from pathlib import Path

import pypdfium2 as pdfium
import pytest
from PIL import Image
from reportlab.lib.pagesizes import A4
from reportlab.pdfgen.canvas import Canvas

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.config.settings import StillroomConfig
from stillroom.core.document import Document
from stillroom.errors import DocumentError
from stillroom.retrieval.intake.parsing import ParserPool
from tests.retrieval.conftest import OpenKb
from tests.retrieval.loaders.make import image_pdf, pages, parsed, pdf, says, scan, scanned_pdf

pytest.importorskip("rapidocr")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow

GAP = (12.0, "")
KEYS = [
    "Rotate the keys of the vault every thirty days, and",
    "write the date of each rotation into the green book.",
    "Two people hold them: the keeper and a deputy.",
    "Invoice 2024-0815 of 1,187.50 EUR is due on 5 March.",
]
BREAD = ["Bake the bread at 220 degrees for forty minutes.", "Let it rest on a grid before you cut it."]
MAX_ERROR = 0.02
"""Characters that differ, as a share of the drawn ones."""


def lines(texts: list[str], heading: str = "") -> list[tuple[float, str]]:
    return [*([(20.0, heading), GAP] if heading else []), *((12.0, text) for text in texts)]


def text_of(document: Document) -> str:
    return " ".join(" ".join(text.split()) for _, text in says(document))


def share_of_errors(drawn: list[str], found: str) -> float:
    """Edit distance (Levenshtein) over the number of drawn characters."""
    wanted = " ".join(drawn)
    above = list(range(len(found) + 1))
    for number, char in enumerate(wanted, 1):
        row = [number]
        for at, other in enumerate(found, 1):
            row.append(min(above[at] + 1, row[-1] + 1, above[at - 1] + (char != other)))
        above = row
    return above[-1] / len(wanted)


def saved(picture: Image.Image, kind: str, **options: object) -> bytes:
    target = BytesIO()
    picture.save(target, kind, **options)
    return target.getvalue()


def test_scanned_pages_are_read_and_pages_with_text_are_not() -> None:
    first, second = scanned_pdf([scan(lines(KEYS, "The vault"))]), pdf([lines(["This page has a layer of text."])])
    document = parsed("a.pdf", joined(first, scanned_pdf([None]), second), ocr="on")
    assert document.metadata["num_ocr_pages"] == 1 and document.metadata["num_pages"] == 3
    assert document.title == "The vault"
    assert pages(document) == [(1, 1), (3, 3)]
    assert share_of_errors([*KEYS, "This page has a layer of text."], text_of(document)) <= MAX_ERROR
    again = parsed("a.pdf", joined(first, scanned_pdf([None]), second), ocr="on")
    assert again.paragraphs == document.paragraphs


def joined(*files: bytes) -> bytes:
    target, result = BytesIO(), pdfium.PdfDocument.new()
    for data in files:
        result.import_pages(pdfium.PdfDocument(data))
    result.save(target)
    return target.getvalue()


@pytest.mark.parametrize("angle", [1.5, 90, 180])
def test_turned_page_is_turned_back(angle: float) -> None:
    turned = scan(lines(KEYS)).rotate(angle, expand=angle == 90, fillcolor=255)
    assert share_of_errors(KEYS, text_of(parsed("a.png", saved(turned, "PNG"), ocr="on"))) <= MAX_ERROR


def test_columns_of_a_scan_are_read_one_after_the_other() -> None:
    page = Image.new("L", (1240, 580), 255)
    for left, texts in ((0, KEYS), (620, [*BREAD, "Thank you, and come back soon."])):
        page.paste(scan(lines(texts), 150).crop((140, 0, 1140, 580)).resize((600, 348)), (left, 0))
    found = text_of(parsed("a.png", saved(page, "PNG"), ocr="on"))
    assert share_of_errors([*KEYS, *BREAD, "Thank you, and come back soon."], found) <= MAX_ERROR


def test_each_picture_of_a_tiff_is_a_page() -> None:
    data = saved(scan(lines(KEYS)), "TIFF", save_all=True, append_images=[scan(lines(BREAD))])
    document = parsed("fax.tiff", data, ocr="on")
    assert pages(document) == [(1, 1), (2, 2)] and document.metadata["num_pages"] == 2
    assert share_of_errors([*KEYS, *BREAD], text_of(document)) <= MAX_ERROR
    with pytest.raises(DocumentError, match=r"2 pages without text, more than documents\.ocr_max_pages \(1\)"):
        parsed("fax.tiff", data, ocr="on", ocr_max_pages=1)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "transparent", "turned by EXIF", "16 bits"])
def test_kinds_of_pictures_are_read(kind: str) -> None:
    picture = scan(lines(BREAD))
    if kind == "transparent":  # black on nothing
        picture = Image.merge("LA", (Image.new("L", picture.size), picture.point(lambda value: 255 - value)))
    options: dict[str, object] = {}
    if kind == "turned by EXIF":
        picture, options = picture.rotate(90, expand=True), {"exif": Image.Exif()}
        options["exif"][0x0112] = 6  # type: ignore[index]  # to be turned clockwise
    if kind == "16 bits":
        picture = picture.convert("I").point(lambda value: value * 256).convert("I;16")
    data = saved(picture, kind if kind.isupper() else "PNG", **options)
    assert share_of_errors(BREAD, text_of(parsed("a.jpg", data, ocr="on"))) <= MAX_ERROR


def test_long_receipt_is_read() -> None:
    strip = Image.new("L", (600, 4800), 255)
    for number, text in enumerate(BREAD):
        strip.paste(scan([(9.0, text)], dpi=150).crop((140, 85, 740, 130)), (0, 400 + 1800 * number))
    assert share_of_errors(BREAD, text_of(parsed("a.png", saved(strip, "PNG"), ocr="on"))) <= MAX_ERROR


def test_scan_is_found_at_its_page_by_add_in_a_process(open_kb: OpenKb, docs: Path) -> None:
    (docs / "scan.pdf").write_bytes(scanned_pdf([scan(lines(BREAD)), scan(lines(KEYS))]))
    kb = open_kb(StillroomConfig(documents=DocumentsConfig(num_workers=1)))
    assert "no text on its 2 pages" in kb.add([docs]).failures[0][1]
    kb.close()
    kb = open_kb(StillroomConfig(documents=DocumentsConfig(num_workers=1, ocr="on")))
    assert kb.add([docs]).num_added == 1 and kb.add([docs]).num_unchanged == 1
    best = kb.search("who holds the keys of the vault", mode="sparse").results[0].chunk
    assert best.start_page <= 2 <= best.end_page and "keeper and a deputy" in best.text


def test_page_over_its_time_limit_fails_one_file(docs: Path) -> None:
    for name, data in (("scan.pdf", scanned_pdf([scan(lines(KEYS))])), ("text.pdf", pdf([lines(KEYS)]))):
        (docs / name).write_bytes(data)
    pool = ParserPool(DocumentsConfig(num_workers=1, ocr="on", ocr_page_timeout_s=0.05))
    try:
        with pytest.raises(DocumentError, match=r"OCR of page 1 took longer than documents\.ocr_page_timeout_s"):
            pool.submit(docs / "scan.pdf").result()
        assert not pool._all, "its process was ended"
        assert pool.submit(docs / "text.pdf").result().paragraphs
    finally:
        pool.close()


def test_drawing_without_letters_is_refused() -> None:
    with pytest.raises(DocumentError, match="no text on its 1 pages, and OCR finds none"):
        parsed("a.pdf", image_pdf(), ocr="on")
    with pytest.raises(DocumentError, match="OCR finds no text in it"):
        parsed("a.png", saved(Image.new("L", (700, 10), 255), "PNG"), ocr="on")


STYLES = [
    ("Times-Roman", 11.0, 0.0, 95),
    ("Helvetica", 10.0, 0.0, 95),
    ("Courier", 9.0, 0.0, 95),
    ("Times-Roman", 9.0, 0.7, 50),
    ("Helvetica-Oblique", 12.0, -0.7, 30),
]
"""Font, size in points, angle in degrees and JPEG quality of a scan."""


def full_page(number: int) -> tuple[list[str], bytes]:
    """Lines of text and a PDF with their picture alone, scanned at 200 dots per inch."""
    font, size, angle, quality = STYLES[number]
    words = (2 * (Path(__file__).parents[3] / "LICENSE").read_text().split())[number * 300 :]
    target, drawn = BytesIO(), list[str]()
    canvas = Canvas(target, pagesize=A4)
    canvas.setFont(font, size)
    for y in range(780, 60, -int(size * 1.4)):
        num_words = 1
        while canvas.stringWidth(" ".join(words[: num_words + 1]), font, size) < 440:
            num_words += 1
        drawn.append(" ".join(words[:num_words]))
        canvas.drawString(72, y, drawn[-1])
        words = words[num_words:]
    canvas.save()
    page = pdfium.PdfDocument(target.getvalue())[0].render(scale=200 / 72).to_pil().convert("L")
    scanned = saved(page.rotate(angle, Image.Resampling.BICUBIC, fillcolor=255), "JPEG", quality=quality)
    return drawn, scanned_pdf([Image.open(BytesIO(scanned))])


@pytest.mark.parametrize("number", range(len(STYLES)))
def test_full_pages_have_few_wrong_characters(number: int) -> None:
    drawn, data = full_page(number)
    assert share_of_errors(drawn, text_of(parsed("a.pdf", data, ocr="on"))) <= MAX_ERROR
