"""Table of file formats: file name to loader. A loader is imported when the first file needs it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

JSONL = frozenset({".jsonl", ".ndjson"})
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp"})

_TEXT = ".txt .text .tex .org .adoc .asciidoc"
_CODE = """
    .py .pyi .pyw .js .jsx .mjs .cjs .ts .tsx .vue .svelte .java .kt .kts .scala .groovy .gradle .c .h .cc .cpp .cxx
    .hh .hpp .cu .cs .fs .vb .go .rs .swift .m .mm .rb .php .pl .pm .lua .r .jl .dart .ex .exs .erl .hs .ml .mli .clj
    .lisp .el .scm .sh .bash .zsh .fish .ps1 .bat .sql .proto .graphql .css .scss .less .cmake .tf .yaml .yml .toml .ini
    .cfg"""
_TEXT_NAMES = "readme license licence copying notice authors contributors changelog changes install todo"
_LICENSES = ("license-", "licence-")
"""Beginnings of the names of texts, such as `LICENSE-MIT` and `LICENSE-APACHE-2.0`."""
_CODE_NAMES = "makefile dockerfile containerfile jenkinsfile rakefile gemfile justfile"
_GENERATED_CODE = (".min.js", ".min.css", ".bundle.js", "_pb2.py", "_pb2.pyi")


@dataclass(frozen=True, slots=True)
class Format:
    """A loader, by module and function name."""

    module: str
    function: str
    is_text: bool
    """Whether the file is text: the function then takes path and text, otherwise the `File`."""
    takes_file: bool = False
    """Whether a text loader takes the `File`, to check the limits while it makes paragraphs."""
    is_bounded: bool = True
    """Whether the loader reads any 16 KiB of text within two seconds: its time grows at most quadratically."""

    def parser(self) -> Callable[..., Any]:
        """Import the loader and return its function."""
        found: Callable[..., Any] = getattr(import_module(f"stillroom.retrieval.loaders.{self.module}"), self.function)
        return found


PLAIN = Format("text", "parse_text", is_text=True)
_SOURCE = Format("code", "parse_code", is_text=True)

_RST = Format("rst", "parse_rst", is_text=True, is_bounded=False)
"""Nested substitutions make docutils take time exponential in the number of lines."""

_FORMATS = {
    **dict.fromkeys(_TEXT.split(), PLAIN),
    **dict.fromkeys(_CODE.split(), _SOURCE),
    **dict.fromkeys((".md", ".markdown", ".mkd"), Format("markdown", "parse_markdown", is_text=True)),
    **dict.fromkeys((".rst", ".rest"), _RST),
    **dict.fromkeys((".html", ".htm", ".xhtml"), Format("html", "parse_html", is_text=True)),
    **dict.fromkeys((".csv", ".tsv"), Format("table", "parse_table", is_text=True, takes_file=True)),
    ".ipynb": Format("notebook", "parse_notebook", is_text=True),
    ".pdf": Format("pdf", "parse_pdf", is_text=False),
    ".docx": Format("word", "parse_word", is_text=False),
    ".pptx": Format("slides", "parse_slides", is_text=False),
    **dict.fromkeys((".xlsx", ".xlsm"), Format("sheets", "parse_sheets", is_text=False)),
    ".epub": Format("epub", "parse_epub", is_text=False),
    **dict.fromkeys(IMAGES, Format("image", "parse_image", is_text=False)),
}

UNSUPPORTED = {
    **dict.fromkeys((".doc", ".dot", ".docm"), "save it as .docx"),
    **dict.fromkeys((".ppt", ".pps", ".pptm"), "save it as .pptx"),
    ".xls": "save it as .xlsx",
    **dict.fromkeys((".odt", ".rtf", ".pages", ".wpd"), "save it as .docx or .pdf"),
    ".ods": "save it as .xlsx",
    ".odp": "save it as .pptx",
    **dict.fromkeys((".mobi", ".azw", ".azw3", ".djvu"), "convert it to .epub or .pdf"),
}
"""Document formats without a loader, and the advice for the report."""

_NAMES = {**dict.fromkeys(_TEXT_NAMES.split(), PLAIN), **dict.fromkeys(_CODE_NAMES.split(), _SOURCE)}


def format_of(path: Path) -> Format | None:
    """Return the loader for a file name; None for unknown names and generated code."""
    name = path.name.lower()
    if name.endswith(_GENERATED_CODE):
        return None
    found = _FORMATS.get(path.suffix.lower()) or _NAMES.get(name)
    return found or (PLAIN if name.startswith(_LICENSES) else None)


def is_jsonl(path: Path) -> bool:
    """Return whether each line of a file is a document."""
    return path.suffix.lower() in JSONL


def is_image(path: Path) -> bool:
    """Return whether a file is a picture, which is read if `documents.ocr` is on."""
    return path.suffix.lower() in IMAGES
