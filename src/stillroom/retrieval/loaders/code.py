"""Loader of source code: paragraphs split at blank lines and definitions; enclosing definitions become headings.

Python is parsed with `ast`, every other language by keywords and indentation. Other code has no headings.
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
        (?:\([^)\n]{0,100}\)\s*)?          # Go receiver
        (?P<name>[A-Za-z_$][\w$.:]*)""",
    re.VERBOSE,
)
_C_FUNCTION = re.compile(
    r"[A-Za-z_][\w\s*&:<>,~]{0,200}?[\s*&:~](?P<name>~?[A-Za-z_]\w*)\s*\([^;={}]{0,400}\)?[^;={}]{0,80}\{?\s*\Z"
)
_C_LIKE = frozenset({".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".java", ".cs", ".m", ".mm"})
_NO_FUNCTION = frozenset({"if", "for", "while", "switch", "catch", "return", "else", "do", "sizeof", "new", "case"})
_MAX_DEPTH = 8
"""Maximum depth of a heading path."""
_LEAD = re.compile(r"\s*(?:#|//|/\*|\*|--|;|@|\[|%|\"\"\")")
"""Comments and decorators; directly above a definition they belong to it."""


@dataclass(frozen=True, slots=True)
class _Definition:
    """A definition and its lines, from 1, inclusive."""

    name: str
    start: int
    end: int


def parse_code(path: Path, text: str) -> Document:
    """Parse source code. The file name is the title."""
    lines = text.split("\n")
    definitions = _python(text) if path.suffix.lower() in (".py", ".pyi", ".pyw") else None
    if definitions is None:
        definitions = _by_indentation(lines, is_c_like=path.suffix.lower() in _C_LIKE)
    return Document(DocumentId(str(path)), path.name, tuple(_paragraphs(lines, definitions)))


def _python(text: str) -> list[_Definition] | None:
    """Return classes and functions; None if Python cannot parse the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append(_Definition(node.name, start, node.end_lineno or node.lineno))
    return sorted(found, key=lambda definition: (definition.start, -definition.end))


def _by_indentation(lines: Sequence[str], *, is_c_like: bool) -> list[_Definition]:
    """Return definitions by keyword. A definition ends before the next line that is indented no deeper, except closing
    brackets."""
    found: list[_Definition] = []
    open_definitions: list[tuple[int, str, int]] = []
    last = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        name = _defined(line, is_c_like=is_c_like)
        is_closing = line.lstrip()[0] in "})]" or line.strip() in ("end", "{", "end;")
        while open_definitions and open_definitions[-1][0] >= indent + is_closing:
            _, known, start = open_definitions.pop()
            found.append(_Definition(known, start, last))
        if name:
            open_definitions.append((indent, name, number))
        last = number
    found += [_Definition(known, start, last) for _, known, start in open_definitions]
    return sorted(found, key=lambda definition: (definition.start, -definition.end))


def _defined(line: str, *, is_c_like: bool) -> str:
    """Return the name that a line defines, or ""."""
    if len(line) > 400:
        return ""
    match = _DEFINITION.match(line)
    if match is None and is_c_like:
        match = _C_FUNCTION.match(line.strip())
        if match is not None and (match["name"] in _NO_FUNCTION or line.split()[0] in _NO_FUNCTION):
            match = None
    return match["name"].rstrip(":") if match else ""


def _paragraphs(lines: Sequence[str], definitions: Sequence[_Definition]) -> list[Paragraph]:
    starts = {_with_lead(lines, definition.start) for definition in definitions}
    ends = {definition.end + 1 for definition in definitions}
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
    """Return the first line of the comments and decorators directly above line `start`."""
    while start > 1 and _LEAD.match(lines[start - 2]):
        start -= 1
    return start


def _paths(lines: Sequence[str], definitions: Sequence[_Definition]) -> list[tuple[str, ...]]:
    """Return the enclosing definitions of each line, outermost first."""
    paths: list[tuple[str, ...]] = [()] * (len(lines) + 1)
    for definition in definitions:  # from outer to inner
        for index in range(_with_lead(lines, definition.start) - 1, min(definition.end, len(lines))):
            paths[index] = (*paths[index], definition.name)[:_MAX_DEPTH]
    return paths
