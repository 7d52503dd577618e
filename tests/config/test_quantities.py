"""Sizes, durations, and the ranges beside the fields of settings."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from stillroom.config.quantities import Range, check_ranges, memory_bytes, parse_seconds, parse_size, ranges_of
from stillroom.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300ms", 0.3), ("1.5s", 1.5), (" 500 us ", 5e-4), ("2min", 120.0), ("1h", 3600.0), (".5s", 0.5)],
)
def test_durations_take_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "300", "ms", "-1s", "0s", "1.2.3s", "1 day", "1e3s", "nan s"])
def test_text_that_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("512 MiB", 2**29), ("1.5KiB", 1536), ("2GB", 2 * 10**9), ("77", 77)]
)
def test_sizes_take_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_size_can_be_a_share_of_memory() -> None:
    assert parse_size("50%") == pytest.approx(memory_bytes() / 2, abs=1)


@pytest.mark.parametrize("text", ["", "GiB", "1.5B", "nan", "inf", "101%", "4 gigabytes"])
def test_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@dataclass(frozen=True)
class Section:
    num_lists: int = 1
    seconds: float = 0.0
    ratio: Annotated[float, Range(0, 1, is_low_open=True)] = 1.0
    name: str = ""


def test_field_without_a_range_takes_whole_numbers_from_1_and_others_from_0() -> None:
    assert ranges_of(Section) == {
        "num_lists": Range(1),
        "seconds": Range(0),
        "ratio": Range(0, 1, is_low_open=True),
    }


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (Section(num_lists=0), "reuse.num_lists=0; it must be at least 1"),
        (Section(ratio=0.0), "reuse.ratio=0.0; it must be above 0 and at most 1"),
        (Section(seconds=float("nan")), "reuse.seconds=nan; it must be at least 0"),
    ],
)
def test_number_out_of_its_range_is_refused_with_the_range(section: Section, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_ranges("reuse", section)
