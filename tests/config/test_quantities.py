"""Sizes and durations as people write them."""

import pytest

from stillroom.config.quantities import memory_bytes, parse_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300ms", 0.3), ("1.5s", 1.5), (" 500 us ", 5e-4), ("2min", 120.0), ("1h", 3600.0), (".5s", 0.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "300", "ms", "-1s", "0s", "1.2.3s", "1 day", "1e3s", "nan s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("512 MiB", 2**29), ("1.5KiB", 1536), ("2GB", 2 * 10**9), ("77", 77)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_share_of_memory() -> None:
    assert parse_size("50%") == pytest.approx(memory_bytes() / 2, abs=1)


@pytest.mark.parametrize("text", ["", "GiB", "1.5B", "nan", "inf", "101%", "4 gigabytes"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)
