"""Every page has its place on the site."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    missing = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if f": {page.name}\n" not in navigation]

    assert not missing, f"add these to nav in mkdocs.yml: {missing}"
