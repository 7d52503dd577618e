"""Draws a line chart with intervals as SVG: readable on light and dark pages, without scripts, fonts or other files."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 580, 24, 300
_LIGHT = ("#22664a", "#b3541e", "#3f6fae", "#8a3f8f", "#7a6a00", "#5d625b")
_DARK = ("#7ccfa5", "#f0a275", "#94bcf0", "#dba0e0", "#dccb5c", "#b9beb6")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 4")
_LEAST_GAP = 34
"""Pixels between labels of the horizontal axis."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value with its 95 % interval; None where the report has none."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis."""

    label: str
    """With the unit."""
    is_log: bool = False
    least: float | None = None
    """Lower end; None: 0, or of a logarithmic axis the lowest value."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one horizontal axis; at most six."""

    title: str
    description: str
    x: Axis
    y: Axis
    series: dict[str, tuple[Point, ...]]


def draw(chart: Chart) -> str:
    """Return the SVG. Every point has its data as attributes: series, x, y and, with an interval, low and high."""
    assert 0 < len(chart.series) <= len(_LIGHT)
    points = [point for series in chart.series.values() for point in series]
    xs = sorted({point.x for point in points})
    ys = [value for point in points for value in (point.low, point.y, point.high) if value is not None]
    x = _scale(chart.x, xs, _LEFT + 14, _RIGHT - 14)
    y = _scale(chart.y, ys, _BOTTOM, _TOP + 6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="t d">',
        f'<title id="t">{html.escape(chart.title)}</title>',
        f'<desc id="d">{html.escape(chart.description)}</desc>',
        f"<style>{_style()}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        *_y_axis(chart.y, ys, y),
        *_x_axis(chart.x, xs, x),
    ]
    for number, (name, series) in enumerate(chart.series.items()):
        parts += _line(number, name, series, x, y)
    return "\n".join([*parts, "</svg>", ""])


Place = Callable[[float], float]


def _scale(axis: Axis, values: Sequence[float], first: float, last: float) -> Place:
    """Return the pixel of a value; the ends of the data are at `first` and `last`."""
    low, high = _ends(axis, values)

    def place(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if axis.is_log else (value - low) / (high - low)
        return first + share * (last - first)

    return place


def _ends(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    least = axis.least if axis.least is not None else min(values) if axis.is_log else min(0.0, min(values))
    return least, max(values)


def _y_axis(axis: Axis, values: Sequence[float], y: Place) -> list[str]:
    parts = [f'<text class="axis" x="{_LEFT}" y="{_TOP - 8}">{html.escape(axis.label)}</text>']
    for tick in _ticks(*_ends(axis, values), is_log=axis.is_log):
        at = f"{y(tick):.1f}"
        parts.append(f'<path class="grid" d="M{_LEFT} {at}H{_RIGHT}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    return parts


def _x_axis(axis: Axis, values: Sequence[float], x: Place) -> list[str]:
    parts = [f'<path class="grid" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>']
    last = -math.inf
    for value in values:
        at = x(value)
        parts.append(f'<path class="grid" d="M{at:.1f} {_BOTTOM}v5"/>')
        if at - last >= _LEAST_GAP:
            parts.append(f'<text class="tick" x="{at:.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{value:g}</text>')
            last = at
    middle = (_LEFT + _RIGHT) / 2
    label = html.escape(axis.label)
    return [*parts, f'<text class="axis" x="{middle}" y="{_BOTTOM + 44}" text-anchor="middle">{label}</text>']


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Return round values within the ends."""
    if is_log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = (factor * 10.0**power for power in powers for factor in (1, 2, 5))
        return [tick for tick in ticks if low <= tick <= high]
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= 6)
    return [round(step * number, 10) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(number: int, name: str, series: Sequence[Point], x: Place, y: Place) -> list[str]:
    path = "L".join(f"{x(point.x):.1f} {y(point.y):.1f}" for point in series)
    dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
    parts = [f'<path class="line s{number}" d="M{path}"{dash}/>']
    for point in series:
        data = f'data-series="{html.escape(name)}" data-x="{point.x:g}" data-y="{point.y!r}"'
        if point.low is not None and point.high is not None:
            data += f' data-low="{point.low!r}" data-high="{point.high!r}"'
            bar = f"M{x(point.x):.1f} {y(point.low):.1f}V{y(point.high):.1f}"
            parts.append(f'<path class="bar s{number}" d="{bar}"/>')
        parts.append(f'<circle class="s{number}" cx="{x(point.x):.1f}" cy="{y(point.y):.1f}" r="3.5" {data}/>')
    at = _TOP + 14 + 22 * number
    parts.append(f'<path class="line s{number}" d="M{_RIGHT + 14} {at}h28"{dash}/>')
    parts.append(f'<text class="tick" x="{_RIGHT + 50}" y="{at + 4}">{html.escape(name)}</text>')
    return parts


def _style() -> str:
    def colours(values: Sequence[str]) -> str:
        return "".join(f".s{at}{{stroke:{value}}}circle.s{at}{{fill:{value}}}" for at, value in enumerate(values))

    dark = ".page{fill:#1b1f1c}text{fill:#e4e7e2}.grid{stroke:#3d443e}" + colours(_DARK)
    return (
        "text{font:12px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#33372f}.axis{font-weight:600}"
        ".page{fill:#faf8f5}.grid{stroke:#d9d6cf;fill:none}.line{fill:none;stroke-width:2}"
        f".bar{{fill:none;stroke-width:1.4;opacity:.8}}{colours(_LIGHT)}"
        f"@media(prefers-color-scheme:dark){{{dark}}}"
    )
