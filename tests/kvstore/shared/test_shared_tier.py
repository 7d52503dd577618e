"""The shared tier on a folder and on a real server: records come back as they were written, or not at all."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NO_TENANT, NodeRecord, OwnerTag
from stillroom.errors import ConfigError
from stillroom.kvstore.files import folder_of, path_of
from stillroom.kvstore.record import Defect
from stillroom.kvstore.shared import folder_records
from stillroom.kvstore.shared.records import namespace
from stillroom.kvstore.shared.signing import Signer
from tests.fakes import ManualClock
from tests.kvstore.nodes import MODEL, OTHER_MODEL, key
from tests.kvstore.shared.redis_server import RedisServer, needs_server, redis_server
from tests.kvstore.shared.tier_fixture import SIZE, TierFixture, opened
from tests.server.fakes import until

OTHER = OwnerTag(b"tenant-a")


class Place:
    """Where the records are; tests damage them here."""

    def __init__(self, folder: Path, server: RedisServer | None) -> None:
        self._folder, self._server = folder, server
        self.url = f"file://{folder}" if server is None else server.url

    def read(self, n: int, group: str = "") -> bytes | None:
        if self._server is not None:
            found = self._server.call("GET", self._name(n, group))
            return bytes(found) if isinstance(found, bytearray) else None
        path = self._path(n, group)
        return path.read_bytes() if path.exists() else None

    def write(self, n: int, content: bytes, group: str = "") -> None:
        if self._server is not None:
            self._server.call("SET", self._name(n, group), content)
        else:
            self._path(n, group).parent.mkdir(parents=True, exist_ok=True)
            self._path(n, group).write_bytes(content)

    def _name(self, n: int, group: str) -> str:
        return f"stillroom:{namespace(group)}:kv:{MODEL.hex()[:32]}:{key(n).hex()}"

    def _path(self, n: int, group: str) -> Path:
        return path_of(folder_of(self._folder / namespace(group), MODEL), key(n))


@pytest.fixture(params=["folder", pytest.param("server", marks=needs_server)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "tier"
    folder.mkdir()
    if request.param == "folder":
        yield Place(folder, None)
        return
    with redis_server(tmp_path) as server:
        yield Place(folder, server)


def test_records_come_back_in_another_process(place: Place) -> None:
    with opened(place.url) as one, opened(place.url) as other:
        assert one.put(1, 10) and one.put(2, 10, 20)
        assert other.count([(1, 10), (2, 20), (3, 30), (1, 10)]) == 2
        assert other.get(1) is not None and other.get(2) is not None and other.get(3) is None
        assert one.put(1, 10) and one.tier.state.stats.num_present == 1, "a record is written once"
        state = other.tier.state
        assert (state.stats.num_read, state.stats.num_missing, state.stats.num_found) == (2, 1, 2)
        assert state.link is not None and state.is_usable


def test_models_and_keys_never_meet(place: Place) -> None:
    with (
        opened(place.url) as plain,
        opened(place.url, model=OTHER_MODEL) as model,
        opened(place.url, secret="one") as one,
        opened(place.url, secret="two") as two,
    ):
        for fixture in (plain, one):
            fixture.put(1, 10)
        assert [fixture.count([(1, 10)]) for fixture in (plain, model, one, two)] == [1, 0, 1, 0]


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], Defect]] = {
    "bit": (flip, Defect.CHECKSUM),
    "header": (lambda content: content[:150] + b"x" + content[151:], Defect.CHECKSUM),
    "cut": (lambda content: content[:-1], Defect.SIZE),
    "longer": (lambda content: content + b"x", Defect.SIZE),
    "garbage": (lambda content: b"garbage", Defect.MAGIC),
    "empty": (lambda content: b"", Defect.MAGIC),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_record_is_a_miss_and_is_removed(place: Place, damage: str) -> None:
    change, defect = DAMAGES[damage]
    with opened(place.url) as fixture:
        fixture.put(1, 10)
        content = place.read(1)
        assert content is not None
        place.write(1, change(content))
        assert fixture.get(1) is None
        assert fixture.tier.state.defects == {defect: 1}
        assert place.read(1) is None
        fixture.put(1, 10)
        assert place.read(1) == content and fixture.get(1) is not None


def test_record_of_another_node_or_size_is_a_miss(place: Place) -> None:
    with opened(place.url) as fixture:
        fixture.put(1, 10)
        place.write(2, place.read(1) or b"")
        assert fixture.get(2) is None and fixture.get(1, SIZE - 8) is None
        assert fixture.tier.state.defects == {Defect.IDENTITY: 1, Defect.SIZE: 1}


def test_forged_record_is_refused_with_a_key(place: Place) -> None:
    """Everyone can compute the checksums of a record; only the processes with the key can sign it."""
    group = Signer("secret", MODEL).group
    with opened(place.url) as attacker, opened(place.url, secret="secret") as fixture:
        attacker.put(1, 10)
        fixture.put(2, 10)
        forged, signed = place.read(1), place.read(2, group)
        assert forged is not None and signed is not None
        for content in (forged, forged + bytes(32), forged[:-32], signed, b""):
            place.write(1, content, group)
            assert fixture.get(1) is None
        assert fixture.tier.state.defects == {Defect.SIGNATURE: 5}
        place.write(2, flip(signed), group)
        assert fixture.get(2) is None
        place.write(2, signed, group)
        assert fixture.get(2) is not None


def test_removed_chunk_takes_all_that_has_seen_it_of_its_owner_only(place: Place) -> None:
    """Whichever process and model stored it."""
    with opened(place.url) as one, opened(place.url, model=OTHER_MODEL) as other, opened(place.url) as remover:
        for fixture in (one, other):
            fixture.put(1)
            fixture.put(2, 10)
            fixture.put(3, 10, 20)
            fixture.put(4, 20)
        one.put(5, 10, owner=OTHER)
        remover.tier.forget(NO_TENANT, [ChunkId(10)])
        assert remover.tier.settle()
        assert remover.tier.state.stats.num_forgotten == 4 and remover.tier.state.num_to_forget == 0
        for fixture in (one, other):
            assert [fixture.count([(n, None)]) for n in (1, 2, 3, 4)] == [1, 0, 0, 1]
        assert one.count([(5, 10)], OTHER) == 1
        one.put(2, 10)
        assert one.count([(2, 10)]) == 1, "a document that is added again is shared again"


def test_removed_owner_leaves_nothing(place: Place) -> None:
    with opened(place.url) as fixture:
        fixture.put(1, owner=OTHER)
        fixture.put(2, 10, owner=OTHER)
        fixture.put(3, 10)
        fixture.tier.forget(OTHER, None)
        assert fixture.tier.settle() and fixture.tier.state.num_to_forget == 0
        assert [fixture.count([(n, None)]) for n in (1, 2, 3)] == [0, 0, 1]


def test_full_queue_drops_records(place: Place) -> None:
    with opened(place.url) as fixture:
        big = fixture.tier.options.queue_bytes + 1
        assert not fixture.tier.write(fixture.record(1, 10), big, lambda: None)
        assert fixture.tier.state.stats.num_dropped == 1


def test_oldest_records_leave_a_full_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    size = 8192  # two blocks: header and payload
    with opened(folder, kv_tier_bytes=4 * size) as fixture:
        for n in range(12):
            fixture.put(n, n)
            path = path_of(folder_of(folder / namespace(""), MODEL), key(n))
            if path.exists():
                os.utime(path, (n + 1, n + 1))
        fixture.put(12, 12)
    kept = {path.stem for path in folder.rglob("*.kv")}
    assert {key(n).hex() for n in (10, 11)} <= kept and len(kept) <= 4
    assert not list(folder.rglob("*.tmp"))


def test_missing_folder_is_not_made_and_is_used_once_it_is_there(tmp_path: Path) -> None:
    folder, clock = tmp_path / "not-mounted", ManualClock()
    with opened(folder, clock) as fixture:
        assert not fixture.tier.is_usable and fixture.count([(1, 10)]) is None and not fixture.put(1, 10)
        assert not folder.exists()
        folder.mkdir()
        clock.advance(60.0)
        until(lambda: fixture.tier.is_usable)
        assert fixture.put(1, 10) and fixture.get(1) is not None


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("tier").write_text("no folder")
    with pytest.raises(ConfigError, match="is a file; name a folder"), opened(tmp_path / "tier"):
        pass


def test_removal_waits_for_a_tier_that_is_away(tmp_path: Path) -> None:
    folder, away, clock = tmp_path / "tier", tmp_path / "away", ManualClock()
    folder.mkdir()
    with opened(folder, clock) as fixture:
        fixture.put(1, 10)
        folder.rename(away)
        fixture.tier.forget(NO_TENANT, [ChunkId(10)])
        until(lambda: not fixture.tier.is_usable)
        assert fixture.tier.state.num_to_forget == 1
        away.rename(folder)
        clock.advance(60.0)
        until(lambda: fixture.tier.state.num_to_forget == 0 and fixture.tier.is_usable)
        assert fixture.count([(1, 10)]) == 0


def test_removed_chunk_is_neither_looked_up_nor_written_until_it_is_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    with opened(folder) as fixture:
        fixture.put(1, 10)
        fixture.put(2, 10, 20)
        blocked = _Blocked(fixture)
        fixture.tier.forget(NO_TENANT, [ChunkId(20)])
        until(lambda: blocked.is_reached)
        assert fixture.tier.look_up(NO_TENANT, [(key(2), ChunkId(20))]) is None
        lookup = fixture.tier.look_up(NO_TENANT, [(key(1), ChunkId(10)), (key(2), ChunkId(20))])
        until(lambda: lookup is not None and lookup.num_found == 1)
        assert fixture.put(3, 20, settles=False), "it is queued, and dropped when its turn comes"
        blocked.go_on()
        assert fixture.tier.settle()
        assert [fixture.count([(n, None)]) for n in (1, 2)] == [1, 0]


class _Blocked:
    """Stops the writing thread in the middle of a removal."""

    def __init__(self, fixture: TierFixture) -> None:
        self._reached, self._gate = threading.Event(), threading.Event()
        records = fixture.tier._records
        forget = records.forget

        def wait(owner: OwnerTag, chunk_ids: object) -> int:
            self._reached.set()
            assert self._gate.wait(20.0)
            return forget(owner, chunk_ids)  # type: ignore[arg-type]

        records.forget = wait  # type: ignore[method-assign]

    @property
    def is_reached(self) -> bool:
        return self._reached.is_set()

    def go_on(self) -> None:
        self._gate.set()


def test_record_that_is_gone_from_the_disk_is_not_written(tmp_path: Path) -> None:
    tmp_path.joinpath("tier").mkdir()
    with opened(tmp_path / "tier") as fixture:
        made: NodeRecord = fixture.record(1, 10)
        assert fixture.tier.write(made, 0, lambda: None)
        assert fixture.tier.settle() and fixture.tier.state.stats.num_dropped == 1


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.ENOSPC, "kv_tier_bytes"),
        (errno.EDQUOT, "kv_tier_bytes"),
        (errno.EROFS, "let this process write"),
        (errno.EACCES, "let this process write"),
    ],
)
def test_full_or_read_only_folder_refuses_records_and_is_read_and_deleted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int, remedy: str
) -> None:
    tmp_path.joinpath("tier").mkdir()
    with opened(tmp_path / "tier") as before:
        before.put(1, 10)
        before.put(2, 20)

    def full(path: Path, parts: object) -> None:
        raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(folder_records, "write_file", full)
    clock = ManualClock()
    with opened(tmp_path / "tier", clock) as fixture:
        for n in range(3, 9):
            fixture.put(n, n)
        clock.advance(60.0)  # a probe is due
        fixture.tier.forget(NO_TENANT, [ChunkId(10)])
        assert fixture.get(2) is not None and fixture.count([(1, 10)]) == 0
        state = fixture.tier.state
        assert state.is_usable and (state.num_opened, state.stats.num_failures) == (0, 0)
        assert (state.stats.num_refused, state.stats.num_forgotten) == (6, 1)
        assert state.link is not None and state.link.bytes_per_second < 2e12
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "takes no more KV" in message and remedy in message and str(tmp_path) in message


def test_removal_needs_no_probe_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that fails in every other way still loses the records of removed documents."""
    tmp_path.joinpath("tier").mkdir()
    with opened(tmp_path / "tier") as before:
        before.put(1, 10)

    def broken(path: Path, parts: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(folder_records, "write_file", broken)
    clock = ManualClock()
    with opened(tmp_path / "tier", clock) as fixture:
        assert not fixture.tier.is_usable
        fixture.tier.forget(NO_TENANT, [ChunkId(10)])
        clock.advance(60.0)
        until(lambda: fixture.tier.state.num_to_forget == 0)
        assert not fixture.tier.is_usable and not list(tmp_path.rglob("*.kv"))


def test_record_that_cannot_be_deleted_keeps_its_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that is mounted read-only for a while."""
    tmp_path.joinpath("tier").mkdir()
    with opened(tmp_path / "tier", clock := ManualClock()) as fixture:
        fixture.put(1, 10)
        assert list(tmp_path.rglob(f"{fixture.record(1, 10).key.hex()}*"))
        with monkeypatch.context() as patch:

            def read_only(path: Path) -> None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

            patch.setattr(os, "unlink", read_only)
            fixture.tier.forget(NO_TENANT, [ChunkId(10)])
            until(lambda: not fixture.tier.is_usable)
            assert fixture.tier.state.num_to_forget == 1
        clock.advance(60.0)
        until(lambda: fixture.tier.state.num_to_forget == 0)
        # a record that the tier was measured with meanwhile may be left, to be swept by its age
        assert not list(tmp_path.rglob(f"{fixture.record(1, 10).key.hex()}*"))


def test_log_says_when_the_tier_is_used_and_each_reason_why_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder, clock = tmp_path / "tier", ManualClock()
    folder.mkdir()
    with opened(folder, clock) as fixture:
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "is used; it replies in" in caplog.text and "MiB/s" in caplog.text
        for _ in range(2):
            caplog.clear()
            folder.rename(tmp_path / "away")
            for _ in range(3):
                fixture.count([(1, 10)])
            clock.advance(60.0)
            until(lambda: clock.monotonic() < fixture.tier._calls._breaker._probe_at)  # the same reason again
            folder.write_text("no folder")
            clock.advance(60.0)
            until(lambda: "Not a directory" in caplog.text)
            folder.unlink()
            (tmp_path / "away").rename(folder)
            clock.advance(60.0)
            until(lambda: fixture.tier.is_usable)
            parts = ["failed in one call: No such file", "cannot be used", "cannot be used", "can be used again"]
            messages = [record.getMessage() for record in caplog.records]
            assert len(messages) == 4
            assert all(part in message for part, message in zip(parts, messages, strict=True))
