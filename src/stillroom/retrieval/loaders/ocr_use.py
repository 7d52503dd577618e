"""What is known of OCR without loading it: whether it is installed, and its limits."""

from importlib.util import find_spec

from stillroom.errors import ConfigError, DocumentError
from stillroom.retrieval.loaders.source import File

NUM_OCR_PAGES = "num_ocr_pages"
"""Metadata: number of pages with text from OCR."""


def how_to_read() -> str:
    """Return what turns OCR on, with its installation where that is missing."""
    switch = "documents.ocr = 'on' or stillroom add --ocr"
    return switch if _is_installed() else f"pip install 'stillroom[ocr]', then {switch}"


def _is_installed() -> bool:
    return find_spec("rapidocr") is not None and find_spec("onnxruntime") is not None


def check_installed() -> None:
    """Raises ConfigError if the library is not installed."""
    if not _is_installed():
        raise ConfigError("documents.ocr = 'on' needs the package rapidocr: pip install 'stillroom[ocr]'")


def check_num_pages(num_pages: int, file: File) -> None:
    """Raises DocumentError if more pages than `documents.ocr_max_pages` must be read by OCR."""
    if num_pages > file.config.ocr_max_pages:
        raise DocumentError(
            f"{file.path}: {num_pages:,} pages without text, more than documents.ocr_max_pages "
            f"({file.config.ocr_max_pages:,}); split it or raise the limit"
        )
