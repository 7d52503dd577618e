"""Watching folders: every change leads to an update, failures are retried."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Event, Thread

import pytest

from stillroom.errors import UsageError
from stillroom.retrieval.intake.watching import _UpdateSchedule, watch_folders


class FakeUpdate:
    """Counts its calls; returns `answer`."""

    def __init__(self) -> None:
        self.calls: Queue[int] = Queue()
        self.answer = True
        self._count = 0

    def __call__(self) -> bool:
        self._count += 1
        self.calls.put(self._count)
        return self.answer

    def wait(self) -> int:
        return self.calls.get(timeout=30)


@contextlib.contextmanager
def watching(folder: Path, update: FakeUpdate, debounce_ms: int = 50) -> Iterator[None]:
    stop = Event()
    arguments = {"ignored": folder / "kb", "debounce_ms": debounce_ms}
    thread = Thread(target=watch_folders, args=([folder], update, stop), kwargs=arguments)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_update_runs_at_start_and_after_files_are_added_changed_or_removed(tmp_path: Path) -> None:
    (tmp_path / "kb").mkdir()
    (tmp_path / ".git").mkdir()
    update = FakeUpdate()
    with watching(tmp_path, update):
        update.wait()
        for change in (
            lambda: (tmp_path / "a.md").write_text("one"),
            lambda: (tmp_path / "a.md").write_text("two"),
            lambda: (tmp_path / "sub").mkdir(),
            lambda: (tmp_path / "sub" / "b.md").write_text("three"),
            lambda: (tmp_path / ".stillroomignore").write_text("sub/"),
            lambda: (tmp_path / "a.md").unlink(),
        ):
            (tmp_path / "kb" / "corpus.sqlite3").write_text("ignored")
            (tmp_path / ".git" / "index").write_text("ignored")
            change()
            update.wait()


def test_update_waits_until_a_file_is_written(tmp_path: Path) -> None:
    update = FakeUpdate()
    with watching(tmp_path, update, debounce_ms=1500):
        update.wait()
        with (tmp_path / "a.md").open("w") as file:
            for number in range(20):
                file.write(f"line {number}\n")
                file.flush()
                (tmp_path / ".hidden").write_text("ignored")
                time.sleep(0.1)
            assert update.calls.empty()
        update.wait()


def test_folder_that_changes_all_the_time_is_updated_periodically() -> None:
    schedule = _UpdateSchedule(1.0)
    assert schedule.is_due(0.0), "at the beginning"
    schedule.note_update(True, 0.0)
    updated = []
    for step in range(1, 1000):
        schedule.note_change(step * 0.1)
        if schedule.is_due(step * 0.1):
            updated.append(step)
            schedule.note_update(True, step * 0.1)
    assert updated == [301, 602, 903]


def test_pause_doubles_after_failures_and_resets_after_success() -> None:
    schedule, now, waited = _UpdateSchedule(1.0), 0.0, []
    for is_done in (*[False] * 7, True):
        schedule.note_update(is_done, now)
        began = now
        while not is_done and not schedule.is_due(now):
            now += 1.0
        waited.append(now - began)
    assert waited == [1, 2, 4, 8, 16, 32, 32, 0]
    assert not schedule.is_due(now + 1000)
    schedule.note_update(False, now)
    assert schedule.is_due(now + 1)


def test_unmounted_drive_keeps_its_documents(tmp_path: Path) -> None:
    folder, place = tmp_path / "docs", tmp_path / "place"
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no second device")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as drive:
        place.mkdir()
        if Path(drive).stat().st_dev == place.stat().st_dev:
            pytest.skip("there is one device only")
        (Path(drive) / "a.md").write_text("one")
        folder.symlink_to(drive)
        update = FakeUpdate()
        with watching(folder, update):
            update.wait()
            _link(folder, place)
            time.sleep(1.5)
            assert update.calls.empty(), "an empty folder in place of the drive"
            _link(folder, Path(drive))
            update.wait()


def _link(link: Path, to: Path) -> None:
    """Redirect a link."""
    other = link.with_name("other")
    other.symlink_to(to)
    other.rename(link)


def test_failed_update_is_retried(tmp_path: Path) -> None:
    update = FakeUpdate()
    update.answer = False
    with watching(tmp_path, update):
        assert [update.wait() for _ in range(3)] == [1, 2, 3]
        update.answer = True


def test_folder_that_comes_back_is_watched_again(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "docs", tmp_path / "elsewhere"
    folder.mkdir()
    update = FakeUpdate()
    with watching(folder, update):
        update.wait()
        folder.rename(elsewhere)
        (elsewhere / "a.md").write_text("written while away")
        elsewhere.rename(folder)
        update.wait()
        (folder / "b.md").write_text("one")
        update.wait()


@pytest.mark.parametrize("is_link", [False, True])
def test_folder_that_replaces_a_watched_folder_is_watched(tmp_path: Path, is_link: bool) -> None:
    folder, new = tmp_path / "docs", tmp_path / "new"
    new.mkdir()
    if is_link:
        (tmp_path / "old").mkdir()
        folder.symlink_to(tmp_path / "old")
        (tmp_path / "link").symlink_to(new)
    else:
        folder.mkdir()
    update = FakeUpdate()
    with watching(folder, update):
        update.wait()
        if is_link:
            (tmp_path / "link").rename(folder)
        else:
            folder.rename(tmp_path / "old")
            new.rename(folder)
        for name in ("a.md", "b.md", "c.md"):
            update.wait()
            (folder / name).write_text("one")
        update.wait()


def test_watching_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        watch_folders([tmp_path / "a.md"], lambda: True, Event(), ignored=tmp_path / "kb")
