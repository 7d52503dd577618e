"""Folders that are followed: every change is told, and it goes on after a failure."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Event, Thread

import pytest

from stillroom.errors import UsageError
from stillroom.retrieval.intake.watching import _FollowTimes, keep_in_step


class Follower:
    """Counts how often it is told; answers as it is set to."""

    def __init__(self) -> None:
        self.told: Queue[int] = Queue()
        self.answer = True
        self._count = 0

    def __call__(self) -> bool:
        self._count += 1
        self.told.put(self._count)
        return self.answer

    def wait(self) -> int:
        return self.told.get(timeout=30)


@contextlib.contextmanager
def watching(folder: Path, follower: Follower, debounce_ms: int = 50) -> Iterator[None]:
    stop = Event()
    arguments = {"apart_from": folder / "kb", "debounce_ms": debounce_ms}
    thread = Thread(target=keep_in_step, args=([folder], follower, stop), kwargs=arguments)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_it_is_told_at_the_beginning_and_of_files_that_come_change_and_go(tmp_path: Path) -> None:
    (tmp_path / "kb").mkdir()
    (tmp_path / ".git").mkdir()
    follower = Follower()
    with watching(tmp_path, follower):
        follower.wait()
        for change in (
            lambda: (tmp_path / "a.md").write_text("one"),
            lambda: (tmp_path / "a.md").write_text("two"),
            lambda: (tmp_path / "sub").mkdir(),
            lambda: (tmp_path / "sub" / "b.md").write_text("three"),
            lambda: (tmp_path / ".stillroomignore").write_text("sub/"),
            lambda: (tmp_path / "a.md").unlink(),
        ):
            (tmp_path / "kb" / "corpus.sqlite3").write_text("does not count")
            (tmp_path / ".git" / "index").write_text("does not count")
            change()
            follower.wait()


def test_a_file_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    follower = Follower()
    with watching(tmp_path, follower, debounce_ms=1500):
        follower.wait()
        with (tmp_path / "a.md").open("w") as file:
            for number in range(20):
                file.write(f"line {number}\n")
                file.flush()
                (tmp_path / ".hidden").write_text("does not count")
                time.sleep(0.1)
            assert follower.told.empty()
        follower.wait()


def test_a_folder_that_never_rests_is_followed_all_the_same() -> None:
    pace = _FollowTimes(1.0)
    assert pace.is_due(0.0), "at the beginning"
    pace.followed(True, 0.0)
    followed = []
    for step in range(1, 1000):
        pace.changed(step * 0.1)
        if pace.is_due(step * 0.1):
            followed.append(step)
            pace.followed(True, step * 0.1)
    assert followed == [301, 602, 903]


def test_after_failures_it_waits_longer_each_time_and_not_after_success() -> None:
    pace, now, waited = _FollowTimes(1.0), 0.0, []
    for is_done in (*[False] * 7, True):
        pace.followed(is_done, now)
        began = now
        while not is_done and not pace.is_due(now):
            now += 1.0
        waited.append(now - began)
    assert waited == [1, 2, 4, 8, 16, 32, 32, 0]
    assert not pace.is_due(now + 1000)
    pace.followed(False, now)
    assert pace.is_due(now + 1)


def test_a_drive_that_was_taken_out_keeps_its_documents(tmp_path: Path) -> None:
    folder, place = tmp_path / "docs", tmp_path / "place"
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no second device")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as drive:
        place.mkdir()
        if Path(drive).stat().st_dev == place.stat().st_dev:
            pytest.skip("there is one device only")
        (Path(drive) / "a.md").write_text("one")
        folder.symlink_to(drive)
        follower = Follower()
        with watching(folder, follower):
            follower.wait()
            _link(folder, place)
            time.sleep(1.5)
            assert follower.told.empty(), "an empty folder stands where the drive was"
            _link(folder, Path(drive))
            follower.wait()


def _link(link: Path, to: Path) -> None:
    """A link leads elsewhere from now on."""
    other = link.with_name("other")
    other.symlink_to(to)
    other.rename(link)


def test_it_is_told_again_where_it_could_not_follow(tmp_path: Path) -> None:
    follower = Follower()
    follower.answer = False
    with watching(tmp_path, follower):
        assert [follower.wait() for _ in range(3)] == [1, 2, 3]
        follower.answer = True


def test_a_folder_that_is_gone_for_a_while_is_followed_again(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "docs", tmp_path / "elsewhere"
    folder.mkdir()
    follower = Follower()
    with watching(folder, follower):
        follower.wait()
        folder.rename(elsewhere)
        (elsewhere / "a.md").write_text("written while away")
        elsewhere.rename(folder)
        follower.wait()
        (folder / "b.md").write_text("one")
        follower.wait()


@pytest.mark.parametrize("is_link", [False, True])
def test_another_folder_that_takes_the_name_is_followed(tmp_path: Path, is_link: bool) -> None:
    folder, new = tmp_path / "docs", tmp_path / "new"
    new.mkdir()
    if is_link:
        (tmp_path / "old").mkdir()
        folder.symlink_to(tmp_path / "old")
        (tmp_path / "link").symlink_to(new)
    else:
        folder.mkdir()
    follower = Follower()
    with watching(folder, follower):
        follower.wait()
        if is_link:
            (tmp_path / "link").rename(folder)
        else:
            folder.rename(tmp_path / "old")
            new.rename(folder)
        for name in ("a.md", "b.md", "c.md"):
            follower.wait()
            (folder / name).write_text("one")
        follower.wait()


def test_only_folders_can_be_watched(tmp_path: Path) -> None:
    (tmp_path / "a.md").touch()
    with pytest.raises(UsageError, match="is no folder"):
        keep_in_step([tmp_path / "a.md"], lambda: True, Event(), apart_from=tmp_path / "kb")
