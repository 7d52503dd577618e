"""Document counts of tenants that have sent no request since the server's start."""

from pathlib import Path

import httpx
import pytest

from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.store.closed_corpus import counts_of
from stillroom.retrieval.store.folder import CORPUS
from stillroom.server.auth.tenants import InactiveTenantCounts, Tenants
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving
from tests.server.knowledge import write_knowledge


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    """Tenants of which `legal` has two documents."""
    with Stillroom.open(tmp_path / "tenants" / "legal") as stillroom:
        stillroom.add(write_knowledge(tmp_path / "docs"))
    return Tenants(as_stillroom(FakeStillroom()), tmp_path / "tenants")


def add_one(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.txt").write_text("Dola Kenric bought the ship Perint .", encoding="utf-8")
    with Stillroom.open(tmp_path / "tenants" / name) as stillroom:
        stillroom.add(tmp_path / f"{name}.txt")


def test_metrics_include_inactive_tenants(tenants: Tenants) -> None:
    with serving(tenants.default, tenants=tenants) as url:
        assert "stillroom_documents 2.0" in httpx.get(f"{url}/metrics").text


def test_only_changed_corpora_are_counted_again(
    tenants: Tenants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Path] = []

    def counting(path: Path) -> tuple[int, int]:
        counted.append(path)
        return counts_of(path)

    monkeypatch.setattr("stillroom.server.auth.tenants.counts_of", counting)
    ask = InactiveTenantCounts(tenants)
    legal, sales = str(tmp_path / "tenants" / "legal"), str(tmp_path / "tenants" / "sales")
    assert {name: documents for name, (documents, _) in ask().items()} == {legal: 2}
    add_one(tmp_path, "sales")
    ask()
    assert len(counted) == 2
    add_one(tmp_path, "legal")
    assert {name: documents for name, (documents, _) in ask().items()} == {legal: 3, sales: 1}
    assert len(counted) == 3


def test_damaged_and_foreign_folders_are_left_out(tenants: Tenants, tmp_path: Path) -> None:
    for name, content in (("damaged", b"no database" * 100), ("empty", b"")):
        (tmp_path / "tenants" / name).mkdir()
        (tmp_path / "tenants" / name / CORPUS).write_bytes(content)
    (tmp_path / "tenants" / "folder").mkdir()
    (tmp_path / "tenants" / "file").touch()
    assert len(InactiveTenantCounts(tenants)()) == 1
    assert InactiveTenantCounts(Tenants(tenants.default, tmp_path / "nowhere"))() == {}
    assert InactiveTenantCounts(Tenants(tenants.default))() == {}


def test_active_tenants_are_counted_once(tenants: Tenants, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as stillroom:
        tenants = Tenants(stillroom, tmp_path / "tenants")
        stillroom.metrics.watch_corpora("tenants", InactiveTenantCounts(tenants))
        assert b"stillroom_documents 2.0" in stillroom.metrics.render()
        tenants.stillroom("legal")
        assert InactiveTenantCounts(tenants)() == {}
        assert b"stillroom_documents 2.0" in stillroom.metrics.render()
        tenants.close()
