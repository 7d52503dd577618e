"""Reads docs/papers.md, the one list of the papers' claims, and the reports that it links to."""

import re
from dataclasses import dataclass
from pathlib import Path

from stillroom.errors import UsageError

PAPERS = {
    "ragcache": "RAGCache",
    "cache-craft": "Cache-Craft",
    "vectorliterag": "VectorLiteRAG",
    "llmds": "llmds",
}
"""Name on the command line -> heading of the page."""
_NUMBER = r"-?\d[\d.]*(?:e[+-]\d+)?(?: (?:us|ms|s|MiB))?"
INTERVAL = re.compile(rf"{_NUMBER} \[{_NUMBER}, {_NUMBER}\]")
REPORT_LINK = re.compile(r"\]\(\.\./(benchmarks/[\w.-]+\.md)\)")
_COMMAND = re.compile(r"^`(?:stillroom|main\.py) (bench [^`]+)` at commit", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of a paper's first table, in the page's Markdown."""

    claim: str
    paper: str
    """The paper's number."""
    ours: str
    command: str
    """The options that matter; the whole line stands in the report."""
    report: str
    verdict: str

    @property
    def reports(self) -> list[str]:
        """Paths of the linked reports below the checkout."""
        return REPORT_LINK.findall(self.report)

    @property
    def intervals(self) -> list[str]:
        """Quoted numbers of ours that have an interval."""
        return INTERVAL.findall(self.ours)


def table_rows(num_columns: int, text: str) -> list[list[str]]:
    """Return the cells of all tables with this many columns, without their heads."""
    lines = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in row] for row in lines if len(row) == num_columns]
    return [row for row in found if row[0] not in ("claim", "mechanism")]


def claims_of(page: str, paper: str) -> list[Claim]:
    """Return the claims below a paper's heading, in the order of the page."""
    section = page.partition(f"\n## {paper}\n")[2].partition("\n## ")[0]
    return [Claim(*row) for row in table_rows(6, section)]


def find_checkout(given: Path | None) -> Path:
    """Return the folder with docs/papers.md and its reports: the given one, else that of this file.

    Raises:
        UsageError: it has no such page, as in an installed package.
    """
    folder = given or Path(__file__).resolve().parents[3]
    if not (folder / "docs" / "papers.md").is_file():
        raise UsageError(
            f"{folder} has no docs/papers.md; run this in a checkout of Stillroom, or name one: --checkout"
        )
    return folder


def report_command(report: Path) -> list[str] | None:
    """Return the arguments of `stillroom` that made a report; None if it was made by hand or is missing.

    Reports do not quote: the words after a flag are one value.
    """
    found = _COMMAND.search(report.read_text(encoding="utf-8")) if report.is_file() else None
    if found is None:
        return None
    arguments: list[str] = []
    has_flag = False
    for word in found[1].split():
        if has_flag and not word.startswith("-") and not arguments[-1].startswith("-"):
            arguments[-1] += f" {word}"
        else:
            arguments.append(word)
        has_flag = has_flag or word.startswith("-")
    return arguments
