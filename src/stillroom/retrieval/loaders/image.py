"""Loader of image files, which are read by OCR. Each picture of a TIFF file is a page."""

from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Document
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders import ocr
from stillroom.retrieval.loaders.ocr_use import NUM_OCR_PAGES, check_num_pages, how_to_read
from stillroom.retrieval.loaders.page_lines import drop_recurring, large_lines, read_lines
from stillroom.retrieval.loaders.picture_lines import lines_of_pages
from stillroom.retrieval.loaders.source import File, Outline

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP")
_MAX_PIXELS = 100_000_000
"""Of a picture before it is made smaller; decoded, it takes up to 400 MB."""


def parse_image(file: File) -> Document:
    """Parse an image file. The title is the only top heading, else the file name.

    Raises:
        DocumentError: OCR is off, the file is damaged, its pictures are too large or too many, or have no text.
    """
    if file.config.ocr != "on":
        raise DocumentError(f"{file.path}: a picture; read it by OCR: {how_to_read()}")
    found = {}
    for number, pixels in enumerate(_pictures(file), start=1):
        file.on_page(number)
        found[number] = ocr.read_picture(pixels)
    if not any(found.values()):
        raise DocumentError(f"{file.path}: OCR finds no text in it")
    pages = list(lines_of_pages(found).values())
    drop_recurring(pages)
    outline = Outline()
    read_lines(outline, pages, large_lines(pages))
    title, paragraphs = outline.finish("", file.name)
    return file.document(title, paragraphs, {"num_pages": len(pages), NUM_OCR_PAGES: len(pages)})


def _pictures(file: File) -> Iterator[NDArray[np.uint8]]:
    """Yield the pictures as `ocr.read_picture` takes them.

    Raises:
        DocumentError: The file is damaged, or has too many or too large pictures.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # checked below, before anything is decoded
    try:
        with Image.open(BytesIO(file.data), formats=_FORMATS) as image:
            number = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
            check_num_pages(number, file)
            for index in range(number):
                image.seek(index)
                yield _pixels(image, file)
    except UnidentifiedImageError as error:
        raise DocumentError(
            f"{file.path}: damaged, or not a picture of these formats: {', '.join(_FORMATS)}"
        ) from error
    except (OSError, SyntaxError) as error:  # the library raises SyntaxError for damaged PNG files
        raise DocumentError(
            f"{file.path}: a damaged or truncated picture ({error}); copy it again, or save it anew from a viewer"
        ) from error


def _pixels(image: "Image", file: File) -> NDArray[np.uint8]:
    from PIL import Image, ImageOps

    width, height = image.size
    if width * height > _MAX_PIXELS:
        raise DocumentError(
            f"{file.path}: a picture of {width:,} x {height:,} pixels; at most {_MAX_PIXELS:,} pixels are read, "
            "make it smaller"
        )
    image.draft("RGB", _fitting(image))  # a JPEG is decoded at a fraction of its size
    upright = _on_white(ImageOps.exif_transpose(image))
    small = upright.resize(_fitting(upright), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return np.asarray(small)[:, :, ::-1]


def _fitting(image: "Image") -> tuple[int, int]:
    width, height = image.size
    scale = ocr.scale_to_fit(width, height, 1.0)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _on_white(image: "Image") -> "Image":
    """Return a picture in RGB; transparent parts become white, and 16 bits become 8."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
