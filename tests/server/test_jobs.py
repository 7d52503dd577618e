"""Long uploads: their jobs (HTTP 202), and cancellation by request, disconnect and shutdown."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillroom.config.settings import ServerConfig, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.retrieval.ingest import AddProgress
from stillroom.retrieval.uploads import UploadResult
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.auth.tenants import Tenants
from tests.server.fakes import FakeStillroom, as_stillroom, until
from tests.server.harness import running, serving
from tests.server.test_documents import ROUTE, as_json
from tests.server.test_keys import add, bearer

JOBS = "/v1/jobs"


class SlowStillroom(FakeStillroom):
    """Its uploads run in steps until `go_on` is set."""

    def __init__(self, **config: Any) -> None:
        super().__init__(config=StillroomConfig(server=ServerConfig(**config)))
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self.ended: list[str] = []

    def upload(
        self, files: Any, progress: Any = None, metadata: Any = None, stop: Cancellation | None = None
    ) -> list[UploadResult]:
        name = files[0][0]
        self.begun.append(name)
        assert progress is not None and stop is not None
        progress(AddProgress(0, 1, 5, 10, 3, name))
        try:
            while not self.go_on.wait(0.001):
                stop.check()
            return super().upload(files, progress, metadata)
        finally:
            self.ended.append(name)

    def for_tenant(self, *_: object, create: bool = True) -> FakeStillroom:
        return FakeStillroom()


@pytest.fixture
def slow() -> SlowStillroom:
    return SlowStillroom()


@pytest.fixture
def client(slow: SlowStillroom) -> Iterator[httpx.Client]:
    with serving(as_stillroom(slow)) as url, httpx.Client(base_url=url, timeout=20) as client:
        try:
            yield client
        finally:
            slow.go_on.set()


def status(client: httpx.Client, job: dict[str, Any]) -> str:
    return str(client.get(f"{JOBS}/{job['id']}").json()["status"])


@pytest.mark.parametrize(
    "asks", [{"params": {"wait": "0"}}, {"headers": {"prefer": "respond-async"}}, {"headers": {"prefer": "wait=0"}}]
)
def test_long_upload_is_answered_with_a_job(client: httpx.Client, slow: SlowStillroom, asks: dict[str, Any]) -> None:
    response = client.post(ROUTE, json=as_json(a_md="one"), **asks)

    job = response.json()
    assert (response.status_code, job["object"], job["data"]) == (202, "documents.job", [])
    assert job["status"] == "in_progress"
    until(lambda: client.get(f"{JOBS}/{job['id']}").json()["progress"] is not None)
    shown = client.get(str(response.url.join(response.headers["location"]))).json()
    assert (shown["progress"]["num_bytes_done"], shown["finished_at"]) == (5, None)

    slow.go_on.set()
    until(lambda: status(client, job) == "completed")
    [one] = client.get(f"{JOBS}/{job['id']}").json()["data"]
    assert (one["name"], one["status"]) == ("a.md", "added")
    assert client.get(JOBS).json()["data"][0]["id"] == job["id"]
    assert client.delete(f"{JOBS}/{job['id']}").json()["status"] == "completed", "a finished job must not change"


def test_upload_within_the_wait_is_answered_with_its_results(client: httpx.Client, slow: SlowStillroom) -> None:
    slow.go_on.set()
    response = client.post(ROUTE, json=as_json(a_md="one"))
    assert (response.status_code, response.json()["data"][0]["status"]) == (200, "added")


def test_upload_wait_is_a_setting(slow: SlowStillroom) -> None:
    stillroom = SlowStillroom(upload_wait_s=0.0)
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url, timeout=20) as client:
        assert client.post(ROUTE, json=as_json(a_md="one")).status_code == 202
        stillroom.go_on.set()


def test_failed_job_has_an_error(client: httpx.Client, slow: SlowStillroom) -> None:
    slow.go_on.set()
    job = client.post(ROUTE, json=as_json(bad_md="\0"), params={"wait": 0}).json()
    until(lambda: status(client, job) == "failed")
    assert client.get(f"{JOBS}/{job['id']}").json()["error"]["code"] == "document_unreadable"


def test_deleting_a_job_cancels_it_after_its_step(client: httpx.Client, slow: SlowStillroom) -> None:
    first = client.post(ROUTE, json=as_json(a_md="one"), params={"wait": 0}).json()
    second = client.post(ROUTE, json=as_json(b_md="two"), params={"wait": 0}).json()
    until(lambda: slow.begun == ["a.md"])

    assert client.delete(f"{JOBS}/{second['id']}").status_code == 200
    until(lambda: status(client, second) == "cancelled")
    assert slow.ended == [], "a waiting job must be cancelled at once"
    assert client.delete(f"{JOBS}/{first['id']}").json()["status"] in ("cancelling", "cancelled")
    until(lambda: status(client, first) == "cancelled")
    assert (slow.begun, slow.ended) == (["a.md"], ["a.md"])
    slow.go_on.set()
    assert client.post(ROUTE, json=as_json(c_md="three")).status_code == 200, "the next upload must begin"


def test_job_can_be_cancelled_at_the_concurrency_limit() -> None:
    stillroom = SlowStillroom(max_concurrent=1)
    with serving(as_stillroom(stillroom)) as url, httpx.Client(base_url=url, timeout=20) as client:
        job = client.post(ROUTE, json=as_json(a_md="one"), params={"wait": 0}).json()
        assert client.post(ROUTE, json=as_json(b_md="two")).status_code == 429
        assert client.delete(f"{JOBS}/{job['id']}").status_code == 200
        until(lambda: status(client, job) == "cancelled")
        stillroom.go_on.set()


@pytest.mark.parametrize("is_stream", [True, False])
def test_disconnect_cancels_an_upload(client: httpx.Client, slow: SlowStillroom, is_stream: bool) -> None:
    if is_stream:
        headers = {"accept": "text/event-stream"}
        with client.stream("POST", ROUTE, json=as_json(a_md="one"), headers=headers) as response:
            assert response.headers["x-stillroom-job"].startswith("job-")
            until(lambda: slow.begun == ["a.md"])
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post(ROUTE, json=as_json(a_md="one"), timeout=0.3)
    until(lambda: client.get(JOBS).json()["data"][0]["status"] == "cancelled")
    assert slow.ended == slow.begun, "cancelled while it waits, or after its step"
    assert "uploads/a.md" not in slow.texts


def test_disconnect_after_a_job_reply_cancels_nothing(slow: SlowStillroom) -> None:
    with serving(as_stillroom(slow)) as url:
        job = httpx.post(f"{url}{ROUTE}", json=as_json(a_md="one"), params={"wait": 0}).json()
        slow.go_on.set()
        until(lambda: httpx.get(f"{url}{JOBS}/{job['id']}").json()["status"] == "completed")


def test_stopping_server_cancels_jobs_after_the_grace_period() -> None:
    stillroom = SlowStillroom(grace_s=0.0)
    with running(as_stillroom(stillroom)) as server:
        job = httpx.post(f"{server.url}{ROUTE}", json=as_json(a_md="one"), params={"wait": 0}).json()
        assert job["status"] == "in_progress"
        until(lambda: stillroom.begun == ["a.md"])
    assert stillroom.ended == ["a.md"] and "uploads/a.md" not in stillroom.texts


def test_tenant_sees_only_its_own_jobs(slow: SlowStillroom, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    own, other = bearer(add(path, "anna")), bearer(add(path, "ben", "legal"))
    tenants = Tenants(as_stillroom(slow), tmp_path / "tenants")
    with serving(as_stillroom(slow), tenants=tenants, keys=KeyRing(path)) as url:
        job = httpx.post(f"{url}{ROUTE}", json=as_json(a_md="one"), params={"wait": 0}, headers=own).json()
        for method in ("GET", "DELETE"):
            response = httpx.request(method, f"{url}{JOBS}/{job['id']}", headers=other)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "job_not_found")
        assert httpx.get(f"{url}{JOBS}", headers=other).json()["data"] == []
        assert httpx.get(f"{url}{JOBS}/{job['id']}", headers=own).json()["status"] == "in_progress"
        slow.go_on.set()


def test_old_finished_jobs_are_dropped(
    client: httpx.Client, slow: SlowStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillroom.server.routes.jobs._MAX_FINISHED", 2)
    slow.go_on.set()
    for number in range(4):
        client.post(ROUTE, json=as_json(**{f"{number}_md": "text"}))
    assert len(client.get(JOBS).json()["data"]) <= 3
