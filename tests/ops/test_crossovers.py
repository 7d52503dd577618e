"""Crossovers: the first processes measure, later ones take the median of what they measured."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom.ops import crossovers

add = crossovers._add  # before conftest.py replaces it


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "crossovers" / "this.json"
    monkeypatch.setattr(crossovers, "_file", lambda: file)
    monkeypatch.setattr(crossovers, "_add", add)
    return file


def drawn(values: list[float]) -> Callable[[], float]:
    left = iter(values)
    return lambda: next(left)


def test_one_wrong_measurement_is_outvoted(file: Path) -> None:
    measure = drawn([0.5, 0.6, 9.0, 0.55, 0.58])
    assert [crossovers.remembered("a", measure) for _ in range(5)] == [0.5, 0.5, 0.6, 0.55, 0.58]
    assert crossovers.remembered("a", drawn([])) == 0.58  # nothing is measured any more
    assert json.loads(file.read_text())["measured"] == {"a": [0.5, 0.6, 9.0, 0.55, 0.58]}


def test_names_are_apart_and_can_be_forgotten(file: Path) -> None:
    assert crossovers.remembered("a", drawn([1.0])) == 1.0
    assert crossovers.remembered("b", drawn([2.0])) == 2.0
    crossovers.forget()
    assert not file.exists()
    crossovers.forget()
    assert crossovers.remembered("a", drawn([3.0])) == 3.0


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"measured": {"a": 1}}', b'{"measured": {"a": ["x"]}}'])
def test_a_damaged_file_is_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    assert crossovers.remembered("a", drawn([1.0])) == 1.0
    assert json.loads(file.read_text())["measured"] == {"a": [1.0]}


def test_a_folder_that_cannot_be_written_does_not_matter(file: Path) -> None:
    file.parent.write_text("a file where the folder should be")
    assert crossovers.remembered("a", drawn([1.0])) == 1.0
    assert crossovers.remembered("a", drawn([2.0])) == 2.0
    crossovers.forget()


def test_the_file_is_of_this_processor_and_these_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = crossovers._file()
    crossovers._file.cache_clear()
    monkeypatch.setattr("torch.__version__", "0.0")
    assert crossovers._file() != before
    crossovers._file.cache_clear()
