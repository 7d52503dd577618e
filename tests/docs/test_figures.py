"""Figures of the pages: there, described, small, without anything from elsewhere."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
MECHANISMS = (
    "retrieval",
    "tiered-index",
    "runtime",
    "knowledge-tree",
    "kv-records",
    "chunk-reuse",
    "prepared",
    "pipelining",
    "planning",
    "front-and-engines",
)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_has_a_figure_and_a_worked_example(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()

    (alternative,) = re.findall(rf"!\[([^\]]+)\]\(figures/{name}\.svg\)", page)
    assert len(alternative) > 20
    assert re.search(r"\*\*Example|^#+ .*[Ee]xample|^Example ", page, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(DOCS.glob("figures/*.svg")), ids=lambda path: path.stem)
def test_a_figure_is_drawn_within_its_frame_and_says_what_it_shows(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    _, _, width, height = map(float, root.attrib["viewBox"].split())

    assert root.findtext(f"{space}title") and root.findtext(f"{space}desc")
    assert path.stat().st_size < 20_000
    assert path.stem in MECHANISMS
    for shape in root.iter(f"{space}rect"):
        right = float(shape.attrib.get("x", 0)) + float(shape.attrib["width"])
        bottom = float(shape.attrib.get("y", 0)) + float(shape.attrib["height"])
        assert right <= width and bottom <= height
    assert not re.search(r"(?:href|src)=|url\((?!#)|<script", path.read_text())


def test_every_picture_of_a_page_is_there_and_small() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).stat().st_size < 150_000, (page, target)
