"""The pages name tests that exist, and say truly which of them run on every change."""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PROMISES = (ROOT / "SECURITY.md", ROOT / "docs" / "durability.md")
PAGES = (ROOT / "README.md", *PROMISES, *sorted(ROOT.glob("docs/*.md")))
NAME = re.compile(r"`((?:[\w/]+/)?test_\w+\.py)?(?:::)?(test_\w+)?`( \(long\))?")
FOLDER = re.compile(r"`(tests/[\w/]+)`")
NOT_ON_EVERY_CHANGE = {"slow", "gpu", "browser", "shared"}


@dataclass(frozen=True)
class Named:
    """A test function, or a file of tests, that a page names."""

    path: Path | None
    function: str | None
    is_said_to_be_long: bool


def marks_of(decorators: list[ast.expr], aliases: dict[str, set[str]]) -> set[str]:
    """Return the marks of a whole test; those of some of its parameters do not count."""
    found: set[str] = set()
    for one in decorators:
        text = ast.unparse(one.func if isinstance(one, ast.Call) else one)
        if "parametrize" not in text:
            found |= set(re.findall(r"pytest\.mark\.(\w+)", text)) | aliases.get(text, set())
    return found


def marks_in(path: Path) -> dict[str, set[str]]:
    """Return the marks of each test of a file."""
    text = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    aliases: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = "".join(lines[node.lineno - 1 : node.end_lineno])
            aliases[node.targets[0].id] = set(re.findall(r"pytest\.mark\.(\w+)", value))
    of_file = aliases.get("pytestmark", set())
    classes = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    nodes = itertools.chain(tree.body, *classes)
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        one.name: of_file | marks_of(one.decorator_list, aliases) for one in functions if one.name.startswith("test_")
    }


@pytest.fixture(scope="module")
def marks() -> dict[Path, dict[str, set[str]]]:
    return {path: marks_in(path) for path in TESTS.rglob("test_*.py")}


def named_in(text: str) -> Iterator[Named]:
    """Return what a text names in backticks; a function alone is looked for in the file that was named last."""
    path: Path | None = None
    for file, function, long in NAME.findall(text):
        if not file and not function:
            continue
        if file:
            path = TESTS / file.removeprefix("tests/")
        yield Named(path, function or None, bool(long))
    for folder in FOLDER.findall(text):
        for one in sorted((ROOT / folder).rglob("test_*.py")):
            yield Named(one, None, False)


def found(one: Named, marks: dict[Path, dict[str, set[str]]]) -> list[set[str]]:
    """Return the marks of each test that is meant; none if it does not exist."""
    if one.function is None:
        assert one.path is not None
        return list(marks.get(one.path, {}).values())
    if one.path is not None and one.function in marks.get(one.path, {}):
        return [marks[one.path][one.function]]
    return [tests[one.function] for tests in marks.values() if one.function in tests]


def rows_of(page: Path) -> list[str]:
    """Return the rows of the tables whose last column names tests."""
    rows, is_of_tests = [], False
    for line, following in zip(*[page.read_text(encoding="utf-8").splitlines()[at:] for at in (0, 1)], strict=False):
        if not line.startswith("|"):
            is_of_tests = False
        elif following.startswith("|--"):
            is_of_tests = "held by" in line or "tests" in line.rpartition("| ")[2]
        elif is_of_tests and not line.startswith("|--"):
            rows.append(line)
    return rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path, marks: dict[Path, dict[str, set[str]]]) -> None:
    missing = [one for one in named_in(page.read_text(encoding="utf-8")) if not found(one, marks)]
    assert not missing


@pytest.mark.parametrize("page", PROMISES, ids=lambda page: page.name)
def test_every_promise_is_held_by_a_test_that_runs_on_every_change(
    page: Path, marks: dict[Path, dict[str, set[str]]]
) -> None:
    rows = rows_of(page)
    assert len(rows) > 5
    for row in rows:
        tests = [marked for one in named_in(row) for marked in found(one, marks)]
        assert any(not marked & NOT_ON_EVERY_CHANGE for marked in tests), row


@pytest.mark.parametrize("page", PROMISES, ids=lambda page: page.name)
def test_a_test_is_called_long_exactly_if_make_test_leaves_it_out(
    page: Path, marks: dict[Path, dict[str, set[str]]]
) -> None:
    for one in named_in(page.read_text(encoding="utf-8")):
        if one.function is not None:
            assert one.is_said_to_be_long == all("slow" in marked for marked in found(one, marks)), one
