"""KV of removed documents and tenants is dropped, whatever removed them."""

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.config.settings import ReuseConfig, SpeculationConfig, StillroomConfig
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.kv import NO_TENANT, NodeKey, NodeRecord, OwnerTag, owner_of, salt_of
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import KV_FOLDER, fingerprints, folder_of, read_header, record_paths
from stillroom.kvstore.owners import OwnerNote, note_owner, noted_owners
from stillroom.kvstore.record import Header, checksum_of
from stillroom.rag.kv_sweep import sweep_kv
from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.store.folder import CORPUS
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.kvstore.nodes import MODEL, OTHER_MODEL, key, record
from tests.rag.countries import TEXTS
from tests.retrieval.test_corpus import stored
from tests.server.fakes import until

pytestmark = pytest.mark.microworld

QUESTION = "What is the capital of Ardun ?"
OWN, TENANT = {0, 1, 2, 3}, {10, 11, 12, 13}
"""Numbers of records: a system prompt; after it document a; after it document b; document a after b."""


class KvFolderFixture:
    """A knowledge base with a KV folder, a tenant's knowledge base, and records of both in the folder."""

    def __init__(self, folder: Path) -> None:
        self.own, self.tenant = folder / "own", folder / "tenants" / "a"
        make(self.own)
        self.owner = owner_of(salt_of("a", make(self.tenant)))
        self.root = self.own / KV_FOLDER
        self.folders = []
        for model in (MODEL, OTHER_MODEL):
            with contextlib.closing(DiskStore(self.root, model)) as store:
                self.folders.append(store.folder)
                assert all(
                    store.write(one, bytes(10), checksum_of(bytes(10)))
                    for one in (*prompts(0, NO_TENANT), *prompts(10, self.owner))
                )
        note_owner(self.root, self.owner, OwnerNote("a", self.tenant))

    def kept(self) -> set[int]:
        """Numbers of the records in the folder, which are the same for both models."""
        numbers = {key(n): n for n in range(20)}
        first, second = (
            {numbers[NodeKey(bytes.fromhex(path.stem))] for path in record_paths(folder)} for folder in self.folders
        )
        assert first == second
        return first


def make(folder: Path) -> str:
    """Create a knowledge base with the documents `a` and `b`; returns its identity."""
    folder.mkdir(parents=True)
    with contextlib.closing(SqliteCorpus(folder / CORPUS)) as corpus:
        corpus.commit([stored("a", "one"), stored("b", "two")])
        return corpus.corpus_id


def remove(folder: Path, document: str) -> None:
    with contextlib.closing(SqliteCorpus(folder / CORPUS)) as corpus:
        corpus.remove([DocumentId(document)])


def prompts(n: int, owner: OwnerTag) -> list[NodeRecord]:
    a, b = (stored(name, text).chunks[0].chunk_id for name, text in (("a", "one"), ("b", "two")))
    first = replace(record(n, parent=n), owner=owner)
    behind_b = follower(n + 2, first, b)
    return [first, follower(n + 1, first, a), behind_b, follower(n + 3, behind_b, a)]


def follower(n: int, before: NodeRecord, chunk: ChunkId) -> NodeRecord:
    where = before.first_position + before.num_tokens
    return replace(record(n, first_position=where, chunk=chunk), parent=before.key, owner=before.owner)


@pytest.fixture
def kv(tmp_path: Path) -> KvFolderFixture:
    return KvFolderFixture(tmp_path)


def test_nothing_is_dropped_while_every_document_exists(kv: KvFolderFixture) -> None:
    assert sweep_kv(kv.own).report.num_removed == 0
    assert kv.kept() == OWN | TENANT


def test_records_that_saw_a_removed_document_are_dropped_for_its_owner_only(kv: KvFolderFixture) -> None:
    remove(kv.tenant, "b")
    assert sweep_kv(kv.own).report.num_removed == 4
    assert kv.kept() == OWN | {10, 11}
    remove(kv.own, "a")
    sweep_kv(kv.own)
    assert kv.kept() == {0, 2, 10, 11}


def test_deleted_tenant_folder_drops_its_kv_and_its_note(kv: KvFolderFixture) -> None:
    shutil.rmtree(kv.tenant)
    sweep_kv(kv.own)
    assert kv.kept() == OWN and noted_owners(kv.root) == []


def test_recreated_tenant_folder_drops_the_kv_of_the_old_one(kv: KvFolderFixture) -> None:
    shutil.rmtree(kv.tenant)
    make(kv.tenant)
    sweep_kv(kv.own)
    assert kv.kept() == OWN and noted_owners(kv.root) == []


def test_kv_of_an_owner_without_a_note_is_dropped(kv: KvFolderFixture) -> None:
    shutil.rmtree(kv.root / "owners")
    sweep_kv(kv.own)
    assert kv.kept() == OWN


def test_record_without_its_parent_is_dropped(kv: KvFolderFixture) -> None:
    """Without its parent, the chunks that it has seen are unknown."""
    for folder in kv.folders:
        for path in record_paths(folder):
            if path.stem == key(12).hex():
                path.unlink()
    sweep_kv(kv.own)
    assert kv.kept() == OWN | {10, 11}


def test_kv_of_an_unreadable_knowledge_base_stays(kv: KvFolderFixture, caplog: pytest.LogCaptureFixture) -> None:
    (kv.tenant / CORPUS).write_bytes(b"no database " * 1000)
    for name in os.listdir(kv.tenant):
        if name != CORPUS:
            (kv.tenant / name).unlink()
    sweep_kv(kv.own)
    assert kv.kept() == OWN | TENANT and noted_owners(kv.root) == [kv.owner]
    assert "cannot be read stays on disk" in caplog.text


def test_kv_of_documents_removed_by_the_command_line_is_dropped_at_start_and_while_serving(
    docs: Path, tmp_path: Path
) -> None:
    """The tenant sends no more requests."""
    config = StillroomConfig(reuse=ReuseConfig(load="always"), speculation=SpeculationConfig(mode="off"))
    owners = []
    with Stillroom.open(tmp_path / "own", config=config) as own:
        own.add(docs)
        for name in ("a", "b"):
            with own.for_tenant(tmp_path / name, name) as tenant:
                tenant.add(docs)
                tenant.ask(QUESTION)
                owners.append(owner_of(salt_of(name, tenant._kb.identity)))
        own.ask(QUESTION)
    with Stillroom.open(tmp_path / "a", config=config) as tenant:
        tenant.remove(str(docs / "ardun.txt"))

    with Stillroom.open(tmp_path / "own", config=config) as own:
        own.ask(QUESTION)
        assert 0 < num_records(tmp_path, owners[0]) < num_records(tmp_path, owners[1])

        with Stillroom.open(tmp_path / "b", config=config) as tenant:
            tenant.remove(*(str(docs / f"{name}.txt") for name in TEXTS))
        shutil.rmtree(tmp_path / "a")
        own.ask(QUESTION)
        until(lambda: num_records(tmp_path, owners[0]) == 0)
        until(lambda: num_records(tmp_path, owners[1]) <= 1)  # the system prompt
        assert num_records(tmp_path, NO_TENANT) > 1


def num_records(folder: Path, owner: OwnerTag) -> int:
    root = folder / "own" / KV_FOLDER
    (model,) = fingerprints(root)
    headers = [read_header(path, model) for path in record_paths(folder_of(root, model))]
    return sum(isinstance(header, Header) and header.record.owner == owner for header in headers)
