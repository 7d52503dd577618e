"""Postings damaged while a knowledge base is open: searches stay correct, and the files are repaired."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import VirtualClock
from stillroom.errors import StorageError
from stillroom.retrieval.knowledge_base import KnowledgeBase
from tests.retrieval.conftest import MODES, OpenKb, first_name

QUERY = "rotate the keys"


def overwrite(folder: Path, suffix: str = ".idx") -> None:
    """Fill the segment files of one kind with zeros, in place, as a failing disk might."""
    for path in (folder / "sparse").glob(f"*{suffix}"):
        with path.open("r+b") as stream:
            stream.write(b"\0" * path.stat().st_size)


def flip(folder: Path, suffix: str) -> None:
    """Flip one byte in the middle of the segment files of one kind."""
    for path in (folder / "sparse").glob(f"*{suffix}"):
        with path.open("r+b") as stream:
            stream.seek(path.stat().st_size // 3)
            byte = stream.read(1)
            stream.seek(-1, 1)
            stream.write(bytes([byte[0] ^ 0xFF]))


def damaged_files(kb: KnowledgeBase) -> list[str]:
    return [finding.problem for finding in kb.verify().findings]


@pytest.fixture
def kb(open_kb: OpenKb, three: Path) -> KnowledgeBase:
    found = open_kb()
    found.add([three])
    return found


@pytest.mark.parametrize("suffix", [".idx", ".fast"])
@pytest.mark.parametrize("mode", MODES)
def test_search_over_damaged_postings_returns_the_same_results(
    kb: KnowledgeBase, mode: str, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = kb.search(QUERY, mode=mode).results  # type: ignore[arg-type]
    overwrite(kb.path, suffix)

    assert kb.search(QUERY, mode=mode).results == expected  # type: ignore[arg-type]
    if mode != "dense":
        assert "the postings are damaged and are rebuilt" in caplog.text
        assert kb.verify().findings == ()


def test_unnoticed_damage_is_repaired_within_seconds(kb: KnowledgeBase) -> None:
    expected, clock = kb.search(QUERY, mode="sparse").results, VirtualClock()
    with KnowledgeBase.open(kb.path, StillroomConfig(), clock=clock) as reader:
        reader.search(QUERY, mode="sparse")
        overwrite(kb.path, ".term")  # the dictionary of so few words reads as an empty one
        with KnowledgeBase.open(kb.path, StillroomConfig(), clock=clock) as other:
            assert other.search(QUERY, mode="sparse").results == expected, "opening repairs"
        assert reader.search(QUERY, mode="sparse").results == (), "it reads the old files"
        clock.advance(5.0)
        reader.search(QUERY, mode="sparse")
        assert reader.search(QUERY, mode="sparse").results == expected


def test_damaged_files_are_repaired_while_other_searches_run(kb: KnowledgeBase) -> None:
    kb.search(QUERY, mode="sparse")
    clock = VirtualClock()
    with KnowledgeBase.open(kb.path, StillroomConfig(), clock=clock) as other:
        other.search(QUERY, mode="sparse")
        flip(kb.path, ".store")
        assert damaged_files(kb)
        clock.advance(5.0)
        other.search(QUERY, mode="sparse")

    assert damaged_files(kb) == [], "closing waited for the repair"


def test_candidates_over_damaged_postings_are_unchanged(kb: KnowledgeBase) -> None:
    expected = kb.candidates(QUERY, 3).sparse
    overwrite(kb.path)

    assert kb.candidates(QUERY, 3).sparse == expected


def test_staged_search_over_damaged_postings_ends_with_the_right_result(kb: KnowledgeBase) -> None:
    expected = kb.search(QUERY).results
    overwrite(kb.path)

    assert list(kb.search_staged(QUERY))[-1].results == expected


def test_concurrent_searches_repair_the_damage_once(kb: KnowledgeBase, caplog: pytest.LogCaptureFixture) -> None:
    expected = kb.search(QUERY, mode="sparse").results
    overwrite(kb.path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kb.search(QUERY, mode="sparse").results, range(8)))

    assert found == [expected] * 8
    assert caplog.text.count("are rebuilt") == 1


@pytest.mark.parametrize("suffix", [".idx", ".term", ".fast", ".fieldnorm"])
@pytest.mark.parametrize("damage", [overwrite, flip])
def test_documents_added_over_damaged_postings_are_found(
    kb: KnowledgeBase, three: Path, damage: Callable[[Path, str], None], suffix: str
) -> None:
    kb.search(QUERY)
    damage(kb.path, suffix)
    (three / "dogs.md").write_text("All about dogs.")
    kb.add([three])

    assert first_name(kb.search("dogs", mode="sparse")) == "dogs.md"
    assert first_name(kb.search(QUERY, mode="sparse")) == "keys.md"
    assert kb.verify().findings == ()


@pytest.mark.parametrize("suffix", [".idx", ".term", ".fast", ".fieldnorm"])
def test_flipped_byte_is_found_on_opening(kb: KnowledgeBase, open_kb: OpenKb, suffix: str) -> None:
    expected = kb.search(QUERY, mode="sparse").results
    kb.close()
    flip(kb.path, suffix)
    again = open_kb(create=False)

    assert again.search(QUERY, mode="sparse").results == expected
    assert again.verify().findings == ()


def test_postings_damaged_during_a_foreign_write_are_rebuilt_privately(kb: KnowledgeBase) -> None:
    expected = kb.search(QUERY, mode="sparse").results
    overwrite(kb.path)
    with FileLock(kb.path / "write.lock"):
        assert kb.search(QUERY, mode="sparse").results == expected
    assert kb.search(QUERY, mode="sparse").results == expected
    assert damaged_files(kb), "the files are repaired by the next writer"


def test_full_disk_fails_sparse_search_but_not_dense_search(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = kb.search(QUERY, mode="dense").results
    overwrite(kb.path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("stillroom.retrieval.index.bm25.write_atomically", fail)
        with pytest.raises(StorageError, match="No space left"):
            kb.search(QUERY, mode="sparse")
        assert kb.search(QUERY, mode="dense").results == expected
    assert first_name(kb.search(QUERY, mode="sparse")) == "keys.md"
