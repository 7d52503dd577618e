"""Two tenants with equal documents and questions, with real keys and the bundled model."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillroom.config.settings import ReuseConfig, SpeculationConfig, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import Tenants
from tests import folders
from tests.server.fakes import until
from tests.server.harness import serving
from tests.server.knowledge import ANSWER, PEOPLE, QUESTION
from tests.server.test_keys import add, bearer

pytestmark = pytest.mark.microworld

ASKED = {"messages": [{"role": "user", "content": QUESTION}]}


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    """One client per tenant."""
    folder = tmp_path_factory.mktemp("tenants")
    path = folder / "keys.json"
    keys = {tenant: add(path, f"key-of-{tenant}", tenant) for tenant in ("legal", "sales")}
    config = StillroomConfig(reuse=ReuseConfig(load="always"), speculation=SpeculationConfig(mode="off"))
    with Stillroom.open(folder / "kb", config=config) as stillroom:
        tenants = Tenants(stillroom, folder / "tenants")
        with serving(stillroom, tenants=tenants, keys=KeyRing(path)) as url:
            made = {
                tenant: httpx.Client(base_url=url, headers=bearer(key), timeout=120) for tenant, key in keys.items()
            }
            yield made
            for client in made.values():
                client.close()
        tenants.close()


def test_tenants_share_no_documents_answers_or_kv(clients: dict[str, httpx.Client]) -> None:
    legal, sales = clients["legal"], clients["sales"]
    document = {"documents": [{"name": "people.md", "text": PEOPLE}]}

    assert legal.post("/v1/documents", json=document).status_code == 200
    first, again = (legal.post("/v1/chat/completions", json=ASKED).json() for _ in range(2))
    assert first["choices"][0]["message"]["content"] == ANSWER
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "KV must be reused within a tenant"

    assert sales.get("/v1/documents").json()["data"] == []
    assert sales.post("/v1/chat/completions", json=ASKED).json()["error"]["code"] == "knowledge_base_empty"
    assert sales.get("/v1/requests").json() == []
    for one in legal.get("/v1/documents").json()["data"]:
        assert sales.get(f"/v1/documents/{one['name']}").status_code == 404
        assert sales.delete(f"/v1/documents/{one['name']}").status_code == 404
    assert sales.get(f"/v1/requests/{first['stillroom']['request_id']}").status_code == 404

    assert sales.post("/v1/documents", json=document).status_code == 200
    same = sales.post("/v1/chat/completions", json=ASKED).json()
    assert same["choices"] == first["choices"]
    assert same["usage"] == first["usage"], "no token may come from the cache"
    assert same["stillroom"]["reuse"]["segments"] == [
        one | {"chunk_id": other["chunk_id"]}
        for one, other in zip(
            first["stillroom"]["reuse"]["segments"], same["stillroom"]["reuse"]["segments"], strict=True
        )
    ]
    [trace] = sales.get("/v1/requests").json()
    assert trace["request_id"] == same["stillroom"]["request_id"]
    assert len(legal.get("/v1/requests").json()) == 2
    for tenant in clients.values():
        assert tenant.get("/metrics").status_code == 403


def test_raw_prompts_share_no_kv_between_tenants(clients: dict[str, httpx.Client]) -> None:
    prompt = {"prompt": " ".join([QUESTION] * 30), "max_tokens": 1}

    def cached(tenant: str) -> int:
        reply = clients[tenant].post("/v1/completions", json=prompt).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("legal") == 0 < cached("legal")
    assert cached("sales") == 0 < cached("sales")


def test_deleted_tenant_folder_is_replaced_by_an_empty_one(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as own:
        tenants = Tenants(own, tmp_path / "tenants")
        old = tenants.stillroom("legal")
        old.upload([("a.md", io.BytesIO(PEOPLE.encode()))])
        assert tenants.is_open("legal") and tenants.stillroom("legal") is old
        folders.remove(tmp_path / "tenants" / "legal")
        assert not tenants.is_open("legal")
        new = tenants.stillroom("legal")
        assert new is not old and new.num_documents == 0 and tenants.stillroom("legal") is new
        tenants.close()
        folders.remove(tmp_path / "kb")
        assert not own.is_there and not own.is_ready


def test_tenant_continues_without_old_data_after_its_folder_was_deleted(tmp_path: Path) -> None:
    """The tenant has uploaded before, and its own request is the first to notice."""
    path = tmp_path / "keys.json"
    key = add(path, "key-of-legal", "legal")
    document = {"documents": [{"name": "people.md", "text": PEOPLE}]}
    config = StillroomConfig(reuse=ReuseConfig(load="always"), speculation=SpeculationConfig(mode="off"))
    with Stillroom.open(tmp_path / "kb", config=config) as own:
        tenants = Tenants(own, tmp_path / "tenants")
        with (
            serving(own, tenants=tenants, keys=KeyRing(path)) as url,
            httpx.Client(base_url=url, headers=bearer(key), timeout=120) as client,
        ):
            assert client.post("/v1/documents", json=document).status_code == 200
            assert client.post("/v1/chat/completions", json=ASKED).status_code == 200
            backend: Any = own._loader.backend
            assert {node.owner for node in backend.cache.tree}
            folders.remove(tmp_path / "tenants" / "legal")
            assert client.get("/v1/documents").json()["data"] == []
            until(lambda: not len(backend.cache.tree))
            assert client.post("/v1/documents", json=document).status_code == 200
            assert client.post("/v1/chat/completions", json=ASKED).json()["choices"][0]["message"]["content"] == ANSWER
        tenants.close()


def test_client_changes_precede_the_completion_of_interrupted_uploads(tmp_path: Path) -> None:
    """The completion would never end; it is cancelled, and starts again afterwards."""
    begun: list[Cancellation] = []

    def complete(stop: Cancellation) -> int:
        begun.append(stop)
        until(lambda: stop.is_cancelled or len(begun) > 1)
        stop.check()
        return 0

    with Stillroom.open(tmp_path / "kb") as own:
        own.complete_uploads = complete  # type: ignore[method-assign, assignment]
        with serving(own) as url, httpx.Client(base_url=url, timeout=60) as client:
            until(lambda: len(begun) == 1)
            reply = client.post("/v1/documents", json={"documents": [{"name": "a.md", "text": "A vault."}]})
            assert reply.status_code == 200 and begun[0].is_cancelled
            until(lambda: len(begun) == 2)
