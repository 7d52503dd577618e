"""Figures that are drawn from reports: up to date, true to the report, and drawn to scale."""

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stillroom_bench.instrument.bench_report import format_value
from stillroom_bench.papers.figures import FIGURES, FOLDER, Figure, drawn

ROOT = Path(__file__).resolve().parents[2]
SPACE = "{http://www.w3.org/2000/svg}"
Circle = dict[str, str]
TABLES = {
    "hits-by-capacity": "Token hit rate",
    "quality-by-recomputation": "Against a full prefill",
    "time-by-preparing": "Mean time to first token",
    "quality-by-documents": "Same answer as a full prefill, by documents in the prompt",
}
"""Headings of the tables that are drawn; the other figures are drawn from the first table."""


def circles(figure: Figure) -> list[Circle]:
    root = ElementTree.parse(ROOT / FOLDER / f"{figure.name}.svg").getroot()
    return [dict(one.attrib) for one in root.iter(f"{SPACE}circle")]


def row_of(figure: Figure, cells: tuple[str, ...]) -> str:
    """Return the first row of the report's Markdown that begins with these cells, in the table that is drawn."""
    report = (ROOT / "benchmarks" / f"{figure.report}.md").read_text(encoding="utf-8")
    table = report.partition(f"## {TABLES.get(figure.name, '')}\n")[2] if figure.name in TABLES else report
    return next(line for line in table.splitlines() if line.startswith(f"| {' | '.join(cells)} |"))


def expected_cell(figure: Figure, point: Circle) -> tuple[tuple[str, ...], str]:
    """Return the first cells of the report's row for a point, and what must stand in that row."""
    series, x, y = point["data-series"], point["data-x"], float(point["data-y"])
    low, high = float(point.get("data-low", "nan")), float(point.get("data-high", "nan"))
    if figure.name == "reuse-by-rate":
        arm = {"keeps nothing": "off", "on the device, LRU": "lru", "vLLM 0.32": "vllm", "Stillroom": "tiers"}[series]
        values = [format_value("x_seconds", value) for value in (y, low, high)]
        return (f"mmlu, k=2, {x}x/{arm}", "first_token_seconds"), f"| {values[0]} [{values[1]}, {values[2]}] |"
    if figure.name == "search-by-fast-memory":
        place = {"0": "all on disk", "100": "all in RAM"}.get(x, f"{x}% of lists in RAM")
        skew, batch = re.fullmatch(r"(.*)-like, (\d+)", series).groups()  # type: ignore[union-attr]
        values = [format_value("x_seconds", value / 1e3) for value in (y, low, high)]
        return (f"{skew}, batch {batch}/{place}", "mean_seconds"), f"| {values[0]} [{values[1]}, {values[2]}] |"
    if figure.name == "time-by-window":
        metric = {"mean": "mean_first_token_seconds", "99th percentile": "p99_first_token_seconds"}[series]
        return (f"1.5x/cache first, window {x}", metric), f"| {y:.3g} [{low:.3g}, {high:.3g}] |"
    if figure.name == "time-by-preparing":
        questions = {"first questions": "first", "all questions": "all", "later questions": "repeated"}[series]
        return (questions, f"prepared {x}%"), f"| {y:.3g} [{low:.3g}, {high:.3g}] |"
    if figure.name == "quality-by-documents":
        arm = "no recompute" if series == "nothing recomputed" else f"{series.partition(' (')[0]} 30%"
        return (arm,), f"| {y:.3f} |"
    if figure.name == "search-by-size":
        index = {"HNSW": "hnsw m=16 ef=100", "faiss alone": "faiss m=16 ef=100", "IVF-PQ": "ivf_pq nprobe=32"}
        values = [format_value("x_seconds", value / 1e6) for value in (y, low, high)]
        arm = f"{int(float(x)):,} {index.get(series, 'flat')}"
        return (arm, "p50_seconds"), f"| {values[0]} [{values[1]}, {values[2]}] |"
    if figure.name == "quality-by-recomputation":
        return (f"{series.partition(' (')[0].removesuffix(' tokens')} {x}%",), f"| {y:.3f} |"
    assert figure.name == "hits-by-capacity"
    return ("mmlu-like, k=2", f"{x}%"), f"| {y / 100:.3f} |"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_is_what_its_report_gives(figure: Figure) -> None:
    """Else run: python -m stillroom_bench.papers.figures"""
    assert (ROOT / FOLDER / f"{figure.name}.svg").read_text(encoding="utf-8") == drawn(figure, ROOT)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_point_and_interval_stands_in_the_report(figure: Figure) -> None:
    points = circles(figure)

    assert len(points) >= 8 and len({point["data-series"] for point in points}) >= 2
    for point in points:
        cells, quoted = expected_cell(figure, point)
        assert quoted in row_of(figure, cells), (cells, quoted)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_points_and_intervals_are_drawn_to_scale(figure: Figure) -> None:
    root = ElementTree.parse(ROOT / FOLDER / f"{figure.name}.svg").getroot()
    labels = [one.text or "" for one in root.iter(f"{SPACE}text") if one.attrib.get("class") == "axis"]
    bars = {one.attrib["d"] for one in root.iter(f"{SPACE}path") if one.attrib.get("class", "").startswith("bar")}
    points = circles(figure)
    assert len(labels) == 2
    is_log_y, is_log_x = ("logarithmic" in label or "multiple" in label for label in labels)
    for data, pixel, is_log in (("data-x", "cx", is_log_x), ("data-y", "cy", is_log_y)):
        pairs = [(math.log(float(one[data])) if is_log else float(one[data]), float(one[pixel])) for one in points]
        (first, at), (last, end) = min(pairs), max(pairs)
        for value, place in pairs:
            assert place == pytest.approx(at + (value - first) / (last - first) * (end - at), abs=0.11)
    for point in points:
        drawn_bars = [bar for bar in bars if bar.startswith(f"M{point['cx']} ")]
        if "data-low" in point:
            spans = [tuple(map(float, re.findall(r"[\d.]+", bar)[1:])) for bar in drawn_bars]
            assert any(top - 0.1 <= float(point["cy"]) <= bottom + 0.1 for bottom, top in spans)
    assert len([one for one in points if "data-low" in one]) >= len(bars)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_can_be_read_on_light_and_dark_pages_and_by_its_text(figure: Figure) -> None:
    path = ROOT / FOLDER / f"{figure.name}.svg"
    text, root = path.read_text(encoding="utf-8"), ElementTree.parse(path).getroot()

    assert len(root.findtext(f"{SPACE}title") or "") > 15 and len(root.findtext(f"{SPACE}desc") or "") > 80
    assert "@media(prefers-color-scheme:dark)" in text and path.stat().st_size < 20_000
    assert not re.search(r"(?:href|src)=|url\(|<script", text)
    for light, dark in (("#faf8f5", _colours(text)[0]), ("#1b1f1c", _colours(text)[1])):
        assert dark and all(_contrast(light, colour) >= 3 for colour in dark)


def test_every_measured_figure_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))

    assert {path.stem for path in (ROOT / FOLDER).glob("*.svg")} == {figure.name for figure in FIGURES}
    for figure in FIGURES:
        alternatives = re.findall(rf"!\[([^\]]+)\]\(figures/measured/{figure.name}\.svg\)", pages)
        assert alternatives and all(len(one) > 20 for one in alternatives), figure.name


def _colours(text: str) -> tuple[list[str], list[str]]:
    """Return the colours of lines on light and on dark pages."""
    light, _, dark = text.partition("@media")
    return re.findall(r"\.s\d\{stroke:(#\w+)", light), re.findall(
        r"\.s\d\{stroke:(#\w+)", dark.partition("</style>")[0]
    )


def _contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
