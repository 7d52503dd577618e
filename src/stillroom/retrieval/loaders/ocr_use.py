"""What is known of OCR without loading it: whether it is installed, and its limits."""

from importlib.util import find_spec

from stillroom.errors import ConfigError, DocumentError
from stillroom.retrieval.loaders.source import File

NUM_OCR_PAGES = "num_ocr_pages"
"""Metadata: number of pages with text from OCR."""
HOW_TO_READ = "pip install 'stillroom[ocr]', then documents.ocr = 'on' or stillroom add --ocr"


def check_installed() -> None:
    """Raises ConfigError if the library is not installed."""
    if find_spec("rapidocr") is None or find_spec("onnxruntime") is None:
        raise ConfigError("documents.ocr = 'on' needs the package rapidocr: pip install 'stillroom[ocr]'")


def check_num_pages(num_pages: int, file: File) -> None:
    """Raises DocumentError if more pages than `documents.ocr_max_pages` must be read by OCR."""
    if num_pages > file.config.ocr_max_pages:
        raise DocumentError(
            f"{file.path}: {num_pages:,} pages without text, more than documents.ocr_max_pages "
            f"({file.config.ocr_max_pages:,}); split it or raise the limit"
        )
