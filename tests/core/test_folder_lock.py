"""A lock on a folder is lost when the folder is, and its holder can see that."""

import shutil
from pathlib import Path

import pytest
from filelock import Timeout

from stillroom.core.folder_lock import FolderLock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "kb").mkdir()
    return tmp_path / "kb" / "writer.lock"


def test_only_one_holds_it(path: Path) -> None:
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


def test_a_holder_sees_that_its_folder_was_removed_and_made_again(path: Path) -> None:
    with FolderLock(path) as first:
        shutil.rmtree(path.parent)
        assert not first.is_held
        path.parent.mkdir()
        with FolderLock(path) as second:
            assert (first.is_held, second.is_held) == (False, True)


def test_a_holder_sees_that_the_lock_file_alone_was_replaced(path: Path) -> None:
    with FolderLock(path) as first:
        path.unlink()
        path.touch()
        assert not first.is_held


def test_a_folder_that_is_missing_is_not_made(path: Path) -> None:
    path.parent.rmdir()
    with pytest.raises(FileNotFoundError):
        FolderLock(path).acquire()
    assert not path.parent.exists()
