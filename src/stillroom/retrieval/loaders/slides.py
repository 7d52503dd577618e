"""Loader of PPTX: a slide's title is its heading; texts, tables, charts and speaker notes follow; pages are slides."""

from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any

import pptx
from pptx.exc import PackageNotFoundError

from stillroom.core.document import Document
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.office import core_metadata, number_text, open_package
from stillroom.retrieval.loaders.source import File, Outline, check_text


def parse_slides(file: File) -> Document:
    """Parse a presentation. The title is its own, else that of the first slide with one, else the file name."""
    with open_package(file):
        try:
            presentation = pptx.Presentation(BytesIO(file.data))
        except (KeyError, ValueError, PackageNotFoundError) as error:
            raise DocumentError(f"{file.path}: not a presentation: {error}") from error
    metadata = core_metadata(presentation.core_properties)
    outline = Outline()
    first_title = ""
    num_bytes = 0
    for number, slide in enumerate(presentation.slides, start=1):
        if slide.element.get("show") == "0":  # hidden
            continue
        outline.page = number
        heading, texts = _texts(slide)
        first_title = first_title or heading
        outline.heading(1, heading or f"Slide {number}")
        for text in texts:
            num_bytes += len(text.encode())
            check_text(file.path, num_bytes, file.config)
            outline.paragraph(text)
    title, paragraphs = outline.finish(str(metadata.get("title") or first_title), file.name)
    metadata["num_pages"] = len(presentation.slides)
    return file.document(title, paragraphs, metadata)


def _texts(slide: Any) -> tuple[str, list[str]]:
    """Return a slide's title and its other texts."""
    title = slide.shapes.title
    heading = " ".join(title.text_frame.text.split()) if title is not None else ""
    texts = [text for shape in _in_order(slide.shapes) if shape is not title for text in _shape_texts(shape)]
    if title is not None:
        texts = [text for text in texts if text != heading] if heading else texts
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        notes = _frame_text(slide.notes_slide.notes_text_frame)
        if notes.strip():
            texts.append(f"Notes: {notes}")
    return heading, texts


def _in_order(shapes: Iterable[Any]) -> list[Any]:
    """Sort shapes from top to bottom, then left to right; keep file order if a placeholder inherits its position."""
    found = list(shapes)
    if any(shape.top is None or shape.left is None for shape in found):
        return found
    return sorted(found, key=lambda shape: (shape.top // 250_000, shape.left))  # rows of about a quarter of an inch


def _shape_texts(shape: Any) -> Iterator[str]:
    if getattr(shape, "shapes", None) is not None:  # a group
        for inner in _in_order(shape.shapes):
            yield from _shape_texts(inner)
    elif getattr(shape, "has_table", False) and shape.has_table:
        rows = ([" ".join(cell.text.split()) for cell in row.cells] for row in shape.table.rows)
        yield "\n".join(" | ".join(row) for row in rows if any(row))
    elif getattr(shape, "has_chart", False) and shape.has_chart:
        yield from _chart_texts(shape.chart)
    elif shape.has_text_frame and not _is_footer(shape):
        yield _frame_text(shape.text_frame)


def _is_footer(shape: Any) -> bool:
    """Return whether a shape is a slide number, date or footer, which stand on every slide."""
    return shape.is_placeholder and shape.placeholder_format.type in (13, 15, 16)


def _frame_text(frame: Any) -> str:
    paragraphs = (("  " * paragraph.level, paragraph.text.replace("\v", "\n")) for paragraph in frame.paragraphs)
    return "\n".join(indent + text for indent, text in paragraphs if text.strip())


def _chart_texts(chart: Any) -> Iterator[str]:
    """Yield a chart as text: `Chart: Sales`, then a line for each category, `2024: North 3, South 4`."""
    title = chart.chart_title.text_frame.text if chart.has_title and chart.chart_title.has_text_frame else ""
    lines = [f"Chart: {title}" if title else "Chart"]
    for plot in chart.plots:
        all_series = [(series.name, list(series.values)) for series in plot.series]
        for index, category in enumerate(plot.categories):
            known = ((name, values[index]) for name, values in all_series if index < len(values))
            shown = (f"{name} {number_text(value)}" for name, value in known if value is not None)
            lines.append(f"{category}: " + ", ".join(shown))
    yield "\n".join(lines)
