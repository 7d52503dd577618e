"""docs/papers.md names reports, files, commands and settings that exist, and quotes intervals that its reports have."""

import re
from pathlib import Path

import pytest

from stillroom_bench.papers.agreement import intervals_of
from stillroom_bench.papers.page import PAPERS, REPORT_LINK, Claim, claims_of, report_command, table_rows
from stillroom_bench.papers.repeat import committed_result

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
VERDICTS = ("surpassed", "reproduced", "not reproduced", "contradicted", "not comparable", "not done")
CLAIMS = [claim for paper in PAPERS.values() for claim in claims_of(PAGE, paper)]
MECHANISMS = table_rows(4, PAGE)


def test_the_tables_of_all_four_papers_are_read() -> None:
    assert len(re.findall(r"^\| claim ", PAGE, re.M)) == len(re.findall(r"^\| mechanism ", PAGE, re.M)) == 4
    assert len(CLAIMS) > 80 and len(MECHANISMS) > 30
    num_rows = len([line for line in PAGE.splitlines() if line.startswith("| ")])
    assert num_rows == len(CLAIMS) + len(MECHANISMS) + 8 + 1 + len(PAPERS)


@pytest.mark.parametrize("paper", PAPERS.values())
def test_verdicts_are_counted_right(paper: str) -> None:
    first = [claim.verdict.split("**")[1] for claim in claims_of(PAGE, paper)]
    counted = next(row for row in table_rows(7, PAGE) if row[0] == paper)

    assert counted[1:] == [str(first.count(verdict)) for verdict in VERDICTS]


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row.claim[:50])
def test_every_claim_has_a_known_verdict(row: Claim) -> None:
    named = re.findall(r"\*\*([^*]+)\*\*", row.verdict)

    assert named and set(named) <= set(VERDICTS)
    assert row.verdict.startswith("**")
    if not {"not done", "not comparable"} & set(named):
        assert row.ours and row.command, "a verdict needs a number of ours and a command that makes it"


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row.claim[:50])
def test_every_interval_stands_in_a_report_of_its_row(row: Claim) -> None:
    texts = [(ROOT / report).read_text(encoding="utf-8") for report in row.reports]
    results = [committed_result(report, ROOT) for report in row.reports]
    figures = {text for result in results if result is not None for _, text in intervals_of(result)}

    for one in row.intervals:
        assert any(f" {one} " in text for text in texts) and one in figures, f"{one} is not in {row.reports}"


def test_every_report_with_a_command_can_be_run_again() -> None:
    for report in dict.fromkeys(report for claim in CLAIMS for report in claim.reports):
        words = report_command(ROOT / report)
        assert words, report
        section = command_section(f"stillroom {' '.join(words)}")
        assert section, report
        long = [word for word in words if word.startswith("--")]
        assert not [flag for flag in long if f"`{flag}`" not in section], report


def test_every_report_exists() -> None:
    reports = REPORT_LINK.findall(PAGE)

    assert len(reports) > 60
    assert not [path for path in reports if not (ROOT / path).is_file()]


def test_reports_of_a_changed_tree_are_named() -> None:
    named = next(line for line in PAGE.splitlines() if line.startswith("- **Commits**"))
    changed = [
        path
        for path in dict.fromkeys(REPORT_LINK.findall(PAGE))
        if re.search(r"at commit `\w+\+changes`", (ROOT / path).read_text(encoding="utf-8"))
    ]

    assert changed
    for path in changed:
        assert Path(path).stem[len("2026-11-21-") :] in re.findall(r"[\w-]+", named), path


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
