"""Source code: paragraphs end at blank lines and begin at definitions; the definitions around them are the headings.

Python is read by its own grammar, everything else by keywords and indentation; what that does not understand is text
without headings.
"""

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId

_DEFINITION = re.compile(
    r"""\s*(?:(?:export|default|public|private|protected|internal|static|final|abstract|sealed|async|override|virtual
        |pub(?:\([^)]{0,40}\))?|unsafe|extern|open|data|inline|partial|readonly|declare|local)\s+)*
        (?:class|struct|interface|enum|trait|impl|fn|func|function|def|module|namespace|object|protocol|extension|sub
        |message|service|type|record|defmodule|macro_rules!)(?:\s+|\*\s*)
        (?:\([^)\n]{0,100}\)\s*)?          # a receiver in Go
        (?P<name>[A-Za-z_$][\w$.:]*)""",
    re.VERBOSE,
)
_C_FUNCTION = re.compile(
    r"[A-Za-z_][\w\s*&:<>,~]{0,200}?[\s*&:~](?P<name>~?[A-Za-z_]\w*)\s*\([^;={}]{0,400}\)?[^;={}]{0,80}\{?\s*\Z"
)
_C_LIKE = frozenset({".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".java", ".cs", ".m", ".mm"})
_NO_FUNCTION = frozenset({"if", "for", "while", "switch", "catch", "return", "else", "do", "sizeof", "new", "case"})
_MAX_DEPTH = 8
"""Definitions within definitions that make a heading."""
_LEAD = re.compile(r"\s*(?:#|//|/\*|\*|--|;|@|\[|%|\"\"\")")
"""Comments and decorators: directly above a definition they belong to it."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """Where a definition stands, in lines from 1, inclusive."""

    name: str
    start: int
    end: int


def parse_code(path: Path, text: str) -> Document:
    """The file's name is the title."""
    lines = text.split("\n")
    definitions = _python(text) if path.suffix.lower() in (".py", ".pyi", ".pyw") else None
    if definitions is None:
        definitions = _by_indentation(lines, is_c_like=path.suffix.lower() in _C_LIKE)
    return Document(DocumentId(str(path)), path.name, tuple(_paragraphs(lines, definitions)))


def _python(text: str) -> list[_Definition] | None:
    """Classes and functions; None where Python cannot parse the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that were once allowed
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append(_Definition(node.name, start, node.end_lineno or node.lineno))
    return sorted(found, key=lambda one: (one.start, -one.end))


def _by_indentation(lines: Sequence[str], *, is_c_like: bool) -> list[_Definition]:
    """A definition goes on until a line that is indented no deeper, closing brackets aside."""
    found: list[_Definition] = []
    open_ones: list[tuple[int, str, int]] = []
    last = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        name = _defined(line, is_c_like=is_c_like)
        is_closing = line.lstrip()[0] in "})]" or line.strip() in ("end", "{", "end;")
        while open_ones and (indent < open_ones[-1][0] or (indent == open_ones[-1][0] and not is_closing)):
            _, known, start = open_ones.pop()
            found.append(_Definition(known, start, last))
        if name:
            open_ones.append((indent, name, number))
        last = number
    found += [_Definition(known, start, last) for _, known, start in open_ones]
    return sorted(found, key=lambda one: (one.start, -one.end))


def _defined(line: str, *, is_c_like: bool) -> str:
    """The name that a line defines; empty where it defines none."""
    if len(line) > 400:
        return ""
    match = _DEFINITION.match(line)
    if match is None and is_c_like:
        match = _C_FUNCTION.match(line.strip())
        if match is not None and (match["name"] in _NO_FUNCTION or line.split()[0] in _NO_FUNCTION):
            match = None
    return match["name"].rstrip(":") if match else ""


def _paragraphs(lines: Sequence[str], definitions: Sequence[_Definition]) -> list[Paragraph]:
    starts = {_with_lead(lines, one.start) for one in definitions}
    ends = {one.end + 1 for one in definitions}
    paths = _paths(lines, definitions)
    found: list[Paragraph] = []
    run: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        if run and (not line.strip() or number in starts or number in ends):
            first = number - len(run)
            found.append(Paragraph("\n".join(run), paths[first - 1], first, number - 1))
            run = []
        if line.strip():
            run.append(line.rstrip())
    return found


def _with_lead(lines: Sequence[str], start: int) -> int:
    """The first of the comments and decorators directly above a line."""
    while start > 1 and _LEAD.match(lines[start - 2]):
        start -= 1
    return start


def _paths(lines: Sequence[str], definitions: Sequence[_Definition]) -> list[tuple[str, ...]]:
    """The definitions around each line, outermost first."""
    paths: list[tuple[str, ...]] = [()] * (len(lines) + 1)
    for one in definitions:  # from outer to inner
        for index in range(_with_lead(lines, one.start) - 1, min(one.end, len(lines))):
            paths[index] = (*paths[index], one.name)[:_MAX_DEPTH]
    return paths
