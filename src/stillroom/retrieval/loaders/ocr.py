"""Optical character recognition: RapidOCR, with the PP-OCR models that its package contains.

It runs on one thread, so that the same picture gives the same text, and several parsing processes share the cores.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.picture_lines import Box, in_reading_order

MAX_PIXELS = 3_000_000
"""A4 with 170 dots per inch; larger pictures are made smaller."""
MAX_SIDE = 6000
"""Pixels."""
_MIN_SIDE = 736
"""RapidOCR enlarges pictures with a shorter side."""
_MAX_RATIO = 4
"""Pictures that are longer are made wider with white, so that enlarging them stays bounded."""
_WHITE = 255
_MIN_LINES = 4
"""Fewer lines do not tell how the page is turned."""
_GOOD_SCORE = 0.8
"""Mean confidence below which a page may be upside down."""


def scale_to_fit(width: float, height: float, max_scale: float) -> float:
    """Return the factor by which a picture or page is drawn for OCR, at most `max_scale`."""
    by_area = math.sqrt(MAX_PIXELS / (width * height))
    return min(max_scale, by_area, MAX_SIDE / max(width, height))


def read_picture(pixels: NDArray[np.uint8]) -> list[Box]:
    """Return the lines of a picture in reading order, in pixels. A picture that is turned is turned back.

    Args:
        pixels: [height, width, 3], in the order blue, green, red; at most `MAX_PIXELS` and `MAX_SIDE`.

    Raises:
        DocumentError: The library does not work.
        MemoryError: The process has not enough memory.
    """
    pixels = _padded(pixels)
    boxes, score, is_sideways = _recognised(pixels)
    turns = (1, 3) if is_sideways else (2,) if len(boxes) >= _MIN_LINES and score < _GOOD_SCORE else ()
    for number in turns:
        turned, turned_score, _ = _recognised(np.rot90(pixels, number))
        if turned_score > score:
            boxes, score = turned, turned_score
    return in_reading_order(boxes)


def _padded(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Widen a long picture with white at its right or lower side."""
    height, width = pixels.shape[:2]
    least = min(_MIN_SIDE, max(height, width) // _MAX_RATIO)
    missing = ((0, max(0, least - height)), (0, max(0, least - width)), (0, 0))
    return np.pad(pixels, missing, constant_values=_WHITE)


def _recognised(pixels: NDArray[np.uint8]) -> tuple[list[Box], float, bool]:
    """Return the boxes, the mean confidence per character, and whether most lines run up or down."""
    try:
        found = _engine()(np.ascontiguousarray(pixels))
    except Exception as error:
        _raise_if_out_of_memory(error)
        raise
    if found.txts is None or not len(found.txts):
        return [], 0.0, False
    corners = np.asarray(found.boxes, dtype=np.float64)  # [lines, 4, 2]: from upper left, clockwise
    num_chars = [len(text) for text in found.txts]
    score = float(np.average(found.scores, weights=num_chars))
    sizes = np.ptp(corners, axis=1)
    is_sideways = len(corners) >= _MIN_LINES and float(np.mean(sizes[:, 1] > 1.5 * sizes[:, 0])) > 0.5
    return _upright(corners, found.txts), score, is_sideways


def _upright(corners: NDArray[np.float64], texts: tuple[str, ...]) -> list[Box]:
    """Make boxes whose lines are horizontal, by the median slope of the long ones."""
    across = corners[:, 1] - corners[:, 0]  # along the upper edge
    is_long = across[:, 0] >= np.median(across[:, 0])
    slope = float(np.median(across[is_long, 1] / np.maximum(across[is_long, 0], 1.0)))
    heights = corners[:, :, 1] - slope * corners[:, :, 0]
    tops, bottoms = heights[:, :2].mean(axis=1), heights[:, 2:].mean(axis=1)
    lefts, rights = corners[:, :, 0].min(axis=1), corners[:, :, 0].max(axis=1)
    return [
        Box(" ".join(text.split()), *map(float, place))
        for text, *place in zip(texts, lefts, tops, rights, bottoms, strict=True)
        if text.strip() and place[3] > place[1]
    ]


@cache
def _engine() -> Any:
    """Load the library and its models, about two seconds."""
    try:
        import cv2
        from rapidocr import RapidOCR
    except Exception as error:
        _raise_if_out_of_memory(error)
        raise DocumentError(
            f"the OCR library cannot be loaded ({error}); repeat pip install 'stillroom[ocr]'"
        ) from error
    cv2.setNumThreads(1)
    threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
    return RapidOCR(
        params={
            **threads,
            "Global.log_level": "error",
            "Global.use_cls": False,  # it turns single lines; `read_picture` turns pages
            "Global.max_side_len": MAX_SIDE,
        }
    )


def _raise_if_out_of_memory(error: Exception) -> None:
    text = str(error).lower()
    if any(
        sign in text
        for sign in ("bad_alloc", "bad allocation", "allocate memory", "failed to allocate", "failed to map")
    ):
        raise MemoryError from error
