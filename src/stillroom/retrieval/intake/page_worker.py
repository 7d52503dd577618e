"""Draws one page of a PDF: `python -m stillroom.retrieval.intake.page_worker FD PAGE WIDTH MAX_BYTES SECONDS`.

`page_images` starts it. It reads the open file FD and writes a PNG to stdout. A file that takes over this process
reaches no API keys, and its output is shown as a picture only.
"""

import math
import os
import signal
import struct
import sys
import zlib
from typing import Any

from stillroom.retrieval.intake.process_limits import limit_memory

OUT_OF_MEMORY, NO_SUCH_PAGE, DAMAGED = 77, 78, 79
"""Exit codes."""

_MAX_PIXELS = 12_000_000
"""A longer page is drawn smaller."""
_POINTS_OF_A_BLANK_PAGE = 1.0


def main() -> int:
    """Return the exit code."""
    descriptor, page, width, max_bytes, seconds = map(int, sys.argv[1:])
    signal.alarm(seconds)  # ends this process if the parent has died
    limit_memory(max_bytes)
    with open(descriptor, "rb") as stream:
        try:
            import pypdfium2 as pdfium  # after the limits are set
        except ModuleNotFoundError:
            raise
        except (ImportError, OSError, SystemError):  # a library that does not fit into the limit cannot be mapped
            return OUT_OF_MEMORY
        try:
            pdf = pdfium.PdfDocument(stream)
            if not 1 <= page <= len(pdf):
                return NO_SUCH_PAGE
            content = _png(*_drawn(pdf[page - 1], width))
        except pdfium.PdfiumError:
            return DAMAGED
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
    return 0


def _drawn(page: Any, width: int) -> tuple[int, int, list[bytes]]:
    """Return width, height and the rows of RGB bytes of a page on white."""
    points, height = (max(size, _POINTS_OF_A_BLANK_PAGE) for size in page.get_size())
    scale = min(width / points, math.sqrt(_MAX_PIXELS / (points * height)))
    bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=False)
    pixels, stride, num_bytes = bytes(bitmap.buffer), bitmap.stride, 3 * bitmap.width
    return bitmap.width, bitmap.height, [pixels[at : at + num_bytes] for at in range(0, len(pixels), stride)]


def _png(width: int, height: int, rows: list[bytes]) -> bytes:
    """Encode rows of RGB bytes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 4)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


if __name__ == "__main__":
    try:
        code = main()
    except MemoryError:
        code = OUT_OF_MEMORY
    os._exit(code)
