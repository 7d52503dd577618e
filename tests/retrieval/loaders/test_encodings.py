"""Decoding text: byte order marks, declared and guessed encodings; files that are not text."""

import os
from pathlib import Path

import pytest

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.load_file import load
from stillroom.retrieval.loaders.source import decode

GERMAN = "Die Schl\u00fcssel werden alle drei\u00dfig Tage getauscht \u2013 f\u00fcr \u201e\u00dcbungen\u201c."
RUSSIAN = (
    "\u041a\u043b\u044e\u0447\u0438 \u043c\u0435\u043d\u044f\u044e\u0442\u0441\u044f \u043a\u0430\u0436\u0434"
    "\u044b\u0435 \u0442\u0440\u0438\u0434\u0446\u0430\u0442\u044c \u0434\u043d\u0435\u0439."
)
JAPANESE = (
    "\u9375\u306f\u4e09\u5341\u65e5\u3054\u3068\u306b\u4ea4\u63db\u3055\u308c\u307e\u3059\u3002\u91d1\u5eab"
    "\u306b\u4fdd\u7ba1\u3055\u308c\u307e\u3059\u3002"
)
GREEK = (
    "\u03a4\u03b1 \u03ba\u03bb\u03b5\u03b9\u03b4\u03b9\u03ac \u03b1\u03bb\u03bb\u03ac\u03b6\u03bf\u03c5\u03bd "
    "\u03ba\u03ac\u03b8\u03b5 \u03bc\u03ae\u03bd\u03b1."
)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *[
            (GERMAN, encoding)
            for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252")
        ],
        *[(RUSSIAN, encoding) for encoding in ("utf-8", "utf-16", "cp1251", "koi8-r")],
        *[(JAPANESE, encoding) for encoding in ("shift_jis", "euc_jp")],
        (GREEK, "iso8859-7"),
    ],
)
def test_encoding_is_detected(text: str, encoding: str) -> None:
    marked = (
        "\ufeff" + text if encoding in ("utf-16-le", "utf-16-be") and not text.isascii() and text != GERMAN else text
    )
    assert decode(marked.encode(encoding), "a.txt") == text


def test_declared_encoding_is_used_if_it_fits() -> None:
    page = '<html><head><meta charset="koi8-r"></head><body>\u041a\u043b\u044e\u0447</body></html>'
    assert decode(page.encode("koi8-r"), "a.html") == page
    assert decode("# coding: cp1250\n'\u017b\u00f3\u0142w'".encode("cp1250"), "a.py").endswith("\u017b\u00f3\u0142w'")
    quoted = '<meta charset="iso-8859-1">\u201cso\u201d'
    assert decode(quoted.encode("cp1252"), "a.html") == quoted, "as browsers read it"
    for name in ("ascii85", "no-such", "punycode", "hex", "utf-8"):
        assert decode(f"charset={name} ".encode() + GERMAN.encode("cp1252"), "a.html").endswith(GERMAN)


@pytest.mark.parametrize("data", [b"abc\0def", b"\x7fELF\x02\x01\x01\0\0\0", bytes(range(256)), b"\0" * 100])
def test_binary_data_is_not_text(data: bytes) -> None:
    with pytest.raises(DocumentError, match=r"x\.txt: binary data"):
        decode(data, "x.txt")


def test_wrong_byte_order_mark_is_an_error() -> None:
    with pytest.raises(DocumentError, match="begins with the mark of UTF-16, but is not such text"):
        decode(b"\xff\xfeodd", "x.txt")


def test_pipes_sockets_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.md")
    (tmp_path / "loop.md").symlink_to("loop.md")
    for path, reason in (
        (tmp_path / "pipe.md", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "not a regular file|Is a directory"),
        (tmp_path / "loop.md", "a symbolic link that leads to itself"),
    ):
        with pytest.raises(DocumentError, match=reason):
            list(load(path))


def test_limit_errors_name_the_setting_and_the_remedy(tmp_path: Path) -> None:
    text, lines = tmp_path / "big.txt", tmp_path / "big.jsonl"
    with text.open("wb") as stream:
        stream.truncate(200 << 20)  # sparse: 200 MB of holes
    with pytest.raises(DocumentError, match=r"documents\.max_file_bytes \(100 MiB\); split it or raise"):
        list(load(text, DocumentsConfig(max_file_bytes=100 << 20)))
    text.write_text("word " * 1000)
    with pytest.raises(DocumentError, match=r"documents\.max_text_bytes"):
        list(load(text, DocumentsConfig(max_text_bytes=4999)))
    lines.write_text('{"text": "a"}\n{"text": "' + "a" * 5000 + '"}\n')
    with pytest.raises(DocumentError, match=r"big\.jsonl:2: more text"):
        list(load(lines, DocumentsConfig(max_text_bytes=1000)))


def test_few_bad_bytes_do_not_change_the_encoding() -> None:
    spoiled = f"{GERMAN} {RUSSIAN} ".encode() + b"\xff" + GREEK.encode()[:-2]
    assert decode(spoiled, "a.txt") == f"{GERMAN} {RUSSIAN} \ufffd{GREEK[:-2]}\ufffd"
    for mark in (b"\xef\xbb\xbf", b'<meta charset="utf-8">', b'<?xml encoding="UTF8"?>'):
        text = decode(mark + "\u20ac ".encode() + b"\xff", "a.html")
        assert text.endswith("\u20ac \ufffd"), "where it says so, one good character for each bad one will do"
    assert decode("\u20ac ".encode() + b"\xff", "a.txt") != "\u20ac \ufffd"
