"""Loader of reStructuredText (docutils): sections become heading paths, blocks paragraphs, code is verbatim.

Unknown directives and roles (Sphinx's) are read for their text. If docutils raises, the file is read as plain text.
"""

import csv
import re
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.core import publish_doctree
from docutils.languages import get_language
from docutils.parsers.rst import Directive, directives, roles
from docutils.parsers.rst.directives.tables import CSVTable
from docutils.statemachine import StringList
from docutils.utils import Reporter, new_document

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import Metadata
from stillroom.retrieval.loaders.document_metadata import text_metadata
from stillroom.retrieval.loaders.source import Outline, blank_line_paragraphs

# no text matches in two ways, otherwise matching takes time exponential in the lines
_HEADER = re.compile(r"\A(?:[A-Za-z][A-Za-z0-9-]*:.*\n(?:[ \t]+\S.*\n)*){2,}(?=[ \t]*\n)")
_OTHER_LINE_ENDS = dict.fromkeys(map(ord, "\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
"""Characters at which docutils ends a line and files do not."""
_DIRECTIVE = re.compile(r"\.\. +([A-Za-z][\w:.+-]*?)::(?:\s|$)", re.MULTILINE)
_ROLE = re.compile(r":([A-Za-z][\w:.+-]{0,100}):`")
_LABELLED = re.compile(r"(.+)<[^<>]+>\Z", re.DOTALL)
_LINE_CHARS = 10_000
"""The limit of docutils, also for substitutions."""
_SETTINGS = {
    "report_level": 5,
    "halt_level": 6,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "syntax_highlight": "none",
    "warning_stream": False,
    "doctitle_xform": False,  # the outline finds the title
    "docinfo_xform": False,
    "smart_quotes": False,
    "_disable_config": True,  # no docutils.conf from the working folder
}


def parse_rst(path: Path, text: str) -> Document:
    """Parse reStructuredText. The title is that of a leading RFC 2822 header, else the only top heading, else the file
    name."""
    body, title, metadata = _split_header(text.translate(_OTHER_LINE_ENDS))
    outline = Outline()
    try:
        _RstBlocks(outline, body).read(_parse(body))
    except Exception:  # docutils raises undocumented errors
        return Document(
            DocumentId(str(path)), title or path.stem, tuple(blank_line_paragraphs(body)), metadata=metadata
        )
    title, paragraphs = outline.finish(title, path.stem)
    return Document(DocumentId(str(path)), title, paragraphs, metadata=metadata)


def _split_header(text: str) -> tuple[str, str, Metadata]:
    """Return the text with a leading header blanked (line numbers hold), the header's title or "", and its other fields
    by lower-case name. The title of a PEP begins with its number: `PEP 8: Style Guide for Python Code`."""
    match = _HEADER.match(text)
    fields = HeaderParser().parsestr(match.group()) if match else None
    if match is None or fields is None or "title" not in fields:
        return text, "", {}
    title = " ".join(str(fields["title"]).split())
    if "pep" in fields:
        title = f"PEP {str(fields['pep']).strip()}: {title}"
    others = ((name.lower(), " ".join(str(value).split())) for name, value in fields.items())
    metadata = text_metadata(pair for pair in others if pair[0] != "title")
    return "\n" * match.group().count("\n") + text[match.end() :], title, metadata


class _AnyDirective(Directive):  # type: ignore[misc]
    """Reads an unknown directive: its argument and content are text."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        block = nodes.container()
        source, block.line = self.state_machine.get_source_and_line(self.lineno)
        if self.arguments:  # docutils takes all lines up to the first blank line as the argument
            lines = self.arguments[0].split("\n")
            is_on_first_line = self.block_text.partition("::")[2].split("\n", 1)[0].strip()
            offset = block.line - 1 if is_on_first_line else block.line
            items = [(source, offset + index) for index in range(len(lines))]
            self.state.nested_parse(StringList(lines, items=items), offset, block)
        self.state.nested_parse(self.content, self.content_offset, block)
        return [block]


class _CsvTable(CSVTable):  # type: ignore[misc]
    """Notes the first and last line of each row; docutils counts lines from 1 in every cell."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = super().run()
        if isinstance(found[0], nodes.table):
            rows, spans = _rows(found[0]), self._spans()
            _, line = self.state_machine.get_source_and_line(self.lineno)
            options = (line, self.content.items[0][1])  # the lines of the option `header`
            for row, span in zip(rows, [options] * (len(rows) - len(spans)) + spans, strict=True):
                row["lines"] = [span]
        return found

    def _spans(self) -> list[tuple[int, int]]:
        """Return the lines of the rows in the content."""
        numbers = [offset + 1 for _, offset in self.content.items]
        reader = csv.reader((f"{line}\n" for line in self.content), dialect=self.DocutilsDialect(self.options))
        ends = [reader.line_num for _ in reader]
        return [(numbers[start], numbers[end - 1]) for start, end in zip([0, *ends], ends, strict=False)]


class _Date(Directive):  # type: ignore[misc]
    """The format of a date in place of today's, so that a file has the same text every day."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        return [nodes.Text("\n".join(self.content) or "%Y-%m-%d")]


directives.register_directive("csv-table", _CsvTable)
directives.register_directive("date", _Date)


def _rows(table: nodes.table) -> list[nodes.row]:
    """Return the rows of a table without those of nested tables."""
    parts = (part for group in table.children for part in group.children)
    return [row for part in parts for row in part.children if isinstance(row, nodes.row)]


def _any_role(name: str, rawtext: str, text: str, *_: Any, **__: Any) -> tuple[list[nodes.Node], list[nodes.Node]]:
    """Read an unknown role: `label <target>` becomes its label."""
    labelled = _LABELLED.match(text)
    return [nodes.literal(rawtext, labelled.group(1).rstrip() if labelled else text)], []


def _parse(text: str) -> nodes.document:
    language = get_language("en")
    scratch = new_document("scratch")
    scratch.reporter.report_level, scratch.reporter.halt_level = 5, 6
    for name in set(_DIRECTIVE.findall(text)):
        if directives.directive(name, language, scratch)[0] is None:
            directives.register_directive(name, _AnyDirective)
    for name in set(_ROLE.findall(text)):
        if roles.role(name, language, 0, scratch.reporter)[0] is None:
            roles.register_local_role(name, _any_role)
    # docutils does not read a file with a longer line
    limit = max(_LINE_CHARS, *map(len, text.expandtabs().split("\n")))
    document: nodes.document = publish_doctree(text, settings_overrides={**_SETTINGS, "line_length_limit": limit})
    for message in list(document.findall(nodes.system_message)):
        message.parent.replace(message, _refused(message))
    return document


def _refused(message: nodes.system_message) -> list[nodes.literal_block]:
    """Return the text that docutils could not read, such as a malformed table; only the message has it. For messages
    below error level the text is in the document, or must not be read (`include`)."""
    is_error = message["level"] >= Reporter.ERROR_LEVEL
    blocks = [child for child in message.children if is_error and isinstance(child, nodes.literal_block)]
    for block in blocks:
        block.line = message.get("line")
    return blocks


_SKIPPED = (nodes.comment, nodes.substitution_definition, nodes.target, nodes.pending, nodes.meta)
_LEAVES = (
    *(nodes.paragraph, nodes.literal_block, nodes.doctest_block, nodes.math_block, nodes.term, nodes.field_name),
    *(nodes.rubric, nodes.caption, nodes.attribution, nodes.title, nodes.subtitle, nodes.option_group),
)
_GAP = 200
"""Lines searched after the previous block for a block without a line number."""


class _RstBlocks:
    """Walks the document tree in reading order."""

    def __init__(self, outline: Outline, source: str) -> None:
        self._outline = outline
        self._source = source.expandtabs().split("\n")  # as docutils does
        self._level = 0
        self._line = 0
        """Last line of the previous block."""
        self._bullet = ""

    def read(self, node: nodes.Node) -> None:
        if isinstance(node, _SKIPPED):
            return
        if isinstance(node, nodes.section):
            self._read_section(node)
        elif isinstance(node, nodes.table):
            self._read_table(node)
        elif isinstance(node, nodes.line_block):
            self._emit(node, "\n".join(line.astext() for line in node.findall(nodes.line)))
        elif isinstance(node, nodes.term):
            classifiers = [other.astext() for other in node.parent.children if isinstance(other, nodes.classifier)]
            self._emit(node, " : ".join([node.astext(), *classifiers]))
        elif isinstance(node, _LEAVES):
            self._emit(node, node.astext())
        elif isinstance(node, nodes.image):
            self._emit(node, str(node.get("alt", "")))
        else:
            self._read_children(node)
        if isinstance(node, nodes.decoration):  # in the tree, header and footer come first
            self._line = 0

    def _read_children(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.list_item):
            self._bullet = "- "
        elif isinstance(node, (nodes.footnote, nodes.citation)):
            self._bullet = f"[{node[0].astext()}] "
        for child in node.children:
            if not isinstance(child, nodes.label):
                self.read(child)

    def _read_section(self, section: nodes.section) -> None:
        self._level += 1
        self._outline.heading(self._level, section[0].astext(), self._lines(section[0], section[0].astext())[0])
        for child in section.children[1:]:
            self.read(child)
        self._level -= 1

    def _read_table(self, table: nodes.table) -> None:
        for child in table.children:
            if isinstance(child, nodes.title):
                self.read(child)
        for row in _rows(table):
            cells = [" ".join(entry.astext().split()) for entry in row.children]
            if any(cells):
                self._outline.paragraph(self._bullet + " | ".join(cells), *self._row_lines(row))
                self._bullet = ""

    def _row_lines(self, row: nodes.row) -> tuple[int, int]:
        above, spans = self._line, list(row.get("lines", ()))
        for block in () if spans else row.findall(lambda node: isinstance(node, (*_LEAVES, nodes.line, nodes.image))):
            self._line = above  # cells are side by side
            spans.append(self._lines(block, block.astext()))
        first, last = (min(start for start, _ in spans), max(end for _, end in spans)) if spans else (above, above)
        self._line = last
        return first, last

    def _emit(self, node: Any, text: str) -> None:
        self._outline.paragraph(self._bullet + text, *self._lines(node, text))
        self._bullet = ""

    def _lines(self, node: Any, text: str) -> tuple[int, int]:
        """Return first and last line of a block. Docutils reports its first line, a later line, or none."""
        own = node.children[0] if isinstance(node, nodes.option_group) else node
        block = [line.strip() for line in str(own.rawsource or text).strip("\n").split("\n")]
        if node.line:
            latest = min(int(node.line), len(self._source))
            numbers = range(latest, min(self._line, latest - 1), -1)
        else:
            numbers = range(self._line + 1, self._line + _GAP)
        default = min(int(node.line or self._line or 1), len(self._source))
        first = next((number for number in numbers if self._stands_at(number, block)), default)
        self._line = min(first + len(block) - 1, len(self._source))
        return first, self._line

    def _stands_at(self, number: int, block: list[str]) -> bool:
        """Return whether the source lines from `number` on contain the lines of a block."""
        fits = number - 1 + len(block) <= len(self._source)
        return fits and all(line in self._source[number - 1 + index] for index, line in enumerate(block))
