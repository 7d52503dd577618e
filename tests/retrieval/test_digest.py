"""Digest: the same corpus, configuration and seed give the same digest and ranking with any threads and batches."""

import dataclasses
import itertools
from pathlib import Path

import faiss
import pytest
import torch

from stillroom.config.settings import IndexConfig, IndexKind, StillroomConfig
from stillroom.retrieval.digest import IndexDigest
from stillroom.retrieval.knowledge_base import KnowledgeBase
from tests.retrieval.conftest import MakeFile, OpenKb

WORDS = ["keys", "rotate", "bread", "oven", "cats", "sleep", "engine", "valve", "river", "delta", "of", "the"]
QUERIES = ["how do I rotate keys", "where do cats sleep", "the river"]
NUM_FILES = 9


def config(kind: IndexKind) -> StillroomConfig:
    return StillroomConfig(index=IndexConfig(kind=kind, m=4, ef_construction=20, seed=5))


@pytest.fixture
def files(make_file: MakeFile) -> list[Path]:
    """Texts of different lengths, some of several chunks' worth."""
    order = itertools.permutations(WORDS, 6)
    texts = [" ".join(itertools.chain.from_iterable(itertools.islice(order, 1 + 3 * at))) for at in range(NUM_FILES)]
    return [make_file(f"{at:02}.txt", text) for at, text in enumerate(texts)]


def rankings(kb: KnowledgeBase) -> list[list[tuple[int, float]]]:
    return [[(int(r.chunk.chunk_id), r.score) for r in kb.search(query, top_k=20).results] for query in QUERIES]


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_threads_and_reopening_do_not_change_the_digest(kind: IndexKind, files: list[Path], open_kb: OpenKb) -> None:
    threads = torch.get_num_threads(), faiss.omp_get_max_threads()
    seen: list[tuple[IndexDigest, list[list[tuple[int, float]]]]] = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            faiss.omp_set_num_threads(count)
            kb = open_kb(config(kind), name=f"kb{count}")
            kb.add(files)
            again = open_kb(config(kind), name=f"kb{count}")
            seen += [(kb.digest(), rankings(kb)), (again.digest(), rankings(again))]
    finally:
        torch.set_num_threads(threads[0])
        faiss.omp_set_num_threads(threads[1])
    assert all(one == seen[0] for one in seen)


def test_adding_at_once_or_in_pieces_gives_the_same_digest(files: list[Path], open_kb: OpenKb) -> None:
    once, pieces = open_kb(name="once"), open_kb(name="pieces")
    once.add(files)
    for part in (files[5:], files[2:3], files[:5]):
        pieces.add(part)
    assert once.digest() == pieces.digest()
    assert rankings(once) == rankings(pieces)


def test_only_the_graph_structure_depends_on_the_pieces(files: list[Path], open_kb: OpenKb) -> None:
    once, pieces = open_kb(config("hnsw"), name="once"), open_kb(config("hnsw"), name="pieces")
    once.add(files)
    pieces.add(files[6:])
    pieces.add(files[:6])
    assert once.digest() != pieces.digest()
    assert dataclasses.replace(once.digest(), dense="") == dataclasses.replace(pieces.digest(), dense="")


def test_everything_that_decides_rankings_changes_the_digest(files: list[Path], open_kb: OpenKb) -> None:
    kb = open_kb()
    kb.add(files)
    before = kb.digest()
    files[0].write_text("keys rotate at night", encoding="utf-8")
    kb.add(files)
    after = kb.digest()
    assert after.value != before.value and after.settings == before.settings
    assert {after.chunks, after.vectors, after.sparse}.isdisjoint({before.chunks, before.vectors, before.sparse})
    other = open_kb(StillroomConfig(index=IndexConfig(kind="hnsw", m=8)), name="other")
    assert (
        other.digest().settings != open_kb(StillroomConfig(index=IndexConfig(kind="hnsw")), name="o2").digest().settings
    )


def test_search_effort_does_not_change_the_digest(files: list[Path], open_kb: OpenKb) -> None:
    kb = open_kb(config("hnsw"))
    kb.add(files)
    harder = StillroomConfig(index=IndexConfig(kind="hnsw", ef_search=500, ann_recall=0.9))
    assert open_kb(harder).digest() == kb.digest()
    assert kb.digest().to_json()["digest"] == kb.digest().value


def test_location_of_lists_does_not_change_the_digest(make_file: MakeFile, docs: Path, open_kb: OpenKb) -> None:
    """`index.hot_bytes` is not in the manifest and changes neither digest nor rankings."""
    order = itertools.permutations(WORDS, 6)
    for at in range(100):
        make_file(f"{at:03}.txt", " ".join(next(order)))
    index = IndexConfig(kind="ivf_pq", nbits=1, nprobe=2, refine=2)  # trains on 78 vectors
    in_ram = StillroomConfig(index=index)
    tiered = StillroomConfig(index=dataclasses.replace(index, hot_bytes=1000))
    kb = open_kb(in_ram)
    kb.add([docs])
    seen = [(kb.digest(), rankings(kb))]
    kb.close()
    other = open_kb(tiered)
    seen.append((other.digest(), rankings(other)))
    figures = other.indexes.list_figures
    assert figures is not None and figures.num_lists == 2 and figures.ram_bytes <= 1000 < figures.list_bytes
    other.close()
    folder = docs.parent / "kb"
    assert (folder / "dense.lists").exists() and not (folder / "dense.npz").exists()
    assert (folder / "list_heat.npz").exists() and "hot_bytes" not in (folder / "manifest.json").read_text()
    unset = open_kb(StillroomConfig())
    seen.append((unset.digest(), rankings(unset)))
    assert unset.indexes.list_figures is None
    assert seen[0] == seen[1] == seen[2]
    lists = folder / "dense.lists"
    content = bytearray(lists.read_bytes())
    middle = len(content) // 2  # among the vectors
    content[middle : middle + 9] = bytes(9)
    lists.write_bytes(content)
    assert open_kb(tiered).digest() == seen[0][0], "damage in a part that was not read yet"
    removed = [str(docs / f"{at:03}.txt") for at in range(0, 40, 3)]
    open_kb(tiered).remove(removed)
    after = [(one.digest(), rankings(one)) for one in (open_kb(tiered), open_kb(in_ram))]
    assert after[0] == after[1] != seen[0]
