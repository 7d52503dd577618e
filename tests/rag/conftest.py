"""Fixtures: a folder of documents."""

from pathlib import Path

import pytest

from tests.rag.countries import TEXTS


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder
