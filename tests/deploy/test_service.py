"""The unit for systemd: the file and the page that explains it say the same."""

import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "stillroom.service"


def test_the_page_shows_the_unit_that_is_shipped() -> None:
    assert f"```ini\n{UNIT.read_text()}```" in (ROOT / "docs" / "operations.md").read_text()


def test_what_the_service_makes_is_its_users_alone() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    assert unit["Service"]["UMask"] == "0077" and unit["Service"]["User"] != "root"
