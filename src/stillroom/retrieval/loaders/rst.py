"""reStructuredText: sections become heading paths, blocks become paragraphs, code is kept verbatim.

docutils never stops us: unknown directives and roles (Sphinx's) are read for their text, and if it throws, the file is
read as plain text.
"""

import re
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.core import publish_doctree
from docutils.languages import get_language
from docutils.parsers.rst import Directive, directives, roles
from docutils.statemachine import StringList
from docutils.utils import new_document

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import Metadata
from stillroom.retrieval.loaders.metadata import named_texts
from stillroom.retrieval.loaders.source import Outline, blank_line_paragraphs

# no text can be matched in two ways: else it would take time that doubles with each line
_HEADER = re.compile(r"\A(?:[A-Za-z][A-Za-z0-9-]*:.*\n(?:[ \t]+\S.*\n)*){2,}(?=[ \t]*\n)")
_OTHER_LINE_ENDS = dict.fromkeys(map(ord, "\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
"""Where docutils ends a line, too; no line of a file ends there."""
_DIRECTIVE = re.compile(r"\.\. +([A-Za-z][\w:.+-]*?)::(?:\s|$)", re.MULTILINE)
_ROLE = re.compile(r":([A-Za-z][\w:.+-]{0,100}):`")
_LABELLED = re.compile(r"(.+)<[^<>]+>\Z", re.DOTALL)
_LINE_CHARS = 10_000
"""Docutils' own limit, also on what is substituted."""
_SETTINGS = {
    "report_level": 5,
    "halt_level": 6,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "syntax_highlight": "none",
    "warning_stream": False,
    "doctitle_xform": False,  # the outline finds the title, as for every format
    "docinfo_xform": False,
    "smart_quotes": False,
    "_disable_config": True,  # a docutils.conf in the working folder is none of our business
}


def parse_rst(path: Path, text: str) -> Document:
    """The title is that of a leading RFC 2822 header, else a lone first heading, else the file's name."""
    body, title, metadata = _split_header(text.translate(_OTHER_LINE_ENDS))
    outline = Outline()
    try:
        _Blocks(outline, body).read(_parse(body))
    except Exception:  # docutils fails on some inputs in ways it does not document
        return Document(
            DocumentId(str(path)), title or path.stem, tuple(blank_line_paragraphs(body)), metadata=metadata
        )
    title, paragraphs = outline.finish(title, path.stem)
    return Document(DocumentId(str(path)), title, paragraphs, metadata=metadata)


def _split_header(text: str) -> tuple[str, str, Metadata]:
    """The text with a leading header blanked, so that line numbers hold; the header's title, or ""; and its other
    fields, their names in small letters.

    A PEP's number stands before its title, for that is how people name it: `PEP 8: Style Guide for Python Code`.
    """
    match = _HEADER.match(text)
    fields = HeaderParser().parsestr(match.group()) if match else None
    if match is None or fields is None or "title" not in fields:
        return text, "", {}
    title = " ".join(str(fields["title"]).split())
    if "pep" in fields:
        title = f"PEP {str(fields['pep']).strip()}: {title}"
    others = ((name.lower(), " ".join(str(value).split())) for name, value in fields.items())
    metadata = named_texts(pair for pair in others if pair[0] != "title")
    return "\n" * match.group().count("\n") + text[match.end() :], title, metadata


class _AnyDirective(Directive):  # type: ignore[misc]
    """Stands for a directive that docutils does not know: its argument and its content are text."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        block = nodes.container()
        block.line = self.lineno
        if self.arguments:  # docutils counts all lines up to the first blank one as the argument
            self.state.nested_parse(StringList(self.arguments[0].split("\n"), ""), self.lineno - 1, block)
        self.state.nested_parse(self.content, self.content_offset, block)
        return [block]


def _any_role(name: str, rawtext: str, text: str, *_: Any, **__: Any) -> tuple[list[nodes.Node], list[nodes.Node]]:
    """Stands for a role that docutils does not know: `label <target>` reads as its label."""
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
    # of a file with a longer line docutils would read nothing
    limit = max(_LINE_CHARS, *map(len, text.expandtabs().split("\n")))
    document: nodes.document = publish_doctree(text, settings_overrides={**_SETTINGS, "line_length_limit": limit})
    return document


_SKIPPED = (
    nodes.comment,
    nodes.substitution_definition,
    nodes.system_message,
    nodes.target,
    nodes.pending,
    nodes.meta,
)
_LEAVES = (
    *(nodes.paragraph, nodes.literal_block, nodes.doctest_block, nodes.math_block, nodes.term, nodes.field_name),
    *(nodes.rubric, nodes.caption, nodes.attribution, nodes.title, nodes.subtitle, nodes.option_group),
)


class _Blocks:
    """Walks the document tree in reading order."""

    def __init__(self, outline: Outline, source: str) -> None:
        self._outline = outline
        self._source = source.split("\n")
        self._level = 0
        self._line = 1
        """Where the last block began: the place of blocks that docutils gives no line."""
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
        elif isinstance(node, _LEAVES):
            self._emit(node, node.astext())
        elif isinstance(node, nodes.image):
            self._emit(node, str(node.get("alt", "")))
        else:
            self._read_children(node)

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
        self._outline.heading(self._level, section[0].astext(), self._locate(section[0], section[0].astext()))
        for child in section.children[1:]:
            self.read(child)
        self._level -= 1

    def _read_table(self, table: nodes.table) -> None:
        rows = [
            " | ".join(" ".join(entry.astext().split()) for entry in row.findall(nodes.entry))
            for row in table.findall(nodes.row)
        ]
        captions = [child.astext() for child in table.children if isinstance(child, nodes.title)]
        self._emit(table, "\n".join([*captions, *rows]))

    def _emit(self, node: Any, text: str) -> None:
        line = self._locate(node, text)
        num_lines = max(str(node.rawsource).strip("\n").count("\n"), text.strip("\n").count("\n"))
        self._outline.paragraph(self._bullet + text, line, min(line + num_lines, len(self._source)))
        self._bullet = ""

    def _locate(self, node: Any, text: str) -> int:
        """The line of the first words, looked up from where we are: docutils reports the end of some blocks."""
        raw = str(node.rawsource) or text
        first = next((line.strip() for line in raw.split("\n") if line.strip()), "")
        reported = int(node.line or 0)
        for number in range(self._line, len(self._source) + 1):
            if first and first in self._source[number - 1]:
                self._line = number
                return number
            if reported and number > reported + 2:
                break
        self._line = max(self._line, min(reported or self._line, len(self._source)))
        return self._line
