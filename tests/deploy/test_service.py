"""The systemd unit equals the one on the operations page."""

import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "stillroom.service"


def test_operations_page_shows_the_shipped_unit() -> None:
    assert f"```ini\n{UNIT.read_text()}```" in (ROOT / "docs" / "operations.md").read_text()


def test_files_of_the_service_belong_to_its_user_only() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    assert unit["Service"]["UMask"] == "0077" and unit["Service"]["User"] != "root"
