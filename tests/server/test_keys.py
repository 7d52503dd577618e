"""API keys: the file, changes while the server runs, and authentication."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from stillroom.config.settings import ServerConfig, StillroomConfig
from stillroom.errors import ConfigError, CorruptKnowledgeBaseError
from stillroom.server.auth.cors import origins_of
from stillroom.server.auth.guard import check_access
from stillroom.server.auth.key_ring import KeyRing, edit_keys, load_keys, new_key
from stillroom.server.auth.tenants import Tenants
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import QUESTION, serving


def add(path: Path, name: str, tenant: str = "default", **options: object) -> str:
    key, row = new_key(name, tenant, **options)
    with edit_keys(path) as rows:
        rows[name] = row
    return key


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class MultiTenantFake(FakeStillroom):
    """A fake Stillroom that makes one for each tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Path] = {}

    def for_tenant(self, path: Path, tenant: str, *, create: bool = True) -> FakeStillroom:
        self.made[tenant] = path
        return FakeStillroom({f"{tenant}.md": f"of {tenant}"})


@contextmanager
def guarded(path: Path, stillroom: FakeStillroom) -> Iterator[httpx.Client]:
    tenants = Tenants(as_stillroom(stillroom), path.parent / "tenants")
    with (
        serving(as_stillroom(stillroom), tenants=tenants, keys=KeyRing(path)) as url,
        httpx.Client(base_url=url) as client,
    ):
        yield client


def test_keys_file_holds_no_key_and_has_mode_600(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add(path, "anna")

    assert key.startswith("sk-stillroom-") and len(key) > 50
    assert key not in path.read_text() and key.removeprefix("sk-stillroom-") not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key != add(path, "ben") and [row.name for row in load_keys(path)] == ["anna", "ben"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "keys": []}',
        '{"version": 1, "keys": [{"name": "anna"}]}',
        '{"version": 1, "keys": 7}',
        "[" * 200_000,
        '{"version": 1, "keys": [{"name": "../x", "tenant": "default", "sha256": "' + "0" * 64 + '", "created": ""}]}',
        '{"version": 1, "keys": [{"name": "x", "tenant": "a/b", "sha256": "' + "0" * 64 + '", "created": ""}]}',
        '{"version": 1, "keys": [{"name": "x", "tenant": "a", "sha256": "00", "created": ""}]}',
    ],
)
def test_damaged_keys_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        KeyRing(path)


def test_keys_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "anna")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing(path)


def test_changed_keys_file_is_read_again_and_a_bad_one_refuses_every_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add(path, "anna")
    ring = KeyRing(path)
    late = add(path, "late")
    assert [row.name for row in (ring.find(key), ring.find(late)) if row] == ["anna", "late"]
    assert ring.find(late + "x") is None and ring.find("") is None

    with edit_keys(path) as rows:
        del rows["late"]
    assert ring.find(late) is None and ring.find(key) is not None

    good = path.read_bytes()
    for damaged in ("damaged", "[" * 200_000):
        path.write_text(damaged)
        assert ring.find(key) is None
    os.unlink(path)
    assert ring.find(key) is None
    path.write_bytes(good)
    path.chmod(0o600)
    assert ring.find(key) is not None


def test_temporarily_unreadable_keys_file_is_read_at_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    key = add(path, "anna")
    ring = KeyRing(path)
    late = add(path, "late")

    def too_many_files(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", too_many_files)
        assert ring.find(key) is None and ring.find(late) is None
        assert len(caplog.records) == 1, "repeated requests must not log again"
    assert ring.find(key) is not None and ring.find(late) is not None


def test_requests_without_a_valid_key_are_refused(tmp_path: Path) -> None:
    stillroom, path = MultiTenantFake(), tmp_path / "keys.json"
    key = add(path, "anna")
    with guarded(path, stillroom) as client:
        assert client.post("/v1/chat/completions", json=QUESTION, headers=bearer(key)).status_code == 200
        for headers in (
            {},
            bearer(key + "x"),
            {"authorization": "Bearer"},
            {"authorization": key},
            {"authorization": f"Basic {key}"},
        ):
            for where in (
                "/v1/models",
                "/v1/search",
                "/metrics",
                "/openapi.json",
                "/nowhere",
                "/console",
                "/v1/requests",
            ):
                response = client.get(where, headers=headers)
                assert response.status_code == 401, (where, headers)
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/healthz").json() == {"status": "ok"}
    assert len(stillroom.asked) == 1
    counted = stillroom.metrics.render().decode()
    for where in ("/v1/search", "/metrics", "/openapi.json", "other"):
        assert f'stillroom_http_requests_total{{path="{where}",status="401"}}' in counted, (
            "must be refused before the route"
        )
    assert "nowhere" not in counted


def test_tenant_without_operator_key_sees_no_figures_of_the_server(tmp_path: Path) -> None:
    stillroom, path = MultiTenantFake(), tmp_path / "keys.json"
    key, operator = add(path, "anna", "legal"), add(path, "ops", is_operator=True)
    with guarded(path, stillroom) as client:
        assert client.get("/metrics", headers=bearer(key)).json()["error"]["code"] == "operator_only"
        assert client.get("/healthz", headers=bearer(key)).json() == {"status": "ok"}
        assert "stillroom_documents" in client.get("/metrics", headers=bearer(operator)).text
        assert client.get("/healthz", headers=bearer(operator)).json()["documents"] == 1


def test_key_reaches_only_its_tenants_documents(tmp_path: Path) -> None:
    stillroom, path = MultiTenantFake(), tmp_path / "keys.json"
    keys = {tenant: add(path, tenant, tenant) for tenant in ("default", "legal", "sales")}
    with guarded(path, stillroom) as client:
        for tenant, document in (("legal", "legal.md"), ("sales", "sales.md"), ("default", "docs/keys.md")):
            found = client.post("/v1/search", json={"query": "keys"}, headers=bearer(keys[tenant])).json()
            assert [one["document"] for one in found["results"]] == [document]
            answer = client.post("/v1/chat/completions", json=QUESTION, headers=bearer(keys[tenant])).json()
            assert [one["document"] for one in answer["stillroom"]["sources"]] == [document]
    assert stillroom.made == {tenant: tmp_path / "tenants" / tenant for tenant in ("legal", "sales")}


def test_tenant_without_a_folder_is_refused_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stillroom, path = MultiTenantFake(), tmp_path / "keys.json"
    key = add(path, "anna")
    with serving(as_stillroom(stillroom), keys=KeyRing(path)) as url, httpx.Client(base_url=url) as client:
        late = add(path, "late", "legal")
        for _ in range(2):
            refused = client.get("/v1/models", headers=bearer(late))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_not_served")
        assert client.get("/v1/models", headers=bearer(key)).status_code == 200
    [record] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "'legal'" in record.message and "--tenants DIR" in record.message


def test_knowledge_base_that_cannot_be_opened_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MultiTenantFake):
        def for_tenant(self, path: Path, tenant: str, *, create: bool = True) -> FakeStillroom:
            raise CorruptKnowledgeBaseError(f"{path} is damaged")

    path = tmp_path / "keys.json"
    key = add(path, "anna", "legal")
    with guarded(path, Broken()) as client:
        assert client.get("/v1/models", headers=bearer(key)).status_code == 500
    [record] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "legal is damaged" in record.message


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "host_not_allowed"),
        ({"host": "evil.example:8321"}, "host_not_allowed"),
        ({"host": "127.0.0.1.evil.example"}, "host_not_allowed"),
        ({"host": ""}, "host_not_allowed"),
        ({"host": "[::"}, "host_not_allowed"),
        ({"origin": "https://evil.example"}, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "http://["}, "origin_not_allowed"),
    ],
)
def test_foreign_pages_cannot_use_a_server_without_keys(
    any_client: httpx.Client, headers: dict[str, str], code: str
) -> None:
    response = any_client.post("/v1/search", json={"query": "keys"}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, code)


def test_own_page_is_accepted(any_client: httpx.Client) -> None:
    host = f"localhost:{any_client.base_url.port}"
    headers = {"host": host, "origin": f"http://{host}"}
    assert any_client.post("/v1/search", json={"query": "keys"}, headers=headers).status_code == 200


CHAT = "https://chat.example.org"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.mark.parametrize("has_keys", [False, True])
def test_pages_of_allowed_origins_may_use_a_server(tmp_path: Path, has_keys: bool) -> None:
    """Their browser asks first, without a key."""
    stillroom = FakeStillroom(config=StillroomConfig(server=ServerConfig(allowed_origins=f"{CHAT}, http://[::1]:3000")))
    path = tmp_path / "keys.json"
    key = bearer(add(path, "anna", "default"))
    options = {"keys": KeyRing(path)} if has_keys else {}
    with serving(as_stillroom(stillroom), **options) as url, httpx.Client(base_url=url, timeout=20) as client:
        asked = client.options("/v1/search", headers={"origin": CHAT, **PREFLIGHT})
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == CHAT
        found = client.post("/v1/search", json={"query": "keys"}, headers={"origin": CHAT, **key})
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == CHAT
        assert {"x-request-id", "retry-after"} <= set(found.headers["access-control-expose-headers"].split(", "))
        foreign = client.options("/v1/search", headers={"origin": "https://evil.example", **PREFLIGHT})
        assert foreign.status_code == 400 and "access-control-allow-origin" not in foreign.headers
        refused = client.post("/v1/search", json={"query": "keys"}, headers={"origin": "https://evil.example"})
        assert refused.status_code == (401 if has_keys else 403)


@pytest.mark.parametrize("origins", ["*", "chat.example.org", "https://chat.example.org/", "null", "file:///x"])
def test_settings_that_are_no_origins_are_refused(origins: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        origins_of(origins)
    with pytest.raises(ConfigError, match="is no origin"):  # before the server listens
        check_access(ServerConfig(allowed_origins=origins))


def test_keys_file_is_readable_json(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "anna", "legal", requests_per_minute=5)
    [row] = json.loads(path.read_text())["keys"]
    assert (row["name"], row["tenant"], row["requests_per_minute"], row["is_operator"]) == ("anna", "legal", 5, False)
