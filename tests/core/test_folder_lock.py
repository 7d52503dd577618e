"""The holder of a folder lock detects that the folder or the lock file was replaced."""

import shutil
from pathlib import Path

import pytest
from filelock import Timeout

from stillroom.core.folder_lock import FolderLock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "kb").mkdir()
    return tmp_path / "kb" / "writer.lock"


def test_only_one_holder_at_a_time(path: Path) -> None:
    first, second = FolderLock(path), FolderLock(path)
    with first:
        with pytest.raises(Timeout):
            second.acquire()
        assert [first.is_held, second.is_held] == [True, False]
    assert [first.is_held, second.is_held] == [False, False]
    second.acquire()
    assert [first.is_held, second.is_held] == [False, True]
    second.release()
    second.release()


def test_holder_detects_that_its_folder_was_recreated(path: Path) -> None:
    with FolderLock(path) as first:
        shutil.rmtree(path.parent)
        assert not first.is_held
        path.parent.mkdir()
        with FolderLock(path) as second:
            assert (first.is_held, second.is_held) == (False, True)


def test_holder_detects_that_the_lock_file_was_replaced(path: Path) -> None:
    with FolderLock(path) as first:
        path.unlink()
        path.touch()
        assert not first.is_held


def test_missing_folder_is_not_created(path: Path) -> None:
    path.parent.rmdir()
    with pytest.raises(FileNotFoundError):
        FolderLock(path).acquire()
    assert not path.parent.exists()
