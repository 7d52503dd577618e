"""`stillroom show`: print the text of a document, or some of its lines or pages."""

import difflib
import re
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli import opening
from stillroom.cli.console import as_text, line, note, print_json, printable_name, short_path
from stillroom.cli.options import DEFAULT_KB, ConfigOption, JsonOption, KbOption, help_text
from stillroom.core.document_content import ALL, DocumentContent, Span
from stillroom.errors import SeveralDocumentsError, UnknownDocumentError

if TYPE_CHECKING:
    from stillroom.core.document import Paragraph
    from stillroom.core.ids import DocumentId
    from stillroom.rag.stillroom import Stillroom

HELP = help_text(
    "Print the text of a document, with line numbers or pages.",
    "DOC is a document as `stillroom list` and the sources of an answer show it, or as much of its name as makes it "
    "clear: guide.md for /srv/docs/guide.md. The text comes from the file while it holds what was indexed, else from "
    "the index, with a note.",
    examples=(
        "stillroom show guide.md --kb ./kb",
        "stillroom show guide.md:120-140",
        "stillroom show docs/guide.md:120 --context 10",
        "stillroom show report.pdf:p3",
        "stillroom show notes.jsonl#42",
        "stillroom show guide.md --json | jq -r '.paragraphs[].text'",
    ),
)

_PLACE = re.compile(
    r"(?P<name>.+?)(?::L?(?P<line>\d{1,9})(?:-L?(?P<end_line>\d{1,9}))?)?"
    r"(?:(?::|, )p(?:\. ?)?(?P<page>\d{1,9})(?:-(?P<end_page>\d{1,9}))?)?",
    re.DOTALL,
)
_MAX_CANDIDATES = 10


def show(
    document: Annotated[
        str, typer.Argument(metavar="DOC[:PLACE]", help="Document, with lines (120-140) or pages (p3).")
    ],
    kb: KbOption = DEFAULT_KB,
    context: Annotated[
        int, typer.Option("--context", "-C", min=0, metavar="N", help="Lines to print before and after LINES.")
    ] = 0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    document = as_text("the document", document)
    with opening.open_stillroom(kb, opening.load_settings(config)) as opened:
        document_id, lines, pages = _found(opened, document)
        content = opened.document_content(document_id)
    around = _around(lines, context, content.num_lines)
    paragraphs = content.part(around, pages)
    if as_json:
        from stillroom.rag.as_json import content_as_json

        print_json(content_as_json(content, paragraphs))
        return
    if content.notice:
        note(content.notice)
    if not paragraphs:
        hint = f"; the last line is {content.num_lines:,}, and --context N shows more" if content.num_lines else ""
        note(f"there is no text in these lines or pages{hint}")
        return
    line(f"{short_path(content.document_id)}  {content.title}".rstrip())
    _Printer(content, lines if context else ALL).print(paragraphs)


def _found(opened: "Stillroom", document: str) -> "tuple[DocumentId, Span, Span]":
    """Return the document, lines and pages that an argument names. A name that ends like lines goes before lines."""
    found = opened.documents_like(document)
    if len(found) == 1:
        return found[0], ALL, ALL
    match = _PLACE.fullmatch(document)
    name = match["name"] if match else document
    if match and name != document and (shorter := opened.documents_like(name)):
        found = shorter
    if len(found) == 1 and match:
        return found[0], _span(match["line"], match["end_line"]), _span(match["page"], match["end_page"])
    raise _several(name, found) if found else _unknown(opened, name)


def _span(first: str | None, last: str | None) -> Span:
    return ALL if first is None else Span(int(first) or 1, int(last or first) or 1)


def _several(name: str, found: "list[DocumentId]") -> SeveralDocumentsError:
    names = [f"  {short_path(document_id)}" for document_id in found[:_MAX_CANDIDATES]]
    more = [f"  and {len(found) - _MAX_CANDIDATES:,} more"] if len(found) > _MAX_CANDIDATES else []
    listed = "\n".join([*names, *more])
    return SeveralDocumentsError(
        f"{printable_name(name)!r} may be any of {len(found):,} documents; name one:\n{listed}"
    )


def _unknown(opened: "Stillroom", name: str) -> UnknownDocumentError:
    """Return the error, with documents whose file names look like the given one."""
    by_file = {str(info.document_id).rpartition("/")[2]: info.document_id for info in opened.documents()}
    near = difflib.get_close_matches(name.rpartition("/")[2], by_file, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(short_path(by_file[one]) for one in near)}?" if near else "see `stillroom list`"
    return UnknownDocumentError(f"no document has the name {printable_name(name)!r}; {hint}")


def _around(lines: Span, context: int, num_lines: int) -> Span:
    if lines.is_all or lines.first > num_lines:
        return lines
    return Span(
        max(1, lines.first - context), min(num_lines, lines.last + context) if lines.last >= lines.first else lines.last
    )


class _Printer:
    """Prints paragraphs with headings, page marks and line numbers; `>` marks lines."""

    def __init__(self, content: DocumentContent, marked: Span) -> None:
        self._content = content
        self._marked = marked
        self._width = len(str(content.num_lines)) if content.num_lines else 0
        self._page = 0
        self._path: tuple[str, ...] = ()

    def print(self, paragraphs: "tuple[Paragraph, ...]") -> None:
        for paragraph in paragraphs:
            line()
            if paragraph.start_page > self._page:
                self._page = paragraph.start_page
                line(f"-- page {self._page} --")
            if paragraph.heading_path != self._path:
                self._path = paragraph.heading_path
                line("# " + " > ".join(self._path) if self._path else "#")
            for number, text in self._content.numbered_lines(paragraph):
                self._line(number, text)

    def _line(self, number: int, text: str) -> None:
        if not self._width:
            line(text)
            return
        is_marked = not self._marked.is_all and number > 0 and self._marked.overlaps(number, number)
        line(f"{'>' if is_marked else ' '}{number or '':>{self._width}}  {text}".rstrip())
