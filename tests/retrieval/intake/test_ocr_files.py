"""Scanned files without OCR: messages, limits, and which files are read again when OCR is turned on or off."""

import dataclasses
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Literal

import pytest
from PIL import Image

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.config.settings import StillroomConfig
from stillroom.errors import ConfigError, DocumentError
from stillroom.retrieval import knowledge_base
from stillroom.retrieval.intake.discovery import discover
from stillroom.retrieval.intake.parsing import ParserPool
from stillroom.retrieval.intake.reading import FileReader
from stillroom.retrieval.loaders.document_metadata import GivenMetadata
from stillroom.retrieval.store.sql_rows import SourceFile
from tests.retrieval.conftest import MakeFile, OpenKb
from tests.retrieval.loaders.make import image_pdf, parsed, pdf, scanned_pdf

OFF, ON = DocumentsConfig(num_workers=1), DocumentsConfig(num_workers=1, ocr="on")


def png(width: int, height: int) -> bytes:
    target = BytesIO()
    Image.new("1", (width, height)).save(target, "PNG")
    return target.getvalue()


def checked(
    path: Path, config: DocumentsConfig, known: SourceFile | None, given: GivenMetadata | None = None
) -> tuple[bool, SourceFile]:
    """Whether a file counts as unchanged, and its state for the next time."""
    (file,) = FileReader(config, {}).read([path], {str(path): known} if known else {}, given or {})
    assert file.source is not None
    return file.is_unchanged, file.source


def test_file_read_without_ocr_is_read_again_with_it_once(docs: Path) -> None:
    path = docs / "a.pdf"
    path.write_bytes(pdf([[(11, "Text.")]]))
    _, plain = checked(path, OFF, None)
    assert checked(path, OFF, plain) == (True, plain)
    is_unchanged, read = checked(path, ON, plain)
    assert not is_unchanged and checked(path, ON, read) == (True, read)
    assert read.content_hash.partition(":")[0] == plain.content_hash, "the hash of the bytes stays first"


def test_text_from_ocr_is_kept_while_the_file_stays_when_ocr_is_off(docs: Path) -> None:
    path = docs / "a.pdf"
    path.write_bytes(pdf([[(11, "Text.")]]))
    _, read = checked(path, ON, None)
    assert checked(path, OFF, read) == (True, read)
    touched = dataclasses.replace(read, mtime_ns=1)
    assert checked(path, OFF, touched) == (True, read)
    changed = dataclasses.replace(touched, content_hash="0:ocr")
    for is_unchanged, plain in (checked(path, OFF, changed), checked(path, OFF, read, {"team": "ops"})):
        assert not is_unchanged and not plain.content_hash.endswith(":ocr"), "it is read without OCR"


def test_files_that_ocr_never_reads_are_not_read_again(make_file: MakeFile) -> None:
    path = make_file("a.md", "# Keys")
    _, plain = checked(path, OFF, None)
    assert checked(path, ON, plain) == (True, plain)


def test_pictures_of_folders_are_found_with_ocr_or_if_indexed(docs: Path) -> None:
    for name in ("a.png", "b.JPG", "c.tiff", "d.webp", "e.gif"):
        (docs / name).touch()
    found = discover([docs], reads_images=True)
    assert [path.name for path in found.files] == ["a.png", "b.JPG", "c.tiff", "d.webp"]
    assert discover([docs]).files == () and discover([docs]).skipped.num_other == 5
    assert discover([docs], known={str(docs / "a.png")}).files == (docs / "a.png",)
    assert discover([docs / "a.png"]).files == (docs / "a.png",), "it is named"


def test_scans_without_ocr_say_how_to_read_them() -> None:
    for name, data in (("a.pdf", image_pdf()), ("a.png", png(20, 20))):
        with pytest.raises(DocumentError, match=r"pip install 'stillroom\[ocr\]', then documents\.ocr = 'on'"):
            parsed(name, data)


def test_add_refuses_ocr_without_its_library(
    open_kb: OpenKb, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_file("a.md", "# Keys")
    kb = open_kb(StillroomConfig(documents=ON))
    monkeypatch.setattr("stillroom.retrieval.loaders.ocr_use.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'stillroom\[ocr\]'"):
        kb.add([path])
    monkeypatch.undo()
    monkeypatch.setattr(knowledge_base, "check_installed", lambda: None)
    assert kb.add([path]).num_added == 1


def test_too_many_pages_are_refused_before_any_is_read() -> None:
    pictures = [Image.new("1", (8, 8))] * 3
    for name, data in (("a.pdf", scanned_pdf([None, *pictures])), ("a.tif", tiff(pictures))):
        with pytest.raises(DocumentError, match=r"3 pages without text, more than documents\.ocr_max_pages \(2\)"):
            parsed(name, data, ocr="on", ocr_max_pages=2)


def tiff(pictures: list[Image.Image]) -> bytes:
    target = BytesIO()
    pictures[0].save(target, "TIFF", save_all=True, append_images=pictures[1:])
    return target.getvalue()


def test_blank_pages_and_pages_with_text_need_no_ocr() -> None:
    document = parsed("a.pdf", pdf([[(11, "This page has more than a few letters.")], []]), ocr="on", ocr_max_pages=0)
    assert "num_ocr_pages" not in document.metadata


def sized(data: bytes, width: int, height: int) -> bytes:
    """A PNG whose header says another size."""
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def test_huge_or_damaged_picture_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(DocumentError, match=r"a picture of 20,000 x 20,000 pixels; at most 100,000,000"):
        parsed("a.png", sized(png(9, 9), 20_000, 20_000), ocr="on")
    for data in (b"", b"GIF89a\x09\x00\x09\x00", png(9, 9)[:40]):
        with pytest.raises(DocumentError, match="a.png: damaged"):
            parsed("a.png", data, ocr="on")


def test_truncated_picture_says_what_to_do() -> None:
    whole = BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "JPEG")
    for name, data in (("a.jpg", whole.getvalue()[:-400]), ("a.png", png(900, 900)[:-30])):
        with pytest.raises(DocumentError, match="a damaged or truncated picture .*; copy it again"):
            parsed(name, data, ocr="on")


@pytest.mark.parametrize("ocr", ["on", "off"])
def test_text_named_as_a_picture_is_read_as_text(ocr: Literal["on", "off"]) -> None:
    for text in ("Keys\n\nRotate the \u00e9t\u00e9 keys.", "\ufeffRotate them."):
        for encoding in ("utf-8", "utf-16"):
            found = parsed("a.png", text.encode(encoding), ocr=ocr)
            assert "Rotate" in found.paragraphs[-1].text and "num_ocr_pages" not in found.metadata


_WORKER = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv_bytes()
connection.send_bytes(b"ready")
connection.recv_bytes()
for page in range(int(sys.argv[2])):
    connection.send_bytes(b'{"page": %d}' % (page + 1))
connection.recv_bytes()
"""
"""A parsing process that begins pages and never replies."""


@pytest.mark.parametrize(
    ("num_pages", "reason"),
    [
        (2, r"OCR of page 2 took longer than documents\.ocr_page_timeout_s \(0\.01 s\); raise the limit"),
        (5, "its reader sent an invalid reply"),
    ],
)
def test_slow_page_or_endless_pages_fail_one_file(
    docs: Path, num_pages: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = docs / "a.pdf"
    path.write_bytes(pdf([[(11, "Text.")]]))

    def start(descriptor: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", _WORKER, str(descriptor), str(num_pages)]
        return subprocess.Popen(command, pass_fds=(descriptor,))

    pool = ParserPool(dataclasses.replace(OFF, ocr_page_timeout_s=0.01 if num_pages == 2 else 60.0, ocr_max_pages=3))
    try:
        with monkeypatch.context() as changed:
            changed.setattr("stillroom.retrieval.intake.parsing._start", start)
            with pytest.raises(DocumentError, match=f"a.pdf: {reason}"):
                pool.submit(path).result()
        assert not pool._all, "its process was ended"
        assert pool.submit(path).result().paragraphs
    finally:
        pool.close()
