"""Files of documents are readable by their owner only, or by a group that the operator allowed."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillroom.core.private_files import close_files, close_to_others, create_file, make_folder, open_file


@pytest.fixture(autouse=True, params=[0o022, 0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_new_files_and_folders_belong_to_the_owner_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_folder(tmp_path / "a" / "b")
    create_file(tmp_path / "a" / "empty")
    with open_file(tmp_path / "a" / "b" / "file") as file:
        file.write(b"text")
    assert [mode(tmp_path / name) for name in ("a", "a/b")] == [0o700, 0o700]
    assert [mode(tmp_path / name) for name in ("a/empty", "a/b/file")] == [0o600, 0o600]


@pytest.mark.parametrize(("given", "folder", "file"), [(0o750, 0o750, 0o640), (0o770, 0o770, 0o660)])
def test_new_files_get_the_group_rights_of_their_folder(tmp_path: Path, given: int, folder: int, file: int) -> None:
    tmp_path.chmod(given)
    make_folder(tmp_path / "a" / "b")
    create_file(tmp_path / "a" / "b" / "file")
    (tmp_path / "a" / "foreign").touch()
    (tmp_path / "a" / "foreign").chmod(0o644)
    close_files(tmp_path / "a")
    assert [mode(tmp_path / name) for name in ("a", "a/b")] == [folder, folder]
    assert [mode(tmp_path / name) for name in ("a/foreign", "a/b/file")] == [file, file]


def test_folder_readable_by_others_is_closed_with_its_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, outside = tmp_path / "kb", tmp_path / "outside"
    (folder / "uploads").mkdir(parents=True)
    for path in (outside, folder / "corpus", folder / "uploads" / "file"):
        path.touch()
        path.chmod(0o644)
    (folder / "link").symlink_to(outside)
    for path in (folder, folder / "uploads"):
        path.chmod(0o2755)
    close_to_others(folder)
    assert [mode(folder), mode(folder / "uploads")] == [0o2700, 0o2700]
    assert [mode(folder / "corpus"), mode(folder / "uploads" / "file"), mode(outside)] == [0o600, 0o600, 0o644]
    assert "was readable by other users" in caplog.text and "chmod -R g+rX" in caplog.text
    caplog.clear()
    close_to_others(folder)
    assert not caplog.records


def test_folder_open_to_its_group_keeps_its_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o644)
    tmp_path.chmod(0o750)
    close_to_others(tmp_path)
    assert mode(tmp_path) == 0o750 and mode(tmp_path / "file") == 0o644 and not caplog.records


def test_missing_folder_is_ignored(tmp_path: Path) -> None:
    close_to_others(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
