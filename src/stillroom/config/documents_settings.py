"""Limits on reading files. Users import them from `config.settings`."""

from dataclasses import dataclass
from typing import Literal

from stillroom.config.quantities import AboveZero, AtLeastZero

OcrMode = Literal["off", "on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsConfig:
    """Limits on one file. A file beyond a limit is reported with its reason, and the other files are processed."""

    num_workers: AtLeastZero = 0
    """Processes that read files. 0: one per core, at most 8."""
    timeout_s: AboveZero = 120.0
    """Seconds for one file; a slower reader is stopped."""
    max_file_bytes: int = 256 * 2**20
    """Largest file on disk. JSONL files may be larger: they are read line by line."""
    max_text_bytes: int = 32 * 2**20
    """Most text of one file, or of one line of a JSONL file; 32 MiB are some 10,000 pages. A table repeats its column
    names in each row, and they count each time."""
    max_expanded_bytes: int = 128 * 2**20
    """Most text of one file with the headings of each paragraph repeated."""
    max_paragraphs: int = 500_000
    """Most paragraphs of one document (a file, or a line of a JSONL file). Each row of a table is a paragraph."""
    max_chunks: int = 20_000
    """Most chunks of one document. Each is embedded: some 60 per second on two cores."""
    max_unpacked_bytes: int = 1024 * 2**20
    """Most unpacked content of a DOCX, PPTX, XLSX or EPUB file; a small file can unpack to more than a disk holds."""
    max_reader_bytes: int = 2048 * 2**20
    """Memory that a reading process may take beyond its start (Linux only)."""
    ocr: OcrMode = "off"
    """`on`: pages of PDF files without text, and image files (PNG, JPEG, TIFF, WebP), are read by optical character
    recognition, some seconds per page. Needs `pip install 'stillroom[ocr]'`."""
    ocr_page_timeout_s: AboveZero = 300.0
    """Seconds for OCR of one page, in addition to `timeout_s`; the file of a slower page is reported."""
    ocr_max_pages: int = 500
    """Most pages of one file that are read by OCR; a file with more pages without text is reported."""
