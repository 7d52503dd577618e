"""Tests that a folder is replaced atomically."""

from pathlib import Path

import pytest

from training.folders import replaced


@pytest.mark.parametrize("interrupted", [1, 2])
def test_interrupted_replacement_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    folder, rename = tmp_path / "data", Path.rename
    folder.mkdir()
    (folder / "old").touch()
    calls: list[Path] = []

    def rename_unless_interrupted(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == interrupted:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_unless_interrupted)
    with pytest.raises(KeyboardInterrupt), replaced(folder) as new:
        (new / "new").touch()

    assert [path.name for path in folder.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [folder]
