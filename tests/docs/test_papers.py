"""docs/papers.md names reports, files, commands and settings that exist, and quotes intervals that its reports have."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
VERDICTS = ("surpassed", "reproduced", "not reproduced", "contradicted", "not comparable", "not done")
PAPERS = ("RAGCache", "Cache-Craft", "VectorLiteRAG", "llmds")
NUMBER = r"-?\d[\d.]*(?: (?:us|ms|s|MiB))?"
INTERVAL = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]")
LINK = re.compile(r"\]\(\.\./(benchmarks/[\w.-]+\.md)\)")


def rows(num_columns: int, text: str = PAGE) -> list[list[str]]:
    """Return the cells of the rows of all tables with this many columns, without their heads."""
    lines = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in row] for row in lines if len(row) == num_columns]
    return [row for row in found if row[0] not in ("claim", "mechanism")]


CLAIMS, MECHANISMS = rows(6), rows(4)


def test_the_tables_of_all_four_papers_are_read() -> None:
    assert len(re.findall(r"^\| claim ", PAGE, re.M)) == len(re.findall(r"^\| mechanism ", PAGE, re.M)) == 4
    assert len(CLAIMS) > 80 and len(MECHANISMS) > 30
    num_rows = len([line for line in PAGE.splitlines() if line.startswith("| ")])
    assert num_rows == len(CLAIMS) + len(MECHANISMS) + 8 + 1 + len(PAPERS)


@pytest.mark.parametrize("paper", PAPERS)
def test_verdicts_are_counted_right(paper: str) -> None:
    claims = rows(6, PAGE.partition(f"\n## {paper}\n")[2].partition("\n## ")[0])
    first = [row[-1].split("**")[1] for row in claims]
    counted = next(row for row in rows(7) if row[0] == paper)

    assert counted[1:] == [str(first.count(verdict)) for verdict in VERDICTS]


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row[0][:50])
def test_every_claim_has_a_known_verdict(row: list[str]) -> None:
    named = re.findall(r"\*\*([^*]+)\*\*", row[-1])

    assert named and set(named) <= set(VERDICTS)
    assert row[-1].startswith("**")
    if not {"not done", "not comparable"} & set(named):
        assert row[2] and row[3], "a verdict needs a number of ours and a command that makes it"


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row[0][:50])
def test_every_interval_stands_in_a_report_of_its_row(row: list[str]) -> None:
    reports = [ROOT / path for path in LINK.findall(row[4])]
    texts = [path.read_text(encoding="utf-8") for path in reports]

    missing = [one for one in INTERVAL.findall(row[2]) if not any(f" {one} " in text for text in texts)]
    assert not missing, f"not in {[path.name for path in reports]}: {missing}"


def test_every_report_exists() -> None:
    reports = LINK.findall(PAGE)

    assert len(reports) > 60
    assert not [path for path in reports if not (ROOT / path).is_file()]


def test_every_file_exists_and_every_mechanism_has_one() -> None:
    for row in MECHANISMS:
        files = re.findall(r"`([\w/]+\.py)`", row[2])
        assert files, row[0]
        for file in files:
            assert any((ROOT / "src" / package / file).is_file() for package in ("stillroom", "stillroom_bench")), file


def command_section(command: str) -> str:
    """Return the reference of the command that a line begins with; empty if there is none."""
    words = command.split()
    for count in range(len(words), 1, -1):
        head, separator, rest = COMMANDS.partition(f"## `{' '.join(words[:count])}`\n")
        if head and separator:
            return rest.partition("\n## ")[0]
    return ""


def test_every_command_and_flag_is_in_the_reference() -> None:
    commands = re.findall(r"`(stillroom [^`]+)`", PAGE)

    assert len(commands) > 60
    for command in commands:
        section = command_section(command)
        assert section, command
        assert not [flag for flag in re.findall(r"--[\w-]+", command) if f"`{flag}`" not in section], command


def test_every_setting_is_in_the_reference() -> None:
    for row in MECHANISMS:
        for section, name in re.findall(r"`(\w+)\.(\w+)(?: = [^`]+)?`", row[3]):
            part = SETTINGS.partition(f"[{section}]")[2]
            assert f"`{name}`" in part or f"`{section}.{name}`" in SETTINGS, f"{section}.{name}"
        assert re.search(r"`[^`]+`", row[3]), row[0]
